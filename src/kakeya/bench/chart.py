"""Draws charts as SVG. Colours come from the page's style sheet, so they follow light and dark."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

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


def picture(chart: Chart) -> str:
    """A chart as an SVG file of its own, for a README."""
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">'
    ground = '<rect width="100%" height="100%" style="fill: var(--page)"/>'
    rules = f"<style>\n{style()}svg {{ margin: 0; height: 100%; }}\n</style>"
    return f"{opening}\n{rules}\n{ground}\n{draw(chart)}\n</svg>\n"


def draw(chart: Chart) -> str:
    """The chart as an element of a page."""
    plot = _Plot(chart)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">',
        *_grid(plot),
        *_legend(chart),
        *_mark(plot),
        *(_bars(plot) if chart.bars else _lines(plot)),
        "</svg>",
    ]
    return "\n".join(parts)


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
    """A chart with its axes laid out in pixels."""

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

    def points(self, series: Series) -> list[tuple[int, float, float]]:
        """The place and the pixels of each measurement."""
        pairs = zip(self.at, series.values, strict=True)
        return [(n, self.x(x), self.y(y)) for n, (x, y) in enumerate(pairs) if y is not None]


def _thinned(values: Sequence[float | None]) -> list[float | None]:
    """Many points become the medians of their neighbourhoods."""
    size = -(-len(values) // MOST_POINTS) or 1
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    measured = [[value for value in group if value is not None] for group in groups]
    return [statistics.median(group) if group else None for group in measured]


def _grid(plot: _Plot) -> list[str]:
    parts = [_text(LEFT - 8, TOP - 16, plot.chart.unit, "end")]
    for value in plot.y_axis.ticks:
        y = plot.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{value:,.6g}", "end"))
    parts += [_text(plot.x(place), HEIGHT - BOTTOM + 16, label) for place, label in plot.x_labels]
    return [*parts, _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, plot.chart.x_title)]


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="axis" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend(chart: Chart) -> list[str]:
    parts = []
    x = LEFT
    for number, series in enumerate(chart.series):
        parts.append(f'<rect class="s{number}" x="{x}" y="{TOP - 26}" width="10" height="10" rx="2"/>')
        parts.append(_text(x + 15, TOP - 17, series.name, "start"))
        x += 32 + 7 * len(series.name)
    return parts


def _mark(plot: _Plot) -> list[str]:
    mark, axis = plot.chart.mark, plot.x_axis
    if mark is None or not axis.first <= mark[0] <= axis.last:
        return []
    x = plot.x(mark[0])
    line = f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    return [line, _text(x - 6, HEIGHT - BOTTOM - 8, mark[1], "end")]


def _lines(plot: _Plot) -> list[str]:
    """One line per series through what it has; over labels with a dot at every measurement."""
    parts = []
    for number, series in enumerate(plot.series):
        points = plot.points(series)
        path = " ".join(f"{x:.1f},{y:.1f}" for _, x, y in points)
        parts.append(f'<polyline class="line l{number}" points="{path}"/>')
        if not plot.chart.numeric:
            for place, x, y in points:
                dot = f'<circle class="s{number}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
                parts.append(f"{dot}{_hint(plot.chart, series, place)}</circle>")
        if points and series.name in plot.chart.ends:
            parts += _end(number, *points[-1][1:], plot.chart.ends[series.name])
    return parts


def _end(number: int, x: float, y: float, how: str) -> list[str]:
    """A dot, and words beside it where there is room, or else above it."""
    words = _text(x + 9, y + 4, how, "start") if x < WIDTH * 0.7 else _text(x, y - 9, how, "end")
    return [f'<circle class="s{number}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>', words]


def _bars(plot: _Plot) -> list[str]:
    parts = []
    group = 0.76 / max(1, len(plot.series))
    for number, series in enumerate(plot.series):
        for place, _, y in plot.points(series):
            left = plot.x(place - 0.38 + group * number)
            width = plot.x(place - 0.38 + group * (number + 0.94)) - left
            bar = (
                f'<rect class="s{number}" x="{left:.1f}" y="{y:.1f}" width="{width:.1f}"'
                f' height="{plot.y(plot.y_axis.first) - y:.1f}" rx="2">'
            )
            parts.append(f"{bar}{_hint(plot.chart, series, place)}</rect>")
    return parts


def _hint(chart: Chart, series: Series, place: int) -> str:
    text = f"{series.name}, {chart.at[place]}: {series.values[place]:,.6g} {chart.unit}"
    return f"<title>{escape(text)}</title>"
