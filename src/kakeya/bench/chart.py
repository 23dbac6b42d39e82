"""Draws charts as SVG. Colours come from the page's style sheet, so they follow light and dark."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import Any

from kakeya.bench.tables import Chart, Series

WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 44
GRID_LINES = 4
MOST_TICKS = 7
# A line of more points than pixels only makes the page heavy.
MOST_POINTS = 320
# A logarithmic axis lies between two of these numbers, and has no more lines than that.
ROUND = [float(f"{step}e{power}") for power in range(-3, 7) for step in (1, 2, 5)]
MOST_LINES = 9


def style() -> str:
    """The style sheet of pages and pictures."""
    return files("kakeya.bench").joinpath("data", "page.css").read_text(encoding="utf-8")


@cache
def templates() -> dict[str, Any]:
    """Those in data/, which escape what they are given. The first call takes time and memory."""
    import jinja2

    loader = jinja2.PackageLoader("kakeya.bench", "data")
    found = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"px": "{:.1f}".format, "number": "{:,.6g}".format}
    return {name: found.get_template(name) for name in ("page.html", "chart.svg")}


def picture(chart: Chart) -> str:
    """A chart as an SVG file of its own, for a README."""
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">'
    ground = '<rect width="100%" height="100%" style="fill: var(--page)"/>'
    rules = f"<style>\n{style()}svg {{ margin: 0; height: 100%; }}\n</style>"
    return f"{opening}\n{rules}\n{ground}\n{draw(chart)}\n</svg>\n"


def draw(chart: Chart) -> str:
    """The chart as an element of a page."""
    svg: str = templates()["chart.svg"].render(plot=_Plot(chart), chart=chart)
    return svg


def round_up(value: float) -> float:
    """The next number of the form 1, 2, 4 or 8 times a power of ten; 1 when there is nothing positive."""
    if value <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10, 20) if step * power >= value)


@dataclass(frozen=True)
class _Axis:
    """Numbers along an axis, the ticks among them, and where they stand between 0 and 1."""

    first: float
    last: float
    ticks: Sequence[float]
    log: bool = False

    def share(self, number: float) -> float:
        if not self.log:
            return (number - self.first) / (self.last - self.first)
        return math.log(max(number, self.first) / self.first) / math.log(self.last / self.first)


def _value_axis(values: Sequence[float], *, log: bool) -> _Axis:
    if not log:
        top = round_up(max(values, default=0.0))
        return _Axis(0.0, top, [top * line / GRID_LINES for line in range(GRID_LINES + 1)])
    first = max((number for number in ROUND if number <= min(values, default=1.0)), default=ROUND[0])
    last = next((each for each in ROUND if each >= max(values, default=1.0) and each > first), ROUND[-1])
    every = [number for number in ROUND if first <= number <= last]
    if len(every) > MOST_LINES:
        every = [first, *(each for each in every if math.log10(each).is_integer()), last]
    return _Axis(first, last, every, log=True)


def _place_axis(places: Sequence[float], *, log: bool) -> _Axis:
    """Ticks at round numbers from zero, or at powers of two: few enough of them, and always the last."""
    if not log:
        end = max(places, default=0.0) or 1.0
        step = round_up(end / (MOST_TICKS - 1))
        return _Axis(0.0, end, [step * tick for tick in range(1 + int(end / step + 1e-9))])
    positive = [place for place in places if place > 0] or [1.0]
    first, last = math.floor(math.log2(min(positive))), math.ceil(math.log2(max(positive)))
    last = max(last, first + 1)
    step = -(-(last - first) // (MOST_TICKS - 1))
    ticks = [2.0**power for power in sorted(range(last, first - 1, -step))]
    return _Axis(2.0**first, 2.0**last, ticks, log=True)


class _Plot:
    """A chart with its axes laid out in pixels, for the template."""

    width, height, left, right, top, bottom = WIDTH, HEIGHT, LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM

    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        self.series: Sequence[Series] = chart.series
        self.at: list[float] = [float(place) for place in range(len(chart.at))]
        if chart.numeric:
            self.at = [place for place in _thinned([float(each) for each in chart.at]) if place is not None]
            self.series = [Series(each.name, _thinned(each.values)) for each in chart.series]
        values = [value for series in self.series for value in series.values if value is not None]
        self.y_axis = _value_axis(values, log=chart.log_y)
        self.x_axis = _place_axis(self.at, log=chart.log_x)

    def x(self, place: float) -> float:
        """Where a number stands, which needs some room beside it for its label; or the middle of a label."""
        if not self.chart.numeric:
            return LEFT + (WIDTH - LEFT - RIGHT) * (place + 0.5) / len(self.at)
        left, right = LEFT + 8, WIDTH - RIGHT - 24
        return left + (right - left) * self.x_axis.share(place)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * self.y_axis.share(value)

    @property
    def x_labels(self) -> list[tuple[float, str]]:
        if self.chart.numeric:
            return [(tick, f"{tick:,.6g}" if tick < 1e6 else f"{tick:,.0f}") for tick in self.x_axis.ticks]
        return list(zip(self.at, map(str, self.chart.at), strict=True))

    @property
    def legend(self) -> list[tuple[int, str]]:
        """Each name and where it begins, from the width of those before."""
        names = [series.name for series in self.chart.series]
        starts = accumulate((32 + 7 * len(name) for name in names[:-1]), initial=LEFT)
        return list(zip(starts, names, strict=False))

    @property
    def mark(self) -> tuple[float, str] | None:
        mark, axis = self.chart.mark, self.x_axis
        return (self.x(mark[0]), mark[1]) if mark and axis.first <= mark[0] <= axis.last else None

    def points(self, series: Series) -> list[tuple[int, float, float]]:
        """The place and the pixels of each measurement."""
        pairs = zip(self.at, series.values, strict=True)
        return [(n, self.x(x), self.y(y)) for n, (x, y) in enumerate(pairs) if y is not None]

    def bars(self, number: int, series: Series) -> list[tuple[int, float, float, float]]:
        """The place of each measurement, the left edge of its bar, the bar's width and its upper edge."""
        group = 0.76 / max(1, len(self.series))
        width = self.x(0.94 * group) - self.x(0)
        return [(n, self.x(n - 0.38 + group * number), width, y) for n, _, y in self.points(series)]

    def hint(self, series: Series, place: int) -> str:
        return f"{series.name}, {self.chart.at[place]}: {series.values[place]:,.6g} {self.chart.unit}"


def _thinned(values: Sequence[float | None]) -> list[float | None]:
    """Many points become the medians of their neighbourhoods."""
    size = -(-len(values) // MOST_POINTS) or 1
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    measured = [[value for value in group if value is not None] for group in groups]
    return [statistics.median(group) if group else None for group in measured]
