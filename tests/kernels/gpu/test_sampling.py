"""Sampling on a device, against the engine's sampler."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kakeya.engine import sampler
from kakeya.engine.sampler import SampleRequest
from kakeya.kernels.gpu import SamplingScratch, SamplingTable, launches, philox, sampling_scratch
from kakeya.types import SamplingParams
from support.gpu_kernels import Bench

FILTERS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "top_p": 0.9999},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1e-30, "top_k": 5, "top_p": 0.5},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.7, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 2**31 - 1, "top_p": 0.95},
]


def table(bench: Bench, params: Sequence[SamplingParams], positions: Sequence[int]) -> SamplingTable:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(each, name) for each in params], dtype=dtype, device=bench.device)

    seeds = [each.seed - (1 << 64) if each.seed >> 63 else each.seed for each in params]
    return SamplingTable(
        *(column(name, torch.float32) if name != "top_k" else column(name, torch.int32)
          for name in ("temperature", "top_k", "top_p", "min_p")),
        torch.tensor(seeds, dtype=torch.int64, device=bench.device),
        bench.ints(list(positions)),
    )  # fmt: skip


def sample(
    bench: Bench, logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """Through the kernels, each row with a slab of its own, the last first."""
    count = len(params)
    rows = bench.rows(list(range(count - 1, -1, -1)), [0] * count, [0] * count)
    newest, sampled = bench.ints([-7] * count), bench.ints([-7] * count)
    sampling, scratch = table(bench, params, positions), SamplingScratch.of(*logits.shape, bench.device)
    bench.kernels.sample(bench.put(logits), rows, sampling, scratch, newest, sampled)
    assert not scratch.arrived.any()
    assert not scratch.bins.any()
    assert newest.flip(0).tolist() == [max(token, 0) for token in sampled.tolist()]
    return sampled.tolist()


def by_sampler(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    requests = [SampleRequest(*each) for each in zip(params, positions, strict=True)]
    return [sampled.token_id for sampled in sampler.sample(logits, requests)]


@pytest.mark.parametrize(("vocab", "ties"), [(97, False), (97, True), (9000, True), (9000, False)])
def test_tokens_are_those_of_the_sampler(bench: Bench, vocab: int, ties: bool) -> None:
    """Every filter, alone and together; with ties, whole crowds share a logit, zeros of both signs too."""
    params = [SamplingParams(**each, seed=5**20 + at) for at, each in enumerate(FILTERS)]
    positions = [100_000 * at for at in range(len(params))]
    logits = 4 * torch.randn(len(params), vocab)
    if ties:
        logits = logits.round()  # to -0.0 as well
    logits[:, 3:9] = float("-inf")
    assert sample(bench, logits, params, positions) == by_sampler(logits, params, positions)


def test_many_draws_from_few_tokens(bench: Bench) -> None:
    """Each position draws anew, and all ties of the crossing token but the first are left out."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.5, 2.0, -1.0]]).repeat(6, 1)
    for options in ({"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.6}, {"min_p": 0.3}):
        params = [SamplingParams(temperature=1.5, seed=3, **options)] * len(logits)
        positions = range(len(logits))
        tokens = sample(bench, logits, params, positions)
        assert tokens == by_sampler(logits, params, positions)
        assert len(set(tokens)) > 1


CROWDED = [
    {"temperature": 0.8, "top_k": 7000},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 0.8, "top_k": 7000, "top_p": 0.5},
    {"temperature": 0.8, "top_p": 0.9999, "min_p": 0.1},
    {"temperature": 5.0, "top_k": 9000, "top_p": 0.2},
]


def same_in_a_crowd(bench: Bench, row: Tensor) -> None:
    """The row with each of these filters."""
    params = [SamplingParams(**each, seed=7**15) for each in CROWDED]
    logits, positions = row.repeat(len(params), 1), range(len(params))
    assert sample(bench, logits, params, positions) == by_sampler(logits, params, positions)


def test_more_ties_than_are_listed(bench: Bench) -> None:
    """All tokens but a few share a logit, and the filters end among them."""
    row = torch.full((sampling_scratch.LISTED + 2000,), 2.5)
    row[::1000] = 2.75
    same_in_a_crowd(bench, row)


def test_a_sample_that_misleads(bench: Bench) -> None:
    """Every second token of the row is looked at first, and none of these weighs much, or all of it."""
    odd = torch.arange(9000) % 2 == 1
    for unseen in (3.0, -3.0):
        same_in_a_crowd(bench, torch.randn(9000) + torch.where(odd, unseen, 0.0))


def test_nearly_equal_logits(bench: Bench) -> None:
    """They differ in their last bits: the whole row falls into a bin or two, and its order still counts."""
    row = 16 + torch.randint(0, 50, (9000,)) * 2.0**-19
    same_in_a_crowd(bench, row)


def test_the_number_of_programs_changes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the sums on the way: a row's token is the same alone and in any batch."""
    if bench.kernels.name != "triton":
        pytest.skip("one program does it all")
    from kakeya.kernels.gpu import triton_sampling

    params = [SamplingParams(**each, seed=3) for each in (*FILTERS[4:6], *CROWDED[:3])]
    logits = bench.put(2 * torch.randn(len(params), 9000))
    rows, sampling = bench.rows([0] * len(params), [0] * 5, [0] * 5), table(bench, params, range(5))
    results = []
    for programs in (1, 15, 512):
        monkeypatch.setattr(triton_sampling, "_BEST_PROGRAMS", programs)
        monkeypatch.setattr(triton_sampling, "_PROGRAMS", programs)
        scratch, sampled = SamplingScratch.of(*logits.shape, bench.device), bench.ints([-7] * 5)
        bench.kernels.sample(logits, rows, sampling, scratch, bench.ints([0]), sampled)
        results.append((sampled.tolist(), scratch.segments.tolist()))
    assert results[1:] == results[:1] * 2


def test_scratch_for_other_logits_is_refused(bench: Bench) -> None:
    if bench.kernels.name != "triton":
        pytest.skip("it needs no scratch")
    rows, sampling = bench.rows([0], [0], [0]), table(bench, [SamplingParams()], [0])
    for size, complaint in (((0, 20), "1 rows, room for 0"), ((1, 5000), "another vocabulary than 20")):
        scratch = SamplingScratch.of(*size, bench.device)
        with pytest.raises(AssertionError, match=complaint):
            bench.kernels.sample(
                bench.floats(1, 20), rows, sampling, scratch, bench.ints([0]), bench.ints([0])
            )


@pytest.mark.parametrize(
    ("units", "rows", "expected"),
    [
        (75, 1, (75, 1)),
        (75, 64, (8, 10)),
        (75, 256, (2, 38)),
        (75, 700, (1, 75)),
        (1, 1, (1, 1)),
        (24, 48, (8, 3)),
    ],
)
def test_work_is_divided_among_programs(units: int, rows: int, expected: tuple[int, int]) -> None:
    """Enough for all units, none without any."""
    programs, share = launches.divide_work(units, rows, programs=512)
    assert (programs, share) == expected
    assert (programs - 1) * share < units <= programs * share


def test_a_row_without_a_finite_best_is_told(bench: Bench) -> None:
    logits = torch.randn(6, 50)
    logits[0, 7] = float("nan")
    logits[1, 8] = float("inf")
    logits[2] = float("-inf")
    logits[3, 9] = float("nan")
    logits[4, :49] = float("-inf")
    params = [SamplingParams()] * 3 + [SamplingParams(temperature=1.0, top_p=0.9)] * 3
    tokens = sample(bench, logits, params, range(6))
    assert tokens[:5] == [-1, -1, -1, -1, 49]
    assert tokens[5] == by_sampler(logits[5:], params[5:], [5])[0]


def test_padding_changes_nothing(bench: Bench) -> None:
    rows, newest = bench.rows([-1, 2, -1], [0] * 3, [0] * 3), bench.ints([-7, -7, -7])
    params = [SamplingParams(temperature=1.0)] * 3
    sampled = bench.ints([0, 0, 0])
    logits = bench.put(torch.full((3, 20), float("nan")))
    logits[1] = torch.arange(20.0)
    scratch = SamplingScratch.of(3, 20, bench.device)
    bench.kernels.sample(logits, rows, table(bench, params, [1, 2, 3]), scratch, newest, sampled)
    assert newest.tolist() == [-7, -7, sampled[1].item()]
    everyone = bench.rows([-1, -1, -1], [0] * 3, [0] * 3)
    bench.kernels.sample(logits, everyone, table(bench, params, [1, 2, 3]), scratch, newest, sampled.clone())
    assert newest.tolist() == [-7, -7, sampled[1].item()]


SEEDS = [0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
POSITIONS = [0, 1, 4095, 2**20, 2**31 - 1]


def test_random_numbers_are_numpys(bench: Bench) -> None:
    pairs = [(seed, position) for seed in SEEDS for position in POSITIONS]
    seeds = bench.put(torch.tensor([s - (1 << 64) if s >> 63 else s for s, _ in pairs]))
    positions = bench.ints([p for _, p in pairs])
    uniform = philox.uniform
    if bench.kernels.name == "triton":
        from support.gpu_uniform import uniform
    assert uniform(seeds, positions).tolist() == [sampler.uniform(*pair) for pair in pairs]
