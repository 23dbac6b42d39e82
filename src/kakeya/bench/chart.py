"""Small charts as inline SVG. Colours come from the page's style sheet, so they follow light and dark."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 44
GRID_LINES = 4


@dataclass(frozen=True)
class Series:
    """One line or one colour of bars; None where there is no measurement."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class Chart:
    """Values over labelled places on the x axis; the y axis starts at zero."""

    title: str
    unit: str
    x_title: str
    labels: Sequence[str]
    series: Sequence[Series]

    @property
    def top(self) -> float:
        """The end of the y axis: a round number that no value exceeds."""
        values = [value for series in self.series for value in series.values if value is not None]
        return round_up(max(values, default=0.0))

    @property
    def ticks(self) -> Sequence[float]:
        """Where the grid has its lines."""
        return [self.top * line / GRID_LINES for line in range(GRID_LINES + 1)]

    def x(self, place: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (place + 0.5) / len(self.labels)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.top


def round_up(value: float) -> float:
    """The next number of the form 1, 2, 4 or 8 times a power of ten; 1 when there is nothing positive."""
    if value <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10, 20) if step * power >= value)


def line_chart(chart: Chart) -> str:
    """One line per series, with a dot at every measurement."""
    return frame(chart, _lines)


def bar_chart(chart: Chart) -> str:
    """Bars side by side, one colour per series."""
    return frame(chart, _bars)


def frame(chart: Chart, draw: Callable[[Chart], list[str]]) -> str:
    """The axes, the grid and the legend of a chart around what `draw` makes of its values."""
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">',
        *_grid(chart),
        *_legend(chart),
        *draw(chart),
        "</svg>",
    ]
    return "\n".join(parts)


def _grid(chart: Chart) -> list[str]:
    parts = [
        f'<text class="axis" x="{LEFT - 8}" y="{TOP - 16}" text-anchor="end">{escape(chart.unit)}</text>'
    ]
    for value in chart.ticks:
        y = chart.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="axis" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:,.6g}</text>'
        )
    for place, label in enumerate(chart.labels):
        parts.append(_text(chart.x(place), HEIGHT - BOTTOM + 16, label))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, chart.x_title))
    return parts


def _text(x: float, y: float, text: str) -> str:
    return f'<text class="axis" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'


def _legend(chart: Chart) -> list[str]:
    parts = []
    x = LEFT
    for number, series in enumerate(chart.series):
        parts.append(f'<rect class="s{number}" x="{x}" y="{TOP - 26}" width="10" height="10" rx="2"/>')
        parts.append(f'<text class="axis" x="{x + 15}" y="{TOP - 17}">{escape(series.name)}</text>')
        x += 32 + 7 * len(series.name)
    return parts


def _lines(chart: Chart) -> list[str]:
    parts = []
    for number, series in enumerate(chart.series):
        points = [(chart.x(i), chart.y(v), i) for i, v in enumerate(series.values) if v is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        parts.append(f'<polyline class="line l{number}" points="{path}"/>')
        for x, y, place in points:
            dot = f'<circle class="s{number}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
            parts.append(f"{dot}{_hint(chart, series, place)}</circle>")
    return parts


def _bars(chart: Chart) -> list[str]:
    parts = []
    group = 0.76 / max(1, len(chart.series))
    for number, series in enumerate(chart.series):
        for place, value in enumerate(series.values):
            if value is None:
                continue
            left = chart.x(place - 0.38 + group * number)
            width = chart.x(place - 0.38 + group * (number + 0.94)) - left
            bar = (
                f'<rect class="s{number}" x="{left:.1f}" y="{chart.y(value):.1f}" width="{width:.1f}"'
                f' height="{chart.y(0) - chart.y(value):.1f}" rx="2">'
            )
            parts.append(f"{bar}{_hint(chart, series, place)}</rect>")
    return parts


def _hint(chart: Chart, series: Series, place: int) -> str:
    text = f"{series.name}, {chart.labels[place]}: {series.values[place]:,.6g} {chart.unit}"
    return f"<title>{escape(text)}</title>"
