"""The native choice of tokens against the engine's sampler, which defines it."""

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kakeya.engine import sampler
from kakeya.engine.cpu.sampler import native_sampler
from kakeya.engine.sampler import SampleRequest, sample
from kakeya.errors import InvalidArgument, StepFailed
from kakeya.kernels import Kernels
from kakeya.kernels.choice import ChoiceRequest, ChoiceStatus
from kakeya.types import SamplingParams, TokenEvent

GREEDY = ChoiceRequest(0.0, 0, 1.0, -math.inf, 1.0, 0.0, 0.0, 0.0)
ALMOST_ONE = 1 - 2**-53
SHAPES = ("gaussian", "flat", "peaked", "ties", "constant", "masked", "extreme", "lone")


def random_row(rng: np.random.Generator, shape: str, size: int) -> NDArray[np.float32]:
    """Logits of one kind. At least one is finite and none is NaN or +inf."""
    normal = rng.normal(size=size)
    rows: dict[str, Callable[[], NDArray[np.float64]]] = {
        "gaussian": lambda: normal * 3,
        "flat": lambda: normal * 1e-3,
        "peaked": lambda: normal * 2 - 6 * np.log(1 + rng.permutation(size)),
        "ties": lambda: rng.integers(-3, 3, size).astype(np.float64) / 2,
        "constant": lambda: np.full(size, normal[0]),
        "masked": lambda: np.where(rng.random(size) < 0.6, -np.inf, normal),
        "extreme": lambda: rng.choice([-3e38, 3e38, 0.0, -0.0, 1e-40, -1e-40, 88.0, -5.0], size),
        "lone": lambda: np.where(np.arange(size) == rng.integers(size), 2.5, -np.inf),
    }
    row: NDArray[np.float32] = rows[shape]().astype(np.float32)
    if np.isneginf(row).all():
        row[rng.integers(size)] = 1.0
    return row


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    """Any combination; each setting is left alone half of the time."""

    def maybe(default: float, *choices: float) -> float:
        return default if rng.random() < 0.5 else float(rng.choice(choices))

    biased = rng.integers(0, vocab, rng.integers(1, 6)) if rng.random() < 0.2 else ()
    return SamplingParams(
        temperature=float(rng.choice([0.0, 1.0, 0.7, 1.0, 2.0, 100.0, 0.01, 1e-10, 5e-324])),
        top_k=int(maybe(0, 1, 2, 3, 50, 500, 5000, vocab // 2, vocab, 2**31 - 1)),
        top_p=maybe(1.0, 0.95, 0.5, 0.9, 0.99, 1e-12, 1 - 1e-12, float(rng.random()) or 1.0),
        min_p=maybe(0.0, 0.05, 0.5, 1.0, 1e-9, 1e-300),
        repetition_penalty=maybe(1.0, 1.1, 0.8, 100.0, 0.01),
        presence_penalty=maybe(0.0, 0.5, -1.5, 100.0),
        frequency_penalty=maybe(0.0, 0.3, -0.2),
        logit_bias={int(token): float(rng.choice([-1e4, -1.0, 0.5, 7.0, 1e4])) for token in biased},
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        logprobs=bool(rng.random() < 0.3),
        top_logprobs=int(maybe(0, 1, 3, 20)),
    )


def random_request(rng: np.random.Generator, row: NDArray[np.float32]) -> SampleRequest:
    """A request that the row can answer: its mask leaves a token that is possible."""
    recent = array("i", rng.integers(0, row.size, rng.integers(0, 1200)).tolist())
    mask = None
    if rng.random() < 0.3:
        allowed = rng.random(row.size) < rng.choice([0.001, 0.5, 0.999])
        allowed[rng.choice(np.flatnonzero(np.isfinite(row)))] = True
        mask = np.packbits(allowed, bitorder="little").tobytes()
    return SampleRequest(random_params(rng, row.size), int(rng.integers(0, 2**62)), recent, mask)


def random_batch(seed: int, vocab: int, rows: int) -> tuple[torch.Tensor, list[SampleRequest]]:
    rng = np.random.default_rng(seed)
    logits = [random_row(rng, str(rng.choice(SHAPES)), vocab) for _ in range(rows)]
    return torch.from_numpy(np.stack(logits)), [random_request(rng, row) for row in logits]


def differences(ours: Sequence[TokenEvent], theirs: Sequence[TokenEvent]) -> list[int]:
    """The rows where two samplers disagree: tokens to the letter, log-probabilities up to rounding."""
    return [row for row, pair in enumerate(zip(ours, theirs, strict=True)) if not _same(*pair)]


def _same(ours: TokenEvent, theirs: TokenEvent) -> bool:
    if ours.token_id != theirs.token_id or (ours.logprob is None) is not (theirs.logprob is None):
        return False
    if [each.token_id for each in ours.top_logprobs] != [each.token_id for each in theirs.top_logprobs]:
        return False
    mine = [ours.logprob or 0.0, *(each.logprob for each in ours.top_logprobs)]
    yours = [theirs.logprob or 0.0, *(each.logprob for each in theirs.top_logprobs)]
    return np.allclose(mine, yours, rtol=1e-12, atol=1e-12)


def compare(kernels: Kernels, logits: torch.Tensor, requests: Sequence[SampleRequest]) -> None:
    before = logits.clone()
    ours, theirs = native_sampler(kernels)(logits, requests), sample(logits, requests)
    wrong = differences(ours, theirs)
    assert not wrong, [(row, ours[row], theirs[row], requests[row].params) for row in wrong]
    assert torch.equal(logits, before)


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, where a tiny temperature meets a huge logit
@pytest.mark.parametrize(
    ("vocab", "rows", "batches"),
    [
        *((vocab, 16, 12) for vocab in (1, 2, 3, 7, 127, 128, 129, 1000)),
        (6000, 16, 6),
        (49_152, 8, 3),
        (151_936, 8, 2),
    ],
)
@pytest.mark.slow
def test_every_setting_gives_the_samplers_tokens(
    kernels: Kernels, vocab: int, rows: int, batches: int
) -> None:
    for seed in range(batches):
        compare(kernels, *random_batch(1000 * vocab + seed, vocab, rows))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.slow
def test_many_draws_from_every_kind_of_row(kernels: Kernels, shape: str) -> None:
    rng = np.random.default_rng(len(shape))
    row = torch.from_numpy(random_row(rng, shape, 700))
    for settings in ({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.02}, {"top_k": 600, "top_p": 0.99}):
        requests = [
            SampleRequest(SamplingParams(temperature=0.8, seed=position % 3, **settings), position)
            for position in range(200)
        ]
        compare(kernels, row.expand(200, -1), requests)


@pytest.mark.parametrize("number", [0.0, 2**-53, 0.25, 0.5, 0.75, ALMOST_ONE])
@pytest.mark.parametrize("top_p", [1.0, 0.25, 0.5, 0.75, 0.3])
def test_numbers_and_targets_on_a_border(
    kernels: Kernels, number: float, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal weights add up exactly, so float32 leaves what falls between two tokens in doubt."""
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: number)
    monkeypatch.setattr(Kernels, "uniform", lambda self, seed, position: number)
    for vocab in (4, 100, 512):
        rows = torch.full((2, vocab), 1.5)
        rows[1, 1::2] = -math.inf
        compare(kernels, rows, [SampleRequest(SamplingParams(temperature=1.0, top_p=top_p), 0)] * 2)


def test_uniform_numbers_are_the_samplers(best: Kernels) -> None:
    pairs = [(0, 0), (2**64 - 1, 2**63), (3, 2**64 - 1), *((seed, 7 * seed) for seed in range(50))]
    assert [best.uniform(*pair) for pair in pairs] == [sampler.uniform(*pair) for pair in pairs]


def test_a_row_depends_neither_on_its_company_nor_on_threads(kernels: Kernels) -> None:
    logits, requests = random_batch(5, 9000, 24)
    choose = native_sampler(kernels)
    kernels.set_threads(1)
    expected = choose(logits, requests)
    assert any(event.logprob is not None for event in expected)
    for threads in (2, 3):
        kernels.set_threads(threads)
        assert choose(logits, requests) == expected
    alone = [choose(logits[row : row + 1], requests[row : row + 1])[0] for row in range(24)]
    assert alone == expected
    wide = torch.zeros(24, 9100)
    wide[:, 50:9050] = logits
    assert choose(wide[:, 50:9050].flip(0), requests[::-1]) == expected[::-1]


def test_logits_are_left_as_they_were(kernels: Kernels) -> None:
    logits, requests = random_batch(8, 1000, 40)
    assert any(each.params.has_penalties and each.recent for each in requests)
    before = logits.clone()
    native_sampler(kernels)(logits, requests)
    assert torch.equal(logits, before)
    nothing_left = GREEDY._replace(presence_penalty=1.0, recent=array("i", [3, 999, 3]), mask=b"")
    assert kernels.choose(logits[:1], [nothing_left])[0].status == ChoiceStatus.NO_TOKEN
    assert torch.equal(logits, before)


def test_instruction_sets_choose_the_same(kernels: Kernels) -> None:
    """Fused and separate roundings differ in a last bit, which no draw comes near."""
    logits, requests = random_batch(6, 3000, 40)
    assert not differences(native_sampler(kernels)(logits, requests), sample(logits, requests))


def failure(choose: sampler.Sampler, logits: torch.Tensor, requests: Sequence[SampleRequest]) -> Exception:
    with pytest.raises((StepFailed, InvalidArgument)) as caught:
        choose(logits, requests)
    return caught.value


@pytest.mark.parametrize(
    ("row", "request_"),
    [
        ([0.0, math.nan, 1.0], SampleRequest(SamplingParams(), 0)),
        ([0.0, -math.nan, math.inf], SampleRequest(SamplingParams(temperature=1.0), 0)),
        ([math.inf, 0.0, 1.0], SampleRequest(SamplingParams(), 0)),
        ([-math.inf] * 3, SampleRequest(SamplingParams(temperature=1.0, top_k=1), 0)),
        ([1.0, 0.0, 1.0], SampleRequest(SamplingParams(), 0, mask=b"")),
        ([1.0, -math.inf, 1.0], SampleRequest(SamplingParams(temperature=1.0), 0, mask=b"\x02")),
        ([1.0, 0.0, 1.0], SampleRequest(SamplingParams(presence_penalty=1.0), 0, [0, -1, 7])),
        ([1.0, 0.0, 1.0], SampleRequest(SamplingParams(presence_penalty=1.0), 0, [0, 7, 3])),
        ([1.0, 0.0, 1.0], SampleRequest(SamplingParams(logit_bias={1: 1.0, 3: 1.0}), 0)),
    ],
)
def test_errors_are_the_samplers(kernels: Kernels, row: list[float], request_: SampleRequest) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], row, row])
    requests = [SampleRequest(SamplingParams(), 0), request_, request_]
    ours, theirs = failure(native_sampler(kernels), logits, requests), failure(sample, logits, requests)
    assert type(ours) is type(theirs)
    assert str(ours) == str(theirs)


def test_a_logit_that_is_no_number_comes_before_other_errors(kernels: Kernels) -> None:
    logits = torch.tensor([[1.0, 2.0], [math.nan, 2.0]])
    requests = [SampleRequest(SamplingParams(), 0, mask=b""), SampleRequest(SamplingParams(), 0)]
    assert "nan in row 1" in str(failure(native_sampler(kernels), logits, requests))
    assert "nan in row 1" in str(failure(sample, logits, requests))


def test_a_nan_is_found_wherever_it_is(kernels: Kernels) -> None:
    for place in (0, 15, 127, 128, 299):
        logits = torch.full((1, 300), -math.inf)
        logits[0, 5] = 1.0
        assert kernels.choose(logits, [GREEDY])[0].token == 5
        logits[0, place] = -math.nan
        assert kernels.choose(logits, [GREEDY])[0].status == ChoiceStatus.NOT_FINITE


def test_rows_after_a_refused_one_are_chosen(kernels: Kernels) -> None:
    """What a thread keeps for its next row is clean even if the last one was refused half way."""
    logits = torch.randn(3, 500)
    penalized = GREEDY._replace(presence_penalty=50.0, recent=array("i", [int(logits[2].argmax())]))
    wrong = penalized._replace(recent=array("i", [3, 500]))
    kernels.set_threads(1)
    chosen = kernels.choose(logits, [penalized, wrong, penalized])
    assert [each.status for each in chosen] == [
        ChoiceStatus.CHOSEN,
        ChoiceStatus.NOT_A_TOKEN,
        ChoiceStatus.CHOSEN,
    ]
    assert chosen[1].token == 500
    assert chosen[2].token == int(logits[2].topk(2).indices[1])


def test_no_rows_give_no_tokens(best: Kernels) -> None:
    assert native_sampler(best)(torch.empty(0, 4), []) == []


def test_as_many_requests_as_rows(best: Kernels) -> None:
    with pytest.raises(AssertionError, match="1 rows of logits for 2 requests"):
        best.choose(torch.zeros(1, 4), [GREEDY] * 2)


@pytest.mark.parametrize(
    ("logits", "changes", "words"),
    [
        (torch.zeros(1, 4, dtype=torch.float64), {}, "logits must be float32"),
        (torch.zeros(4, 1).t().expand(1, 4)[:, ::2], {}, "contiguous rows"),
        (torch.zeros(1, 0), {}, "a column for each token"),
        (torch.zeros(1, 4), {"recent": array("q", [1])}, "elements of"),
        (torch.zeros(1, 4), {"bias_ids": array("q", [1])}, "as many bias values as ids"),
    ],
)
def test_bad_arguments(best: Kernels, logits: torch.Tensor, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        best.choose(logits, [GREEDY._replace(**changes)])


def test_a_bias_outside_the_vocabulary_is_not_followed(best: Kernels) -> None:
    biased = GREEDY._replace(bias_ids=array("q", [4]), bias_values=array("d", [1.0]))
    (choice,) = best.choose(torch.zeros(1, 4), [biased])
    assert (choice.status, choice.token) == (ChoiceStatus.NOT_A_TOKEN, 4)


def test_penalties_take_any_sequence_of_tokens(best: Kernels) -> None:
    request = SampleRequest(SamplingParams(repetition_penalty=2.0), 0, [1])
    assert native_sampler(best)(torch.tensor([[2.0, 3.0]]), [request]) == [TokenEvent(0)]
