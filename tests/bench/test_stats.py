import math
from typing import Any

import pytest

from kakeya.bench.report import as_json
from kakeya.bench.stats import Samples, known, median_of_ratios, percentile, ratio, slope


def test_samples_are_summarised() -> None:
    told = {"median": 2.0, "min": 1.0, "max": 3.0, "samples": [3.0, 1.0, 2.0]}
    assert as_json(Samples.of([3.0, 1.0, 2.0])) == told
    assert Samples.of([1.0, 2.0, 4.0, 9.0]).median == 3.0
    for nothing_to_judge in ((), (0.0, 0.0), (1.0, math.nan), (1.0, math.inf)):
        assert Samples(nothing_to_judge).median is None


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (ratio(6.0, 3.0), 2.0),
        *((found, None) for found in (ratio(None, 3), ratio(6, None), ratio(6, 0), ratio(0, 6))),
        (median_of_ratios([2, 40, 3], [1, 20, 100]), 2.0),  # neighbours are compared
        *((found, None) for found in (median_of_ratios([], []), median_of_ratios([1, 0], [1, 1]))),
        *((percentile([4, 1, 3, 2], at), value) for at, value in ((0, 1), (25, 1.75), (50, 2.5), (95, 3.85))),
        (percentile([4, 1, 3, 2], 100), 4.0),
        (percentile([7], 95), 7.0),
        (percentile([], 50), None),
        (known([1.0, None, 0.0]), [1.0, 0.0]),
        (slope([(0, 1), (1, 3), (2, 5)]), 2.0),
        *((found, None) for found in (slope([(0, 1), (0, 9)]), slope([]))),
    ],
)
def test_figures_of_several_measurements(found: Any, expected: Any) -> None:
    assert found == pytest.approx(expected) if expected is not None else found is None
