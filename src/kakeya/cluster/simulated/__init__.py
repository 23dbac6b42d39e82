"""The parts of a simulated cluster. Time is virtual, chance is seeded, and nothing here touches a machine."""
