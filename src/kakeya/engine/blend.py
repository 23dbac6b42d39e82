"""A moving average of measured seconds."""

_NEWEST = 0.2  # weight of the newest one: the last dozen count


def blend(before: float, newest: float) -> float:
    """`before` moved towards the newest measurement; 0 is before the first one."""
    return before + _NEWEST * (newest - before) if before else newest
