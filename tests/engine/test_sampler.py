"""Sampling: each parameter's distribution, independence from the batch, and the odd corners."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats

from kakeya.engine import sampler
from kakeya.engine.logits import check_vocabulary
from kakeya.engine.sampler import SampleRequest, sample, uniform
from kakeya.errors import InvalidArgument, StepFailed
from kakeya.types import SamplingParams, TokenEvent

LOGITS = [1.5, -0.5, 0.0, 2.0, -2.0, 1.0, 0.5, -1.0]
RECENT = [3, 3, 3, 1, 5, 5, 0]


def expected_distribution(
    logits: Sequence[float], params: SamplingParams, recent: Sequence[int]
) -> list[float]:
    """The rules as a user would write them down, one token at a time, with a full sort."""
    adjusted = list(logits)
    for token in set(recent):
        value = adjusted[token]
        value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        adjusted[token] = value - params.presence_penalty - params.frequency_penalty * recent.count(token)
    for token, bias in params.logit_bias.items():
        adjusted[token] += bias
    scores = [(value - max(adjusted)) / params.temperature for value in adjusted]
    weights = [math.exp(score) for score in scores]
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if params.top_k:
        order = order[: params.top_k]
    total, kept, mass = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if params.top_p < 1.0 and mass >= params.top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    kept = [token for token in kept if weights[token] >= params.min_p * weights[order[0]]]
    return [weights[t] / sum(weights[k] for k in kept) if t in kept else 0.0 for t in range(len(weights))]


def set_values(params: SamplingParams) -> dict[str, Any]:
    plain = asdict(SamplingParams())
    return {name: value for name, value in asdict(params).items() if value != plain[name]}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=1.0, repetition_penalty=1.7),
        SamplingParams(temperature=1.0, presence_penalty=1.2),
        SamplingParams(temperature=1.0, frequency_penalty=0.6),
        SamplingParams(temperature=1.0, logit_bias={4: 3.0, 3: -1.0}),
        SamplingParams(temperature=1.5, top_k=6, top_p=0.9, min_p=0.25),
        SamplingParams(
            temperature=0.8,
            top_k=5,
            top_p=0.95,
            min_p=0.05,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            logit_bias={2: 1.0},
            seed=2**64 - 1,
        ),
    ],
    ids=lambda params: ",".join(f"{name}={value}" for name, value in set_values(params).items()),
)
@pytest.mark.slow
@pytest.mark.unwatched
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    draws = 3000
    requests = [SampleRequest(params, position, RECENT) for position in range(draws)]
    chosen = sample(torch.tensor([LOGITS]).expand(draws, -1), requests)
    counts = np.bincount([each.token_id for each in chosen], minlength=len(LOGITS))
    expected = np.array(expected_distribution(LOGITS, params, RECENT)) * draws
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert possible.sum() > 1
    assert stats.chisquare(counts[possible], expected[possible]).pvalue > 1e-3


def test_the_seeds_draw_the_same_distribution_as_the_positions() -> None:
    draws = 3000
    requests = [SampleRequest(SamplingParams(temperature=1.0, seed=seed), 7) for seed in range(draws)]
    chosen = sample(torch.tensor([LOGITS]).expand(draws, -1), requests)
    counts = np.bincount([each.token_id for each in chosen], minlength=len(LOGITS))
    expected = np.array(expected_distribution(LOGITS, requests[0].params, ())) * draws
    assert stats.chisquare(counts, expected).pvalue > 1e-3


def test_uniform_numbers_are_uniform_and_independent() -> None:
    numbers = np.array([[uniform(seed, position) for position in range(64)] for seed in range(64)])
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 1e-3
    assert len(np.unique(numbers)) == numbers.size
    assert abs(stats.pearsonr(numbers[:, :-1].ravel(), numbers[:, 1:].ravel()).statistic) < 0.05
    assert abs(stats.pearsonr(numbers[:-1].ravel(), numbers[1:].ravel()).statistic) < 0.05


def philox(counter: int, key: int) -> int:
    """The first word of Philox4x64-10 as its authors define it."""
    mask = 2**64 - 1
    words = [counter >> shift & mask for shift in (0, 64, 128, 192)]
    keys = [key & mask, key >> 64 & mask]
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [
            second >> 64 ^ words[1] ^ keys[0],
            second & mask,
            first >> 64 ^ words[3] ^ keys[1],
            first & mask,
        ]
        keys = [keys[0] + 0x9E3779B97F4A7C15 & mask, keys[1] + 0xBB67AE8584CAA73B & mask]
    return words[0]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**63))
def test_uniform_numbers_are_philox_and_never_change(seed: int, position: int) -> None:
    # A saved session must go on as it would have: the numbers are part of what a seed means.
    assert philox(0, 0) == 0x16554D9ECA36314C  # the authors' known answer
    assert uniform(seed, position) == (philox(position + 1, seed) >> 11) / 2**53


finite = st.floats(-30, 30, width=32)


@st.composite
def requests_and_logits(draw: st.DrawFn) -> tuple[torch.Tensor, list[SampleRequest]]:
    vocab = draw(st.integers(2, 12))
    count = draw(st.integers(1, 6))
    token = st.integers(0, vocab - 1)
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        top_k=st.integers(0, vocab + 2),
        top_p=st.sampled_from([0.2, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.1, 1.0]),
        repetition_penalty=st.sampled_from([0.8, 1.0, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        frequency_penalty=st.sampled_from([-0.2, 0.0]),
        logit_bias=st.dictionaries(token, finite, max_size=2),
        seed=st.integers(0, 2**64 - 1),
        logprobs=st.booleans(),
        top_logprobs=st.integers(0, 3),
    )
    recent = st.lists(token, max_size=5)
    request = st.builds(SampleRequest, params, st.integers(0, 10**9), recent, st.none())
    rows = draw(st.lists(st.lists(finite, min_size=vocab, max_size=vocab), min_size=count, max_size=count))
    return torch.tensor(rows), draw(st.lists(request, min_size=count, max_size=count))


@settings(deadline=None)
@given(requests_and_logits(), st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_its_company(
    batch: tuple[torch.Tensor, list[SampleRequest]], rng: Any
) -> None:
    logits, requests = batch
    together = sample(logits, requests)
    alone = [sample(logits[row : row + 1], [request])[0] for row, request in enumerate(requests)]
    order = rng.sample(range(len(requests)), len(requests))
    shuffled = sample(logits[order], [requests[row] for row in order])
    assert together == alone
    assert shuffled == [together[row] for row in order]


@settings(deadline=None)
@given(requests_and_logits())
def test_only_a_possible_token_is_chosen_and_logits_stay(
    batch: tuple[torch.Tensor, list[SampleRequest]],
) -> None:
    logits, requests = batch
    before = logits.clone()
    for row, request, chosen in zip(logits.tolist(), requests, sample(logits, requests), strict=True):
        params = request.params
        if params.is_greedy:
            expected = expected_distribution(row, replace(params, temperature=1.0), request.recent)
            assert expected[chosen.token_id] == pytest.approx(max(expected))
        else:
            # A touch wider, so that rounding at a filter's edge does not count.
            wider = replace(
                params, top_p=min(1.0, params.top_p * (1 + 1e-9)), min_p=params.min_p * (1 - 1e-9)
            )
            assert expected_distribution(row, wider, request.recent)[chosen.token_id] > 0
    assert torch.equal(logits, before)


def choose(logits: Sequence[float], **settings_: Any) -> TokenEvent:
    return sample(torch.tensor([list(logits)]), [SampleRequest(SamplingParams(**settings_), 5)])[0]


def test_greedy_takes_the_best_and_the_first_of_equals() -> None:
    rows = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0], [1.0, 1.0, 1.0]])
    chosen = sample(rows, [SampleRequest(SamplingParams(), position) for position in range(3)])
    assert chosen == [TokenEvent(1), TokenEvent(0), TokenEvent(0)]


def test_greedy_honours_penalties_and_bias() -> None:
    request = SampleRequest(SamplingParams(repetition_penalty=2.0), 0, [1])
    assert sample(torch.tensor([[2.0, 3.0]]), [request]) == [TokenEvent(0)]
    assert choose([2.0, 3.0], logit_bias={0: 2.0}).token_id == 0


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 4), []) == []


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-10])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert choose([1.0, 1.1, -3e38, 0.9], temperature=temperature).token_id == 1


@pytest.mark.parametrize(
    "extreme",
    [{"top_k": 1}, {"top_p": 1e-12}, {"min_p": 1.0}, {"temperature": 100.0, "top_k": 1}],
    ids=str,
)
def test_the_narrowest_filters_keep_the_best(extreme: dict[str, Any]) -> None:
    drawn = {
        sample(
            torch.tensor([LOGITS]), [SampleRequest(SamplingParams(**{"temperature": 1.0, **extreme}), at)]
        )[0]
        for at in range(50)
    }
    assert drawn == {TokenEvent(3)}


def test_min_p_of_one_keeps_equals() -> None:
    params = SamplingParams(temperature=1.0, min_p=1.0)
    drawn = sample(
        torch.tensor([[2.0, 1.0, 2.0]]).expand(40, -1), [SampleRequest(params, p) for p in range(40)]
    )
    assert {each.token_id for each in drawn} == {0, 2}


def test_a_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    for position in range(30):
        requests = [
            SampleRequest(SamplingParams(temperature=2.0, top_k=k), position) for k in (0, 8, 2**31 - 1)
        ]
        assert len(set(sample(torch.tensor([LOGITS]).expand(3, -1), requests))) == 1


def test_a_bias_against_everything_still_gives_a_token() -> None:
    bias = dict.fromkeys(range(8), -1e4)
    assert choose(LOGITS, temperature=1.0, logit_bias=bias, top_p=1e-6).token_id == 3


def test_masked_tokens_are_never_chosen() -> None:
    masked = [-math.inf, 0.0, -math.inf, 0.5]
    for extra in ({}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 1e-9}, {"repetition_penalty": 1.3}):
        params = SamplingParams(temperature=50.0, **extra)
        rows = torch.tensor([masked]).expand(50, -1)
        drawn = sample(rows, [SampleRequest(params, position, [0, 1]) for position in range(50)])
        assert {each.token_id for each in drawn} == {1, 3}


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2**-53, 3)])
def test_the_ends_of_the_unit_interval_hit_tokens_with_weight(
    number: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: number)
    assert choose([-math.inf, 0.1, 0.2, 0.3, -math.inf], temperature=1.0).token_id == token


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_fail_the_step(bad: float) -> None:
    rows = torch.tensor([[0.0, 1.0], [bad, 1.0]])
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        with pytest.raises(StepFailed, match=f"{bad} in row 1"):
            sample(rows, [SampleRequest(params, 0)] * 2)


def test_logits_without_any_possible_token_fail_the_step() -> None:
    with pytest.raises(StepFailed, match="-inf in row 0"):
        choose([-math.inf, -math.inf])


@pytest.mark.parametrize("token", [-1, 8, 10**9])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"logit_bias: {token} is not a token id; 0 to 7 are"):
        choose(LOGITS, logit_bias={token: 1.0})
    with pytest.raises(InvalidArgument, match="logit_bias"):
        check_vocabulary(SamplingParams(logit_bias={0: 1.0, token: 1.0}), 8)
    with pytest.raises(InvalidArgument, match=rf"recent tokens: {token} is not"):
        sample(torch.tensor([LOGITS]), [SampleRequest(SamplingParams(presence_penalty=1.0), 0, [0, token])])


def test_logprobs_are_the_models_own() -> None:
    reference = torch.tensor(LOGITS, dtype=torch.float64).log_softmax(0)
    chosen = choose(LOGITS, temperature=0.3, logit_bias={4: 50.0}, top_k=2, logprobs=True, top_logprobs=3)
    assert chosen.token_id == 4
    assert chosen.logprob == pytest.approx(float(reference[4]), abs=1e-12)
    assert [each.token_id for each in chosen.top_logprobs] == [3, 0, 5]
    for each in chosen.top_logprobs:
        assert each.logprob == pytest.approx(float(reference[each.token_id]), abs=1e-12)


def test_logprobs_come_only_when_asked_for() -> None:
    assert choose(LOGITS) == TokenEvent(3)
    assert choose(LOGITS, logprobs=True).top_logprobs == ()
    assert choose(LOGITS, top_logprobs=1).logprob is not None
    assert len(choose(LOGITS, top_logprobs=20).top_logprobs) == 8


def test_equal_top_logprobs_are_listed_by_id() -> None:
    assert [each.token_id for each in choose([0.0, 1.0, 0.0, 1.0], top_logprobs=3).top_logprobs] == [1, 3, 0]


def test_as_many_requests_as_rows() -> None:
    with pytest.raises(AssertionError, match="1 rows of logits for 2 requests"):
        sample(torch.zeros(1, 4), [SampleRequest(SamplingParams(), 0)] * 2)
