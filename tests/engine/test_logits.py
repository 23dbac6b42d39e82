"""Arithmetic on rows of logits: the leaders of a row, and token ids that are none."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from kakeya.engine import logits as row_arithmetic
from kakeya.engine.logits import check_vocabulary, leaders
from kakeya.engine.sampler import SampleRequest, sample
from kakeya.types import SamplingParams


@settings(deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 6000),
    st.sampled_from(["flat", "gaussian", "peaked", "ties", "masked"]),
    st.floats(0.01, 1.0, exclude_max=True),
)
def test_leaders_agree_with_a_full_sort(seed: int, size: int, shape: str, share: float) -> None:
    rng = np.random.default_rng(seed)
    scores = {
        "flat": lambda: rng.normal(size=size) * 1e-3,
        "gaussian": lambda: rng.normal(size=size) * 4,
        "peaked": lambda: -8 * np.log(1 + rng.permutation(size)),
        "ties": lambda: rng.integers(0, 3, size=size).astype(float),
        "masked": lambda: np.where(rng.random(size) < 0.7, -np.inf, rng.normal(size=size)),
    }[shape]()
    scores[0] = np.max(scores, initial=0.0)
    scores -= scores.max()
    order = np.argsort(-scores, kind="stable")
    count = 1 + int(share * (size - 1))
    assert leaders(scores, np.ones_like, count).tolist() == sorted(order[:count].tolist())
    target = share * np.exp(scores).sum()
    nucleus = leaders(scores, np.exp, target)
    assert nucleus.tolist() == sorted(order[: nucleus.size].tolist())
    assert np.exp(scores[nucleus]).sum() >= target * (1 - 1e-12)
    assert np.exp(scores[order[: nucleus.size - 1]]).sum() < target * (1 + 1e-12)


def test_a_large_vocabulary_is_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    argsort = np.argsort

    def recording(values: Any, **options: Any) -> Any:
        sizes.append(len(values))
        return argsort(values, **options)

    monkeypatch.setattr(row_arithmetic.np, "argsort", recording)
    flat = torch.randn(1, 49152, generator=torch.Generator().manual_seed(0))
    for params in (
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=50),
        SamplingParams(top_logprobs=20),
    ):
        sample(flat, [SampleRequest(params, 0)])
    assert len(sizes) == 3
    assert max(sizes) <= 1024


def test_a_bias_inside_the_vocabulary_is_accepted() -> None:
    check_vocabulary(SamplingParams(logit_bias={0: 1.0, 7: -1.0}), 8)
