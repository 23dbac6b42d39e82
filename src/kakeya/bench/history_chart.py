"""Something over a long history in one picture, both axes logarithmic. Pure."""

import math
from dataclasses import dataclass
from html import escape

from kakeya.bench.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, frame
from kakeya.bench.curve import MOST_TICKS, draw_lines
from kakeya.bench.turns_chart import LogCurve


@dataclass(frozen=True)
class HistoryCurve(LogCurve):
    """Values over tokens of history. The x axis has ticks at powers of two; `mark` names a place on it."""

    mark: tuple[float, str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", [f"{2**power:,}" for power in self._ticked_powers])

    @property
    def _powers(self) -> tuple[int, int]:
        """The powers of two between which the axis lies."""
        places = [place for place in self.at if place > 0] or [1.0]
        first, last = math.floor(math.log2(min(places))), math.ceil(math.log2(max(places)))
        return first, max(last, first + 1)

    @property
    def _ticked_powers(self) -> list[int]:
        """Few enough of them, and always the last."""
        first, last = self._powers
        step = -(-(last - first) // (MOST_TICKS - 1))
        return sorted(range(last, first - 1, -step))

    def x(self, place: float) -> float:
        return self.x_of(2.0 ** self._ticked_powers[int(place)])

    def x_of(self, number: float) -> float:
        first, last = self._powers
        left, right = LEFT + 8, WIDTH - RIGHT - 24
        return left + (right - left) * (math.log2(max(number, 2.0**first)) - first) / (last - first)


def history_curve(chart: HistoryCurve) -> str:
    """One line per series, and the mark."""
    return frame(chart, _draw)


def _draw(chart: Chart) -> list[str]:
    assert isinstance(chart, HistoryCurve)
    return [*_mark(chart), *draw_lines(chart)]


def _mark(chart: HistoryCurve) -> list[str]:
    first, last = chart._powers
    if chart.mark is None or not 2**first <= chart.mark[0] <= 2**last:
        return []
    x, words = chart.x_of(chart.mark[0]), escape(chart.mark[1])
    return [
        f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>',
        f'<text class="axis" x="{x - 6:.1f}" y="{HEIGHT - BOTTOM - 8}" text-anchor="end">{words}</text>',
    ]
