"""Bounded attention over slabs in place, against the one-row-at-a-time reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from kakeya.kernels import Kernels
from support import reference

LAYER, LAYERS = 1, 2


@dataclass(frozen=True)
class Case:
    """The history of one session and the slab it lives in."""

    sink: int = 4
    window: int = 12
    spare: int = 3
    total: int = 70  # tokens: crosses the wrap several times
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    softcap: float = 0.0
    local_window: int = 0
    dtype: torch.dtype = torch.bfloat16

    @property
    def capacity(self) -> int:
        return self.sink + self.window

    @property
    def slots(self) -> int:
        return self.capacity + self.spare


@dataclass(frozen=True)
class Rows:
    """Everything `attend` wants of a session's rows, for the whole history."""

    q: Tensor
    k: Tensor
    v: Tensor
    angles: tuple[Tensor, Tensor, Tensor, Tensor]

    def part(self, first: int, end: int) -> list[Tensor]:
        return [x[first:end] for x in (self.q, self.k, self.v, *self.angles)]


def angles_at(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    turns = 10_000.0 ** (-torch.arange(head_dim // 2, dtype=torch.float64) / (head_dim // 2))
    angle = positions.double()[:, None] * turns
    return angle.cos().float(), angle.sin().float()


def random_rows(case: Case) -> Rows:
    """q, k and v are views into one fused matrix, as the decoder makes them."""
    fused = torch.randn(case.total, case.heads + 2 * case.kv_heads, case.head_dim)
    q, k, v = fused.split_with_sizes([case.heads, case.kv_heads, case.kv_heads], 1)
    positions = torch.arange(case.total)
    own = angles_at(positions, case.head_dim)
    return Rows(q, k, v, (*own, *angles_at(positions.clamp(max=case.capacity - 1), case.head_dim)))


def new_pool(case: Case, slabs: int = 1) -> Tensor:
    """Never-written slots hold NaN: reading one would show."""
    shape = (slabs, LAYERS, 2, case.kv_heads, case.slots, case.head_dim)
    return torch.full(shape, float("nan"), dtype=case.dtype)


def run(attend: Callable[..., Tensor], case: Case, rows: Rows, cuts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The whole history, cut at `cuts`: outputs and the pool it leaves."""
    pool, outputs, first = new_pool(case), [], 0
    for end in [*cuts, case.total]:
        segments = torch.tensor([[0, 0, end - first, first]])
        outputs.append(
            attend(
                *rows.part(first, end),
                pool,
                LAYER,
                segments,
                torch.tensor([case.sink]),
                case.capacity,
                case.head_dim**-0.5,
                case.softcap,
                case.local_window,
            )
        )
        first = end
    return torch.cat(outputs), pool


@cache
def by_reference(case: Case) -> tuple[Rows, Tensor, Tensor]:
    """Random rows, what the reference makes of them, and the pool it leaves. Slow, so once a case."""
    rows = random_rows(case)
    return rows, *run(reference.attend, case, rows, [])


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, NaN slots included."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


PLAIN = Case()
CASES = {
    "plain": PLAIN,
    "float32": replace(PLAIN, dtype=torch.float32),
    "no sink": replace(PLAIN, sink=0),
    "window 1": replace(PLAIN, window=1),
    "window 1, nothing else": Case(sink=0, window=1, spare=0),
    "no spare": replace(PLAIN, spare=0),
    "long prefix": replace(PLAIN, sink=37, window=20),
    "more spare than window": replace(PLAIN, window=5, spare=16),
    "never full": replace(PLAIN, window=200),
    "softcap": replace(PLAIN, softcap=2.0, dtype=torch.float32),
    "local window": replace(PLAIN, local_window=5),
    "local window inside the sinks": replace(PLAIN, sink=20, local_window=27),
    "local window wider than ours": replace(PLAIN, local_window=500),
    "one head of 16": Case(heads=1, kv_heads=1, head_dim=16),
    "heads of 80": Case(heads=5, kv_heads=1, head_dim=80),
    "heads of 256": Case(heads=2, kv_heads=1, head_dim=256, dtype=torch.float32),
    "many heads share one": Case(heads=40, kv_heads=1, head_dim=32),
    "many slots": Case(window=150, total=190),
}


@pytest.mark.parametrize("name", CASES)
def test_attend_is_bounded_attention(kernels: Kernels, name: str) -> None:
    """One call, calls of one row, and odd cuts: the reference's numbers, and the same bits each time."""
    case = CASES[name]
    rows, expected, expected_pool = by_reference(case)
    whole, pool = run(kernels.attend, case, rows, [])
    assert torch.allclose(whole, expected, rtol=1e-4, atol=2e-5)
    assert same(pool, expected_pool)
    for cuts in (range(1, case.total), [1, 9, 10, 17, 40], [case.capacity, case.slots]):
        output, pool = run(kernels.attend, case, rows, sorted({c for c in cuts if c < case.total}))
        assert torch.equal(output, whole)
        assert same(pool, expected_pool)


def test_sessions_together_are_sessions_alone(kernels: Kernels) -> None:
    """Three sessions with different sinks and lengths in one call, on one, two and three threads."""
    sinks, starts, counts, slabs = [4, 0, 9], [0, 33, 50], [21, 1, 5], [2, 0, 3]
    cases = [replace(PLAIN, sink=s, window=PLAIN.capacity - s) for s in sinks]
    histories = [random_rows(case) for case in cases]
    alone = [run(kernels.attend, *pair, []) for pair in zip(cases, histories, strict=True)]
    parts = [r.part(t, t + n) for r, t, n in zip(histories, starts, counts, strict=True)]
    together = [torch.cat(columns) for columns in zip(*parts, strict=True)]
    first_rows = [0, 21, 22]
    segments = torch.tensor(list(zip(slabs, first_rows, counts, starts, strict=True)))
    for threads in (1, 2, 3):
        kernels.set_threads(threads)
        pool = new_pool(PLAIN, slabs=4)
        for case, history, slab, start in zip(cases, histories, slabs, starts, strict=True):
            if start:
                before = replace(case, total=start)
                pool[slab] = run(kernels.attend, before, history, [])[1][0]
        output = kernels.attend(
            *together, pool, LAYER, segments, torch.tensor(sinks), PLAIN.capacity, PLAIN.head_dim**-0.5
        )
        for (expected, _), first, start, count in zip(alone, first_rows, starts, counts, strict=True):
            assert torch.equal(output[first : first + count], expected[start : start + count])
        assert pool[1].isnan().all()  # nobody's slab
        assert pool[:, 0].isnan().all()  # another layer


def test_a_broken_row_harms_no_earlier_one(kernels: Kernels) -> None:
    """A key and value that are not numbers show in the rows that see them, and only there."""
    case = replace(PLAIN, sink=2, window=6, total=40)
    rows = random_rows(case)
    sound, _ = run(kernels.attend, case, rows, [])
    k, v = rows.k.clone(), rows.v.clone()
    k[20], v[20] = float("nan"), float("inf")
    broken, _ = run(kernels.attend, case, replace(rows, k=k, v=v), [])
    assert torch.equal(broken[:20], sound[:20])
    assert broken[20:26].isnan().all()
    assert torch.equal(broken[26:], sound[26:])


def test_bfloat16_is_rounded_as_torch_rounds(kernels: Kernels) -> None:
    """Values go in unrotated: halfway cases, subnormals, infinities and NaN come out as torch has them."""
    case = Case(heads=1, kv_heads=1, head_dim=16, total=1)
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001, 0x00008001, 0x7F800000])
    value = torch.zeros(1, 1, 16)
    value[0, 0, :7] = bits.to(torch.int32).view(torch.float32)
    value[0, 0, 7], value[0, 0, 8] = float("nan"), -1.00390625
    _, pool = run(kernels.attend, case, replace(random_rows(case), v=value), [])
    stored = pool[0, LAYER, 1, 0, 0]
    assert same(stored, value[0, 0].bfloat16())


def test_far_positions_are_as_good_as_near_ones(kernels: Kernels) -> None:
    """A start beyond 2**32: slots are computed in 64 bits."""
    case = replace(PLAIN, total=20)
    rows = random_rows(case)
    start = (1 << 40) - (1 << 40) % (case.slots - case.sink)  # the same ring phase as the position sink
    sink_angles = angles_at(torch.full((20,), case.capacity - 1), case.head_dim)
    pools = [torch.zeros_like(new_pool(case)) for _ in range(2)]
    outputs = [
        attend(
            *rows.part(0, 20)[:5],
            *sink_angles,
            pool,
            LAYER,
            torch.tensor([[0, 0, 20, start + case.sink]]),
            torch.tensor([case.sink]),
            case.capacity,
            case.head_dim**-0.5,
        )
        for attend, pool in zip((kernels.attend, reference.attend), pools, strict=True)
    ]
    assert torch.allclose(*outputs, rtol=1e-4, atol=2e-5)
    assert torch.equal(*pools)


@pytest.mark.parametrize("name", ["many heads share one", "heads of 80"])
def test_idle_threads_take_some_of_the_query_heads(kernels: Kernels, name: str) -> None:
    """One session with one kv head is work for every thread, with the same bits."""
    case = CASES[name]
    rows = random_rows(case)
    seen = []
    for threads in (1, 3, 8):
        kernels.set_threads(threads)
        seen.append(run(kernels.attend, case, rows, range(1, case.total)))
    for outputs, pool in seen[1:]:
        assert same(outputs, seen[0][0])
        assert same(pool, seen[0][1])
