"""GPU kernels on a bench: their arguments, sessions beside the reference, and Triton's interpreter."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kakeya.kernels.gpu import TILE_ROWS, AttentionLayer, AttentionShape, GpuKernels, PrefillTable, RowTable
from support import reference
from support.untraced import untraced_environment


@dataclass(frozen=True)
class Bench:
    kernels: GpuKernels
    device: torch.device
    dtype: torch.dtype

    def put(self, values: Tensor) -> Tensor:
        return values.to(self.device)

    def element(self, *shape: int) -> Tensor:
        """Random elements."""
        return torch.randn(*shape).to(self.device, self.dtype)

    def floats(self, *shape: int) -> Tensor:
        """Random float32, near 1 and so fit for norm weights too."""
        return (1 + 0.3 * torch.randn(*shape)).to(self.device)

    def unset(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room for a result; what is not written shows."""
        return torch.full(shape, float("nan"), dtype=dtype or self.dtype, device=self.device)

    def ints(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def rows(self, slabs: list[int], positions: list[int], sinks: list[int]) -> RowTable:
        return RowTable(self.ints(slabs), self.ints(positions), self.ints(sinks))

    def near(self, actual: Tensor, expected: Tensor, slack: float = 1.0) -> bool:
        """Whether the difference is what the dtype of `actual` and float32 sums explain."""
        allowed = slack * (1.5e-2 if actual.dtype == torch.bfloat16 else 2e-5)
        actual, expected = actual.double().cpu(), expected.double().cpu()
        return bool((actual - expected).norm() <= allowed * expected.norm()) and torch.allclose(
            actual, expected, rtol=4 * allowed, atol=4 * allowed
        )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN where the other has NaN."""
    a, b = a.cpu(), b.cpu()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


LAYER, LAYERS = 1, 2
_SLABS = {0: 2, 1: 0, 2: 3}  # by session; slab 1 is nobody's


@dataclass(frozen=True)
class Case:
    """A model's heads, a cache, and how many tokens each session pins."""

    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 32
    capacity: int = 40
    spare: int = 8
    sinks: tuple[int, int, int] = (4, 0, 17)
    softcap: float = 0.0
    local_window: int = 0
    head_norms: bool = False

    @property
    def shape(self) -> AttentionShape:
        slots, scale = self.capacity + self.spare, self.head_dim**-0.5
        return AttentionShape(
            self.heads, self.kv_heads, self.head_dim, self.capacity, slots, scale, self.softcap, 1e-6
        )


def angles(positions: Tensor, capacity: int, head_dim: int) -> Tensor:
    """cos and sin at the positions and at those that sinks see, float32 [4, rows, D / 2]."""
    turns = 10_000.0 ** (-torch.arange(head_dim // 2, dtype=torch.float64) / (head_dim // 2))
    own, sunk = (p.double()[:, None] * turns for p in (positions, positions.clamp(max=capacity - 1)))
    return torch.stack([own.cos(), own.sin(), sunk.cos(), sunk.sin()]).float()


@dataclass
class Block:
    """Consecutive rows of one session, and what they were computed to."""

    session: int
    start: int
    qkv: Tensor  # on the bench's device
    angles: Tensor

    @property
    def count(self) -> int:
        return len(self.qkv)


@dataclass
class Sessions:
    """Three sessions over one pool. Slots that were never written hold NaN: reading one would show."""

    bench: Bench
    case: Case
    splits: int = 1
    lengths: dict[int, int] = field(default_factory=lambda: dict.fromkeys(_SLABS, 0))

    def __post_init__(self) -> None:
        case, bench = self.case, self.bench
        size = (4, LAYERS, 2, case.kv_heads, case.shape.slots, case.head_dim)
        self.pool = bench.unset(*size)
        self.expected_pool = torch.full(size, float("nan"), dtype=bench.dtype)
        self.norms = (
            (bench.floats(case.head_dim), bench.floats(case.head_dim)) if case.head_norms else (None, None)
        )
        self.scratch = bench.kernels.scratch(
            case.shape, bench.dtype, bench.device, prefill_rows=256, partials=32 * self.splits
        )

    @property
    def layer(self) -> AttentionLayer:
        return AttentionLayer(self.pool, LAYER, self.case.shape, *self.norms, self.case.local_window)

    def block(self, session: int, rows: int) -> Block:
        """The session's next rows, at random."""
        case, start = self.case, self.lengths[session]
        self.lengths[session] = start + rows
        qkv = self.bench.element(rows, (case.heads + 2 * case.kv_heads) * case.head_dim)
        positions = torch.arange(start, start + rows)
        return Block(session, start, qkv, angles(positions, case.capacity, case.head_dim))

    def expected(self, blocks: Sequence[Block]) -> Tensor:
        """What the reference makes of the blocks, in their order."""
        case = self.case
        rows = torch.cat([b.qkv for b in blocks]).float().cpu()
        heads = rows.view(len(rows), -1, case.head_dim)
        q, k, v = heads.split_with_sizes([case.heads, case.kv_heads, case.kv_heads], 1)
        query_norm, key_norm = self.norms
        if query_norm is not None and key_norm is not None:
            q = reference.rms_norm(q, query_norm.cpu(), 1e-6)
            k = reference.rms_norm(k, key_norm.cpu(), 1e-6)
        table, first = [], 0
        for block in blocks:
            table.append([_SLABS[block.session], first, block.count, block.start])
            first += block.count
        return reference.attend(
            q,
            k,
            v,
            *torch.cat([b.angles for b in blocks], 1),
            self.expected_pool,
            LAYER,
            torch.tensor(table),
            torch.tensor([case.sinks[b.session] for b in blocks]),
            case.capacity,
            case.shape.scale,
            case.softcap,
            case.local_window,
        )

    def row_table(self, blocks: Sequence[Block], padding: int) -> RowTable:
        """The blocks' rows and some of padding after them."""
        slabs = [_SLABS[b.session] for b in blocks for _ in range(b.count)]
        positions = [b.start + at for b in blocks for at in range(b.count)]
        sinks = [self.case.sinks[b.session] for b in blocks for _ in range(b.count)]
        return self.bench.rows(slabs + [-1] * padding, positions + [0] * padding, sinks + [0] * padding)

    def together(self, blocks: Sequence[Block], padding: int) -> tuple[Tensor, Tensor]:
        """qkv and angles of the blocks' rows, and rows of padding that are no numbers."""
        qkv = torch.cat([b.qkv for b in blocks])
        fill = self.bench.unset(padding, qkv.shape[1])
        rotations = torch.cat([b.angles for b in blocks], 1)
        rotations = torch.cat([rotations, torch.zeros(4, padding, rotations.shape[2])], 1)
        return torch.cat([qkv, fill]), self.bench.put(rotations)

    def decode(self, blocks: Sequence[Block], padding: int = 0) -> Tensor:
        """The rows of all blocks through decode_attention."""
        case, rows = self.case, sum(b.count for b in blocks)
        qkv, rotations = self.together(blocks, padding)
        out = self.bench.unset(rows + padding, case.heads * case.head_dim)
        table = self.row_table(blocks, padding)
        self.bench.kernels.decode_attention(qkv, self.layer, rotations, table, self.splits, self.scratch, out)
        return out[:rows]

    def store(self, blocks: Sequence[Block], padding: int = 0) -> None:
        qkv, rotations = self.together(blocks, padding)
        rows = self.row_table(blocks, padding)
        self.bench.kernels.store_rows(qkv, self.layer, rotations, rows)

    def draft(self, blocks: Sequence[Block], padding: int = 0) -> Tensor:
        """Blocks of equal length through draft_attention, with so many sessions of padding."""
        case, places, sessions = self.case, blocks[0].count, len(blocks) + padding
        qkv, rotations = self.together(blocks, padding * places)
        table = self.row_table(blocks, padding * places)
        order = torch.arange(places * sessions).view(sessions, places).T.flatten()  # place by place
        order = self.bench.put(order)
        rows = RowTable(*(column[order] for column in (table.slabs, table.positions, table.sinks)))
        out = self.bench.unset(len(order), case.heads * case.head_dim)
        self.bench.kernels.draft_attention(
            qkv[order],
            self.layer,
            rotations[:, order].contiguous(),
            rows,
            sessions,
            self.splits,
            self.scratch,
            out,
        )
        return out[order.argsort()][: len(blocks) * places]

    def prefill(self, blocks: Sequence[Block], padding: int = 0) -> Tensor:
        """The blocks through prefill_attention."""
        case, rows = self.case, sum(b.count for b in blocks)
        qkv, rotations = self.together(blocks, padding)
        out = self.bench.unset(rows + padding, case.heads * case.head_dim)
        table = self._prefill_table(blocks, padding)
        self.bench.kernels.prefill_attention(qkv, self.layer, rotations, table, self.scratch, out)
        return out[:rows]

    def _prefill_table(self, blocks: Sequence[Block], padding: int) -> PrefillTable:
        segments, tiles, row_segments = [], [], []
        for index, block in enumerate(blocks):
            sink = self.case.sinks[block.session]
            segments.append([_SLABS[block.session], block.start, len(row_segments), block.count, sink])
            tiles += [[index, first] for first in range(0, block.count, TILE_ROWS)]
            row_segments += [index] * block.count
        if padding:
            segments, tiles = [*segments, [0] * 5], [*tiles, [-1, 0]]
        ints = self.bench.ints
        return PrefillTable(ints(segments), ints(tiles), ints(row_segments + [-1] * padding))


def interpreting() -> dict[str, str]:
    """The environment of such a process."""
    return untraced_environment() | {"TRITON_INTERPRET": "1"}


def hurry_interpreter() -> None:
    """Leave out what takes most of the interpreter's time and gives nothing.

    At every call of a device function it puts itself into Triton's language anew: once is enough. And it
    finds out for every sum of integers whether it overflowed, which it would tell only in its debug mode.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set[str]()

    def patch_once(function: Any) -> Any:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = patch_once
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
