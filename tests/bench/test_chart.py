"""Charts as SVG: axes, lines, bars, marks."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from kakeya.bench.chart import MOST_LINES, MOST_POINTS, MOST_TICKS, draw, picture, round_up
from kakeya.bench.tables import Chart, Series


def shapes(svg: str, tag: str) -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(svg).iter() if each.tag.rpartition("}")[2] == tag]


def texts(svg: str) -> dict[str, ElementTree.Element]:
    return {each.text or "": each for each in shapes(svg, "text")}


def points(svg: str) -> list[list[tuple[float, ...]]]:
    """Those of each line."""
    lines = shapes(svg, "polyline")
    return [[tuple(map(float, p.split(","))) for p in (line.get("points") or "").split()] for line in lines]


def curve(at: list[float], *series: list[float | None], **how: object) -> str:
    named = [Series(name, values) for name, values in zip("abc", series, strict=False)]
    return draw(Chart("T", "ms", "tokens", at, named, **how))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "end"), [(0.0, 1.0), (-3, 1.0), (1.0, 1.0), (3, 4), (9, 10), (0.03, 0.04), (150, 200)]
)
def test_axes_end_at_a_round_number(value: float, end: float) -> None:
    assert round_up(value) == pytest.approx(end)


@pytest.mark.parametrize("bars", [True, False])
def test_each_measurement_over_a_label_has_a_dot_or_a_bar_of_its_height(bars: bool) -> None:
    series = [Series("a", [3, 5]), Series("b", [2, None])]
    svg = draw(Chart("Title <1>", "tokens/s", "history", ["64", "1,024"], series, bars=bars))
    drawn = [each for each in shapes(svg, "rect" if bars else "circle") if each.find("title") is not None]
    hints = ["a, 64: 3 tokens/s", "a, 1,024: 5 tokens/s", "b, 64: 2 tokens/s"]
    assert [each.findtext("title") for each in drawn] == hints
    # The axis runs from 0 at y = 236 to 8 at y = 40.
    tops = [float(each.get("y" if bars else "cy", "")) for each in drawn]
    assert tops == [pytest.approx(236 - 196 * value / 8, abs=0.06) for value in (3, 5, 2)]
    assert 'aria-label="Title &lt;1&gt;"' in svg
    assert {"a", "b", "64", "1,024", "history", "tokens/s"} <= texts(svg).keys()
    if bars:
        feet = [top + float(each.get("height", "")) for top, each in zip(tops, drawn, strict=True)]
        assert feet == [pytest.approx(236, abs=0.11)] * 3
        spans = sorted((float(bar.get("x", "")), float(bar.get("width", ""))) for bar in drawn)
        assert all(x + width <= following for (x, width), (following, _) in pairwise(spans))


@pytest.mark.parametrize("bars", [True, False])
@pytest.mark.parametrize("log", [True, False])
def test_a_chart_without_measurements_is_still_a_chart(bars: bool, log: bool) -> None:
    for at in ([], ["a"], [1.0]):
        chart = Chart("t", "u", "x", at, [Series("a", [None for _ in at])], bars=bars, log_x=log, log_y=log)
        assert not re.search("nan|inf", picture(chart))
        ElementTree.fromstring(picture(chart))


def test_points_stand_at_their_numbers() -> None:
    svg = curve([0, 50, 100], [1.0, 2.0, 4.0], [2, None, 2])
    first, second = points(svg)
    assert first == [(72.0, 187.0), (336.0, 138.0), (600.0, 40.0)]
    assert len(second) == 2
    assert shapes(svg, "circle") == []
    assert {"0", "20", "40", "60", "80", "100"} <= texts(svg).keys()


def test_too_many_points_become_medians_of_neighbours() -> None:
    count = 3 * MOST_POINTS
    line, unknown = points(
        curve([float(n) for n in range(count)], [float(n % 3) for n in range(count)], [None] * count)
    )
    assert len(line) == MOST_POINTS
    assert len({y for _, y in line}) == 1  # the median of 0, 1 and 2 everywhere
    assert unknown == []


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.25, 11.0], [0.2, 0.5, 1, 2, 5, 10, 20]),
        ([1.0, None, 1.0], [1, 2]),
        ([0.5, 5.0], [0.5, 1, 2, 5]),
        ([0.002, 300.0], [0.002, 0.01, 0.1, 1, 10, 100, 500]),
        ([None], [1, 2]),
        ([0.0, 0.5], [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]),
    ],
)
def test_lines_of_a_logarithmic_grid_are_round_and_few(
    values: list[float | None], ticks: list[float]
) -> None:
    svg = curve([float(n) for n in range(len(values))], values, log_y=True)
    labels = [each.text for each in shapes(svg, "text") if each.get("x") == "56.0"][1:]
    assert labels == [f"{tick:,.6g}" for tick in ticks]
    assert len(ticks) <= MOST_LINES


def test_every_factor_is_equally_high() -> None:
    (line,) = points(curve([0, 1, 2], [0.1, 1.0, 10.0], log_y=True))
    assert [y for _, y in line] == [236.0, 138.0, 40.0]
    (line,) = points(curve([0, 1], [0.0, 0.5], log_y=True))
    assert line[0][1] == 236.0, "what is below the axis stands at its foot"


def test_a_long_history_has_ticks_at_powers_of_two() -> None:
    svg = curve([100.0, 131072.0], [1, 2], log_x=True, mark=(8192.0, "trained to 8,192"))
    labels = [text for text in texts(svg) if re.fullmatch(r"[\d,]{3,}", text)]
    assert labels[-1] == "131,072"
    assert len(labels) <= MOST_TICKS
    (line,) = points(svg)
    mark = next(each for each in shapes(svg, "line") if each.get("x1") == each.get("x2"))
    assert line[0][0] < float(mark.get("x1", "")) < line[1][0]
    assert "trained to 8,192" in texts(svg)
    assert "trained" not in texts(curve([100.0, 4096.0], [1, 2], log_x=True, mark=(8192.0, "trained")))


def test_who_stopped_is_marked_where_it_stopped() -> None:
    ends = {"b": "stopped at turn 1", "c": "never began"}
    svg = curve([1.0, 10.0], [1.0, 2.0], [3.0, None], [None, None], log_y=True, ends=ends)
    assert [each.get("class") for each in shapes(svg, "circle")] == ["s1"]
    assert texts(svg)["stopped at turn 1"].get("text-anchor") == "start"
    assert "never began" not in texts(svg)
    late = curve([1.0, 10.0], [1.0, 2.0], ends={"a": "ended"})
    assert texts(late)["ended"].get("text-anchor") == "end"
