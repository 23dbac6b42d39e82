"""Settings of sampling: a bad value is named, and the default is greedy."""

import math

import pytest

from kakeya.errors import InvalidArgument
from kakeya.types import SamplingParams


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-1, math.nan, math.inf, 101, "hot", None, True]),
        ("top_k", [-1, 2**40]),
        ("top_p", [0, -0.1, 1.1, math.nan]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0, 5e-324, -1, math.nan, math.inf]),
        ("presence_penalty", [math.nan, 1000]),
        ("frequency_penalty", [math.nan, -1000]),
        ("seed", [-1, 2**64]),
        ("top_logprobs", [-1, 21]),
        ("logit_bias", [{5: math.nan}, {5: 1e9}]),
    ],
)
def test_sampling_names_what_is_wrong(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(InvalidArgument, match=name):
            SamplingParams(**{name: value})


def test_sampling_defaults_are_greedy() -> None:
    params = SamplingParams()
    assert params.is_greedy
    assert not params.has_penalties
    assert SamplingParams(frequency_penalty=0.1).has_penalties
