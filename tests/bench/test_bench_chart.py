"""Charts as SVG: axes, lines, bars, marks."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from kakeya.bench.chart import (
    BOTTOM,
    HEIGHT,
    MOST_LINES,
    MOST_POINTS,
    MOST_TICKS,
    TOP,
    _Plot,
    draw,
    picture,
    round_up,
)
from kakeya.bench.tables import Chart, Series, over

LABELLED = [Series("a", [3, 5]), Series("b", [2, None])]
LINES = Chart("Title <1>", "tokens/s", "history", ["64", "1,024"], LABELLED)
BARS = Chart("Title <1>", "tokens/s", "history", ["64", "1,024"], LABELLED, bars=True)


def shapes(svg: str, tag: str) -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(svg).iter() if each.tag.rpartition("}")[2] == tag]


def texts(svg: str) -> dict[str, ElementTree.Element]:
    return {each.text or "": each for each in shapes(svg, "text")}


def points(svg: str) -> list[list[tuple[float, ...]]]:
    """Those of each line."""
    lines = shapes(svg, "polyline")
    return [[tuple(map(float, p.split(","))) for p in (line.get("points") or "").split()] for line in lines]


def curve(at: list[float], *series: Series, **how: object) -> str:
    return draw(Chart("T", "ms", "tokens", at, series, **how))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "end"), [(0.0, 1.0), (-3, 1.0), (1.0, 1.0), (3, 4), (9, 10), (0.03, 0.04), (150, 200)]
)
def test_axes_end_at_a_round_number(value: float, end: float) -> None:
    assert round_up(value) == pytest.approx(end)


def test_lines_over_labels_have_a_dot_for_each_measurement_at_its_height() -> None:
    dots = shapes(draw(LINES), "circle")
    assert [dot.findtext("title") for dot in dots] == [
        "a, 64: 3 tokens/s",
        "a, 1,024: 5 tokens/s",
        "b, 64: 2 tokens/s",
    ]
    # The axis runs from 0 at y = 236 to 8 at y = 40.
    heights = [float(dot.get("cy", "")) for dot in dots]
    assert heights == [pytest.approx(236 - 196 * value / 8, abs=0.06) for value in (3, 5, 2)]


def test_bars_are_as_tall_as_their_values_and_do_not_overlap() -> None:
    bars = [bar for bar in shapes(draw(BARS), "rect") if bar.find("title") is not None]
    spans = sorted((float(bar.get("x", "")), float(bar.get("width", ""))) for bar in bars)
    assert len(spans) == 3
    assert all(x + width <= following for (x, width), (following, _) in pairwise(spans))
    heights = [float(bar.get("height", "")) for bar in bars]
    assert heights[0] / heights[1] == pytest.approx(3 / 5, abs=0.01)


@pytest.mark.parametrize("bars", [True, False])
@pytest.mark.parametrize("log", [True, False])
def test_a_chart_without_measurements_is_still_a_chart(bars: bool, log: bool) -> None:
    for at in ([], ["a"], [1.0]):
        chart = Chart("t", "u", "x", at, [Series("a", [None for _ in at])], bars=bars, log_x=log, log_y=log)
        assert not re.search("nan|inf", picture(chart))
        ElementTree.fromstring(picture(chart))


def test_points_stand_at_their_numbers() -> None:
    svg = curve([0, 50, 100], Series("a", [1.0, 2.0, 4.0]), Series("b", [2, None, 2]))
    first, second = points(svg)
    assert [x for x, _ in first] == [72.0, 336.0, 600.0]
    assert [y for _, y in first] == [187.0, 138.0, 40.0]
    assert len(second) == 2
    assert shapes(svg, "circle") == []
    assert {"0", "20", "40", "60", "80", "100"} <= texts(svg).keys()


def test_too_many_points_become_medians_of_neighbours() -> None:
    count = 3 * MOST_POINTS
    values = [float(place % 3) for place in range(count)]
    (line,) = points(curve([float(n) for n in range(count)], Series("a", values)))
    assert len(line) == MOST_POINTS
    assert len({y for _, y in line}) == 1  # the median of 0, 1 and 2 everywhere
    (unknown,) = points(curve([float(n) for n in range(count)], Series("a", [None] * count)))
    assert unknown == []


def plot(*values: float | None) -> _Plot:
    at = [float(place) for place in range(len(values))]
    return _Plot(Chart("t", "s", "x", at, [Series("a", values)], log_y=True))


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((0.25, 11.0), [0.2, 0.5, 1, 2, 5, 10, 20]),
        ((1.0, None, 1.0), [1, 2]),
        ((0.5, 5.0), [0.5, 1, 2, 5]),
        ((0.002, 300.0), [0.002, 0.01, 0.1, 1, 10, 100, 500]),
        ((None,), [1, 2]),
        ((0.0, 0.5), [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]),
    ],
)
def test_lines_of_a_logarithmic_grid_are_round_and_few(
    values: tuple[float | None, ...], ticks: list[float]
) -> None:
    assert plot(*values).y_axis.ticks == ticks
    assert len(ticks) <= MOST_LINES


def test_every_factor_is_equally_high() -> None:
    chart = plot(0.1, 10.0)
    assert chart.y(0.1) == HEIGHT - BOTTOM
    assert chart.y(10.0) == TOP
    assert chart.y(1.0) == pytest.approx((TOP + HEIGHT - BOTTOM) / 2)
    assert chart.y(0.0) == chart.y(0.1)


def test_a_long_history_has_ticks_at_powers_of_two() -> None:
    svg = curve([100.0, 131072.0], Series("a", [1, 2]), log_x=True, mark=(8192.0, "trained to 8,192"))
    labels = [text for text in texts(svg) if re.fullmatch(r"[\d,]{3,}", text)]
    assert labels[-1] == "131,072"
    assert len(labels) <= MOST_TICKS
    (line,) = points(svg)
    mark = next(each for each in shapes(svg, "line") if each.get("x1") == each.get("x2"))
    assert line[0][0] < float(mark.get("x1", "")) < line[1][0]
    assert "trained to 8,192" in texts(svg)
    beyond = curve([100.0, 4096.0], Series("a", [1, 2]), log_x=True, mark=(8192.0, "trained"))
    assert "trained" not in texts(beyond)


def test_who_stopped_is_marked_where_it_stopped() -> None:
    ends = {"b": "stopped at turn 1", "c": "never began"}
    series = [Series("a", [1.0, 2.0]), Series("b", [3.0, None]), Series("c", [None, None])]
    svg = curve([1.0, 10.0], *series, log_y=True, ends=ends)
    assert [each.get("class") for each in shapes(svg, "circle")] == ["s1"]
    assert texts(svg)["stopped at turn 1"].get("text-anchor") == "start"
    assert "never began" not in texts(svg)
    late = curve([1.0, 10.0], Series("a", [1.0, 2.0]), ends={"a": "ended"})
    assert texts(late)["ended"].get("text-anchor") == "end"


def test_figures_of_rows_become_lines() -> None:
    rows = [{"n": 1.0}, {"n": None}]
    chart = over("t", "ms", "x", ["a", "b"], rows, {"n": lambda row: row["n"]}, 1000, bars=True)
    assert (chart.series, chart.bars) == ([Series("n", [1000.0, None])], True)
