"""The choice of tokens on a device, against the engine's sampler."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kakeya.engine import sampler
from kakeya.engine.sampler import SampleRequest
from kakeya.kernels.gpu import ChoiceTable, philox
from kakeya.types import SamplingParams
from support.gpu_bench import Bench

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


def table(bench: Bench, params: Sequence[SamplingParams], positions: Sequence[int]) -> ChoiceTable:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(each, name) for each in params], dtype=dtype, device=bench.device)

    seeds = [each.seed - (1 << 64) if each.seed >> 63 else each.seed for each in params]
    return ChoiceTable(
        *(column(name, torch.float32) if name != "top_k" else column(name, torch.int32)
          for name in ("temperature", "top_k", "top_p", "min_p")),
        torch.tensor(seeds, dtype=torch.int64, device=bench.device),
        bench.ints(list(positions)),
    )  # fmt: skip


def choose(
    bench: Bench, logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """Through the kernels, each row with a slab of its own, the last first."""
    count = len(params)
    rows = bench.rows(list(range(count - 1, -1, -1)), [0] * count, [0] * count)
    newest, chosen = bench.ints([-7] * count), bench.ints([-7] * count)
    bench.kernels.choose(bench.put(logits), rows, table(bench, params, positions), newest, chosen)
    assert newest.flip(0).tolist() == [max(token, 0) for token in chosen.tolist()]
    return chosen.tolist()


def by_sampler(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    requests = [SampleRequest(*each) for each in zip(params, positions, strict=True)]
    return [sampled.token_id for sampled in sampler.sample(logits, requests)]


@pytest.mark.parametrize(("vocab", "ties"), [(97, False), (97, True), (9000, True)])
def test_choices_are_the_samplers(bench: Bench, vocab: int, ties: bool) -> None:
    """Every filter, alone and together; with ties, whole crowds share a logit, zeros of both signs too."""
    params = [SamplingParams(**each, seed=5**20 + at) for at, each in enumerate(FILTERS)]
    positions = [100_000 * at for at in range(len(params))]
    logits = 4 * torch.randn(len(params), vocab)
    if ties:
        logits = logits.round()  # to -0.0 as well
    logits[:, 3:9] = float("-inf")
    assert choose(bench, logits, params, positions) == by_sampler(logits, params, positions)


def test_many_draws_from_few_tokens(bench: Bench) -> None:
    """Each position draws anew, and all ties of the crossing token but the first are left out."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.5, 2.0, -1.0]]).repeat(6, 1)
    for options in ({"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.6}, {"min_p": 0.3}):
        params = [SamplingParams(temperature=1.5, seed=3, **options)] * len(logits)
        positions = range(len(logits))
        tokens = choose(bench, logits, params, positions)
        assert tokens == by_sampler(logits, params, positions)
        assert len(set(tokens)) > 1


def test_a_row_without_a_finite_best_is_told(bench: Bench) -> None:
    logits = torch.randn(6, 50)
    logits[0, 7] = float("nan")
    logits[1, 8] = float("inf")
    logits[2] = float("-inf")
    logits[3, 9] = float("nan")
    logits[4, :49] = float("-inf")
    params = [SamplingParams()] * 3 + [SamplingParams(temperature=1.0, top_p=0.9)] * 3
    tokens = choose(bench, logits, params, range(6))
    assert tokens[:5] == [-1, -1, -1, -1, 49]
    assert tokens[5] == by_sampler(logits[5:], params[5:], [5])[0]


def test_padding_changes_nothing(bench: Bench) -> None:
    rows, newest = bench.rows([-1, 2, -1], [0] * 3, [0] * 3), bench.ints([-7, -7, -7])
    params = [SamplingParams(temperature=1.0)] * 3
    chosen = bench.ints([0, 0, 0])
    logits = bench.put(torch.full((3, 20), float("nan")))
    logits[1] = torch.arange(20.0)
    bench.kernels.choose(logits, rows, table(bench, params, [1, 2, 3]), newest, chosen)
    assert newest.tolist() == [-7, -7, chosen[1].item()]
    everyone = bench.rows([-1, -1, -1], [0] * 3, [0] * 3)
    bench.kernels.choose(logits, everyone, table(bench, params, [1, 2, 3]), newest, chosen.clone())
    assert newest.tolist() == [-7, -7, chosen[1].item()]


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
