"""Curves over a numeric axis: for more measurements than there is room for labels. SVG, like the charts."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from kakeya.bench.chart import LEFT, RIGHT, WIDTH, Chart, Series, frame, round_up

MOST_TICKS = 7
# A line of more points than pixels only makes the page heavy.
MOST_POINTS = 320


@dataclass(frozen=True)
class Curve(Chart):
    """Values over numbers: `at` says where each value of a series stands. Both axes start at zero."""

    labels: Sequence[str] = field(init=False)
    at: Sequence[float] = ()

    def __post_init__(self) -> None:
        ticks = range(1 + int(self.end / self.step + 1e-9))
        object.__setattr__(self, "labels", [f"{tick * self.step:,.6g}" for tick in ticks])

    @property
    def end(self) -> float:
        """The end of the x axis."""
        return max(self.at, default=0.0) or 1.0

    @property
    def step(self) -> float:
        """From tick to tick: a round number, so that there are not too many."""
        return round_up(self.end / (MOST_TICKS - 1))

    def x(self, place: float) -> float:
        """Where a tick stands."""
        return self.x_of(self.step * place)

    def x_of(self, number: float) -> float:
        """Where a number stands; the last label needs some room beside it."""
        left, right = LEFT + 8, WIDTH - RIGHT - 24
        return left + (right - left) * number / self.end


def curve(title: str, unit: str, x_title: str, at: Sequence[float], series: Sequence[Series]) -> str:
    """One line per series; many points are drawn as the medians of their neighbourhoods."""
    thinned = [Series(each.name, _thinned(each.values)) for each in series]
    places = [place for place in _thinned(at) if place is not None]
    return frame(Curve(title=title, unit=unit, x_title=x_title, series=thinned, at=places), draw_lines)


def _thinned(values: Sequence[float | None]) -> list[float | None]:
    size = -(-len(values) // MOST_POINTS) or 1
    return [_median(values[start : start + size]) for start in range(0, len(values), size)]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def draw_lines(chart: Chart) -> list[str]:
    """One line per series, through what it has."""
    assert isinstance(chart, Curve)
    parts = []
    for number, series in enumerate(chart.series):
        pairs = zip(chart.at, series.values, strict=True)
        path = " ".join(f"{chart.x_of(x):.1f},{chart.y(y):.1f}" for x, y in pairs if y is not None)
        parts.append(f'<polyline class="line l{number}" points="{path}"/>')
    return parts
