"""Bounded attention over slabs in plain torch, a few rows at a time. It never waits for the device."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kakeya.kernels.gpu.interface import AttentionLayer, AttentionShape, PrefillTable, RowTable

_ROWS_AT_ONCE = 16  # each row gathers its whole slab


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm over the last dimension times weight, float32."""
    wide = x.double()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).float()


@dataclass(frozen=True)
class Block:
    """The rows of a call, normed and rotated; all of the element dtype."""

    queries: Tensor  # [rows, kv_heads, group, D], for the window, scaled
    sink_queries: Tensor  # the same, for the sinks
    keys: Tensor  # [rows, kv_heads, D]
    values: Tensor  # [rows, kv_heads, D]


def prepare(qkv: Tensor, layer: AttentionLayer, rotations: Tensor) -> Block:
    """Norm each head, rotate keys once and queries twice: for the window and for the sinks."""
    shape = layer.shape
    heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
    q, k, v = heads.split_with_sizes([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    q = q.float() if layer.query_norm is None else normed(q, layer.query_norm, shape.norm_eps)
    k = k.float() if layer.key_norm is None else normed(k, layer.key_norm, shape.norm_eps)
    cos, sin, sink_cos, sink_sin = rotations

    def query(cos: Tensor, sin: Tensor) -> Tensor:
        scaled = (_rotate(q, cos, sin) * shape.scale).to(qkv.dtype)
        return scaled.view(len(qkv), shape.kv_heads, shape.group, shape.head_dim)

    return Block(query(cos, sin), query(sink_cos, sink_sin), _rotate(k, cos, sin).to(qkv.dtype), v)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of x [rows, heads, D] by each row's angles [rows, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def put_real(target: Tensor, places: tuple[Tensor, ...], values: Tensor, real: Tensor) -> None:
    """target[places] = values for the rows that are real; nothing changes for the others.

    The others repeat the first real row, so every place is written with one value only. If no row is real,
    one place is written with what it already holds.
    """
    rows = torch.arange(len(real), device=real.device)
    first = real.int().argmax()
    source = torch.where(real, rows, first)
    places = tuple(place.index_select(0, source).clamp(min=0).long() for place in places)
    kept = target[places]
    values = torch.where(real.any(), values.index_select(0, source).to(target.dtype), kept)
    target.index_put_(places, values)


def _slabs(layer: AttentionLayer) -> Tensor:
    """[slabs, 2, kv_heads, slots, D]"""
    return layer.pool[:, layer.index]


def store(block: Block, layer: AttentionLayer, rows: RowTable) -> None:
    """Store each real row's key and value in its slot."""
    slots, t, sink = layer.shape.slots, rows.positions, rows.sinks
    slot = torch.where(t < sink, t, sink + torch.remainder(t - sink, (slots - sink).clamp(min=1)))
    slot = slot.clamp(max=slots - 1)  # padding may hold anything
    by_slot = _slabs(layer).permute(0, 3, 1, 2, 4)
    put_real(by_slot, (rows.slabs, slot), torch.stack([block.keys, block.values], 1), rows.slabs >= 0)


@dataclass(frozen=True)
class _Reach:
    """The distances at which a row sees other tokens in this layer."""

    window: Tensor  # [rows]
    sinks: int
    seen_at: Tensor  # [rows]: the row's position as the sinks see it

    @classmethod
    def of(cls, rows: RowTable, layer: AttentionLayer) -> "_Reach":
        capacity = layer.shape.capacity
        local = layer.local_window or capacity
        seen_at = rows.positions.clamp(max=capacity - 1)
        return cls((capacity - rows.sinks).clamp(max=local), local, seen_at)

    def sees(self, positions: Tensor, is_sink: Tensor, t: Tensor) -> Tensor:
        """Whether the row at t [rows, 1] sees a column that holds one of `positions` [rows, columns]."""
        as_sink = self.seen_at[:, None] - positions < self.sinks
        return (positions <= t) & torch.where(is_sink, as_sink, t - positions < self.window[:, None])


def _held_positions(newest: Tensor, sinks: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """What each slot holds when the last token is `newest` [rows]: position, is it a sink, is it filled."""
    slot = torch.arange(slots, device=newest.device, dtype=newest.dtype)[None, :]
    newest, sinks = newest[:, None], sinks[:, None]
    is_sink = slot < sinks
    behind = torch.remainder(newest - slot, (slots - sinks).clamp(min=1))
    position = torch.where(is_sink, slot, newest - behind)
    return position, is_sink, (position <= newest) & (is_sink | (position >= sinks))


def _scores(
    block: Block, chunk: slice, keys: Tensor, by: str, is_sink: Tensor, shape: AttentionShape
) -> Tensor:
    """[rows, kv_heads, group, columns] float64; sinks are scored with the queries rotated for them."""
    windowed = torch.einsum(by, block.queries[chunk].double(), keys)
    sunk = torch.einsum(by, block.sink_queries[chunk].double(), keys)
    scores = torch.where(is_sink[:, None, None, :], sunk, windowed)
    return shape.softcap * torch.tanh(scores / shape.softcap) if shape.softcap else scores


def _softmax(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen[:, None, None, :], float("-inf")).softmax(-1)


def _chunks(rows: int) -> Iterator[slice]:
    return (slice(first, first + _ROWS_AT_ONCE) for first in range(0, rows, _ROWS_AT_ONCE))


def _gather(layer: AttentionLayer, rows: RowTable) -> tuple[Tensor, Tensor]:
    held = _slabs(layer).index_select(0, rows.slabs.clamp(min=0)).double()
    return held[:, 0], held[:, 1]


def attend_stored(block: Block, layer: AttentionLayer, table: RowTable, out: Tensor) -> None:
    """Attend to slabs that hold the rows already."""
    shape = layer.shape
    for chunk in _chunks(len(out)):
        rows = RowTable(table.slabs[chunk], table.positions[chunk], table.sinks[chunk])
        keys, values = _gather(layer, rows)
        position, is_sink, held = _held_positions(rows.positions, rows.sinks, shape.slots)
        seen = held & _Reach.of(rows, layer).sees(position, is_sink, rows.positions[:, None])
        weights = _softmax(_scores(block, chunk, keys, "rghd,rgcd->rghc", is_sink, shape), seen)
        out[chunk].copy_((weights @ _only(values, seen)).flatten(1))


def _only(values: Tensor, seen: Tensor) -> Tensor:
    """Zeros for the columns that are not seen: a weight of zero times infinity would be NaN."""
    return values.masked_fill(~seen[:, None, :, None], 0.0)


@dataclass(frozen=True)
class PrefillRows:
    """A prefill table, one entry per row."""

    table: RowTable
    starts: Tensor  # [rows]
    segments: Tensor  # [rows]
    lasting: RowTable  # rows whose slot no later row of their segment takes; the others are padding

    @classmethod
    def of(cls, prefill: PrefillTable, shape: AttentionShape) -> "PrefillRows":
        of_row = prefill.segments.index_select(0, prefill.row_segments.clamp(min=0))
        slabs, starts, first_rows, counts, sinks = of_row.unbind(1)
        rows = torch.arange(len(of_row), device=of_row.device, dtype=of_row.dtype)
        positions = starts + rows - first_rows
        slabs = slabs.masked_fill(prefill.row_segments < 0, -1)
        displaced = (positions >= sinks) & (positions + shape.slots - sinks < starts + counts)
        lasting = RowTable(slabs.masked_fill(displaced, -1), positions, sinks)
        return cls(RowTable(slabs, positions, sinks), starts, prefill.row_segments, lasting)


def attend_block(block: Block, layer: AttentionLayer, prefill: PrefillRows, out: Tensor) -> None:
    """Attend to what the slabs held before these rows, and to the rows themselves."""
    table, shape = prefill.table, layer.shape
    new_keys, new_values = block.keys.double(), block.values.double()
    broken = (~new_values.isfinite()).double()
    for chunk in _chunks(len(out)):
        rows = RowTable(table.slabs[chunk], table.positions[chunk], table.sinks[chunk])
        t, reach = rows.positions[:, None], _Reach.of(rows, layer)
        keys, values = _gather(layer, rows)
        position, is_sink, held = _held_positions(prefill.starts[chunk] - 1, rows.sinks, shape.slots)
        old_seen = held & reach.sees(position, is_sink, t)
        old = _scores(block, chunk, keys, "rghd,rgcd->rghc", is_sink, shape)
        position = table.positions[None, :].expand(len(t), -1)
        is_sink = position < rows.sinks[:, None]
        together = prefill.segments[chunk][:, None] == prefill.segments[None, :]
        new = _scores(block, chunk, new_keys, "rghd,cgd->rghc", is_sink, shape)
        seen = torch.cat([old_seen, together & reach.sees(position, is_sink, t)], 1)
        weights = _softmax(torch.cat([old, new], -1), seen)
        to_old, to_new = weights.split_with_sizes([shape.slots, len(new_keys)], -1)
        mixed = to_old @ _only(values, old_seen) + _mix("rghc,cgd->rghd", to_new, new_values, broken)
        out[chunk].copy_(mixed.flatten(1))


def _mix(by: str, weights: Tensor, values: Tensor, broken: Tensor) -> Tensor:
    """weights times the values of all sessions' rows. A value that is NaN or infinite harms only rows that
    weigh it."""
    mixed = torch.einsum(by, weights, values.nan_to_num(0.0, 0.0, 0.0))
    return mixed.masked_fill(torch.einsum(by, weights, broken) > 0, float("nan"))
