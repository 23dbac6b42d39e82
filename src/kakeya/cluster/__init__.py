"""Sessions on many machines: where each of them should live, and a simulation of a cluster that does so."""
