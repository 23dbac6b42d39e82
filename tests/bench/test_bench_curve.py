import re
from xml.etree import ElementTree

import pytest

from kakeya.bench.chart import Series
from kakeya.bench.curve import MOST_POINTS, curve
from kakeya.bench.stats import percentile, slope


def drawn(svg: str) -> list[list[tuple[float, float]]]:
    """The points of each line."""
    lines = ElementTree.fromstring(svg).iter("polyline")
    return [[tuple(map(float, p.split(","))) for p in (line.get("points") or "").split()] for line in lines]


def test_points_stand_at_their_numbers() -> None:
    svg = curve("T", "ms", "tokens", [0, 50, 100], [Series("a", [1.0, 2.0, 4.0]), Series("b", [2, None, 2])])
    first, second = drawn(svg)
    assert [x for x, _ in first] == [72.0, 336.0, 600.0]
    assert [y for _, y in first] == [187.0, 138.0, 40.0]
    assert len(second) == 2
    labels = [text.text for text in ElementTree.fromstring(svg).iter("text")]
    assert {"0", "20", "40", "60", "80", "100"} <= set(labels)


def test_too_many_points_become_medians_of_neighbours() -> None:
    count = 3 * MOST_POINTS
    values = [float(place % 3) for place in range(count)]
    (line,) = drawn(curve("T", "u", "x", list(range(count)), [Series("a", values)]))
    assert len(line) == MOST_POINTS
    assert len({y for _, y in line}) == 1  # the median of 0, 1 and 2 everywhere


def test_unknown_values_leave_gaps() -> None:
    values = [None] * (2 * MOST_POINTS)
    (line,) = drawn(curve("T", "u", "x", list(range(len(values))), [Series("a", values)]))
    assert line == []


def test_a_curve_without_points_is_still_a_chart() -> None:
    assert not re.search("nan|inf", curve("T", "u", "x", [], [Series("a", [])]))


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (25, 1.75), (50, 2.5), (95, 3.85), (100, 4.0)])
def test_percentiles_between_samples(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(value)


def test_percentiles_of_little() -> None:
    assert percentile([], 50) is None
    assert percentile([7.0], 95) == 7.0


def test_slopes() -> None:
    assert slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2)
    assert slope([(0, 1), (0, 9)]) is None
    assert slope([]) is None
