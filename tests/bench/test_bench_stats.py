import math

import pytest
from hypothesis import given, strategies as st

from kakeya.bench.report import Report, as_json, at_least, at_most, busy, bystanders_gate
from kakeya.bench.stats import Samples, known, median_of_ratios, percentile, ratio, ratio_of_medians, slope


def test_samples_are_summarised() -> None:
    assert as_json(Samples.of([3.0, 1.0, 2.0])) == {
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
    assert Report("any", {}, {}, gates=(good, open_)).exit_status == 0
    assert Report("any", {}, {}, gates=(good, bad, open_)).exit_status == 1


@pytest.mark.parametrize(("share", "passed"), [(0.05, True), (0.051, False), (None, None)])
def test_a_busy_machine_judges_nothing(share: float | None, passed: bool | None) -> None:
    assert bystanders_gate(share).passed is passed
    assert (busy(share) is None) is (passed is not False)
    if passed is False:
        assert busy(share, "latencies") == "others used 5% of the machine, so latencies mean nothing"


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (25, 1.75), (50, 2.5), (95, 3.85), (100, 4.0)])
def test_percentiles_between_samples(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(value)


def test_percentiles_of_little() -> None:
    assert percentile([], 50) is None
    assert percentile([7.0], 95) == 7.0
    assert known([1.0, None, 0.0]) == [1.0, 0.0]


def test_slopes() -> None:
    assert slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2)
    assert slope([(0, 1), (0, 9)]) is None
    assert slope([]) is None
