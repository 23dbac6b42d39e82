import math

import pytest
from hypothesis import given, strategies as st

from kakeya.bench.gates import at_least, at_most, exit_status
from kakeya.bench.stats import Samples, median_of_ratios, ratio, ratio_of_medians


def test_samples_are_summarised() -> None:
    assert Samples((3.0, 1.0, 2.0)).to_dict() == {
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "samples": [3.0, 1.0, 2.0],
    }


@pytest.mark.parametrize("values", [(), (0.0, 0.0), (1.0, math.nan), (1.0, math.inf)])
def test_nothing_to_judge_has_no_median(values: tuple[float, ...]) -> None:
    assert Samples(values).median is None


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=9))
def test_median_is_one_of_the_values_or_between_two(values: list[float]) -> None:
    median = Samples(tuple(values)).median
    assert median is not None
    below = sum(value < median for value in values)
    above = sum(value > median for value in values)
    assert max(below, above) <= len(values) / 2


def test_ratio_needs_two_positive_numbers() -> None:
    assert ratio(6.0, 3.0) == 2.0
    assert ratio(None, 3.0) is ratio(6.0, None) is ratio(6.0, 0.0) is ratio(0.0, 6.0) is None


def test_ratio_of_medians_is_not_a_ratio_of_means() -> None:
    assert ratio_of_medians([10, 10, 1000], [5, 5, 5]) == 2.0
    assert ratio_of_medians([], [5]) is None


def test_median_of_ratios_compares_neighbours() -> None:
    assert median_of_ratios([2, 40, 3], [1, 20, 100]) == 2.0
    assert median_of_ratios([], []) is None
    assert median_of_ratios([1, 0], [1, 1]) is None


def test_gates_judge_both_directions() -> None:
    assert at_least("speed", 2.0, 2.0, absent="").passed is True
    assert at_least("speed", 1.99, 2.0, absent="").passed is False
    assert at_most("memory", 1.01, 1.01, absent="").passed is True
    assert at_most("memory", 1.02, 1.01, absent="").passed is False


def test_a_verdict_comes_with_its_numbers() -> None:
    assert at_least("speed", 1.5, 2.0, absent="").reason == "1.5 is not at least 2"
    assert at_most("memory", 1.0, 1.01, absent="").reason == "1 is at most 1.01"


def test_a_gate_without_a_value_is_null_and_says_why() -> None:
    gate = at_least("speed", None, 2.0, absent="no peer")
    assert (gate.passed, gate.reason, gate.verdict) == (None, "no peer", "not judged")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gate_does_not_judge_what_is_not_a_number(value: float) -> None:
    gate = at_most("memory", value, 1.0, absent="")
    assert gate.passed is None
    assert gate.value is None
    assert str(value) in gate.reason


def test_exit_status_is_about_failed_gates_only() -> None:
    good, bad, open_ = (at_least("g", value, 1.0, absent="x") for value in (2.0, 0.5, None))
    assert exit_status([good, open_]) == 0
    assert exit_status([good, bad, open_]) == 1
