"""Latency over turns in one picture: seconds on a logarithmic axis, since some grow a hundredfold. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from kakeya.bench.chart import BOTTOM, HEIGHT, TOP, WIDTH, Chart, Series, frame
from kakeya.bench.curve import Curve

# Between which numbers an axis may lie, in steps of 1, 2 and 5.
_ROUND = [float(f"{step}e{power}") for power in range(-3, 7) for step in (1, 2, 5)]
MOST_LINES = 9


@dataclass(frozen=True)
class LogCurve(Curve):
    """Values over numbers, on a logarithmic y axis; `ends` says of series that stopped how they did."""

    ends: Mapping[str, str] = field(default_factory=dict)

    @property
    def bottom(self) -> float:
        """The beginning of the y axis: a round number that no value is below, or the least there is."""
        least = min(self._known())
        return max((number for number in _ROUND if number <= least), default=_ROUND[0])

    @property
    def top(self) -> float:
        most = max(self._known())
        return next((number for number in _ROUND if number >= most and number > self.bottom), _ROUND[-1])

    @property
    def ticks(self) -> Sequence[float]:
        every = [number for number in _ROUND if self.bottom <= number <= self.top]
        return every if len(every) <= MOST_LINES else [self.bottom, *filter(_is_power, every), self.top]

    def y(self, value: float) -> float:
        share = math.log(max(self.bottom, value) / self.bottom) / math.log(self.top / self.bottom)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def _known(self) -> list[float]:
        return [value for series in self.series for value in series.values if value is not None] or [1.0]


def _is_power(number: float) -> bool:
    return math.log10(number).is_integer()


def latency_curve(
    title: str, turns: Sequence[float], series: Sequence[Series], ends: Mapping[str, str]
) -> str:
    """One line per contestant; where one stopped there is a mark, with how in words."""
    chart = LogCurve(title=title, unit="seconds", x_title="turn", series=series, at=turns, ends=ends)
    return frame(chart, _draw)


def _draw(chart: Chart) -> list[str]:
    assert isinstance(chart, LogCurve)
    parts = []
    for number, series in enumerate(chart.series):
        pairs = zip(chart.at, series.values, strict=True)
        points = [(chart.x_of(x), chart.y(y)) for x, y in pairs if y is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="line l{number}" points="{path}"/>')
        if points and series.name in chart.ends:
            parts += _end(number, *points[-1], chart.ends[series.name])
    return parts


def _end(number: int, x: float, y: float, how: str) -> list[str]:
    """A dot, and words beside it where there is room, or else above it."""
    has_room = x < WIDTH * 0.7
    place = (
        f'x="{x + 9:.1f}" y="{y + 4:.1f}"' if has_room else f'x="{x:.1f}" y="{y - 9:.1f}" text-anchor="end"'
    )
    return [
        f'<circle class="s{number}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>',
        f'<text class="axis" {place}>{escape(how)}</text>',
    ]
