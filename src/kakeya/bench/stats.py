"""Summaries of repeated measurements. Pure: numbers in, numbers out."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Samples:
    """Repetitions of one measurement, in the order they were taken."""

    samples: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: Iterable[float]) -> "Samples":
        return cls(tuple(values))

    @property
    def median(self) -> float | None:
        """The middle value, or None when there is nothing to judge: no samples, all zero, not a number."""
        if not any(self.samples) or not all(map(math.isfinite, self.samples)):
            return None
        return statistics.median(self.samples)

    @property
    def min(self) -> float | None:
        return min(self.samples, default=None)

    @property
    def max(self) -> float | None:
        return max(self.samples, default=None)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """How many times `denominator` fits in `numerator`; None unless both were measured and are positive."""
    if numerator is None or denominator is None or numerator <= 0 or denominator <= 0:
        return None
    return numerator / denominator


def median_of_ratios(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The middle of what each repetition says: a slow spell of the machine falls on both of its sides."""
    ratios = [ratio(*pair) for pair in zip(ours, theirs, strict=False)]
    judged = [value for value in ratios if value is not None]
    return statistics.median(judged) if judged and len(judged) == len(ratios) else None


def known(values: Iterable[float | None]) -> list[float]:
    """Those that were measured."""
    return [value for value in values if value is not None]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value that `percent` per cent do not exceed, interpolated linearly; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """How fast y grows with x, by least squares; None for fewer than two different x."""
    if len({x for x, _ in points}) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope
