"""Sessions that a bench computes step by step, beside the reference over a pool of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kakeya.kernels.gpu import TILE_ROWS, AttentionLayer, AttentionShape, PromptTable, RowTable
from support import kernel_reference as reference
from support.gpu_bench import Bench

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
            case.shape, bench.dtype, bench.device, prompt_rows=256, parts=16 * self.splits
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

    def prompt(self, blocks: Sequence[Block], padding: int = 0) -> Tensor:
        """The blocks through prompt_attention."""
        case, rows = self.case, sum(b.count for b in blocks)
        qkv, rotations = self.together(blocks, padding)
        out = self.bench.unset(rows + padding, case.heads * case.head_dim)
        table = self._prompt_table(blocks, padding)
        self.bench.kernels.prompt_attention(qkv, self.layer, rotations, table, self.scratch, out)
        return out[:rows]

    def _prompt_table(self, blocks: Sequence[Block], padding: int) -> PromptTable:
        segments, tiles, row_segments = [], [], []
        for index, block in enumerate(blocks):
            sink = self.case.sinks[block.session]
            segments.append([_SLABS[block.session], block.start, len(row_segments), block.count, sink])
            tiles += [[index, first] for first in range(0, block.count, TILE_ROWS)]
            row_segments += [index] * block.count
        if padding:
            segments, tiles = [*segments, [0] * 5], [*tiles, [-1, 0]]
        ints = self.bench.ints
        return PromptTable(ints(segments), ints(tiles), ints(row_segments + [-1] * padding))
