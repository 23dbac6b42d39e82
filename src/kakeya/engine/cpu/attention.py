"""Bounded attention over slabs: write the new keys and values, then attend in place.

The token at position t sees every sink j < S and every j with t - W < j <= t, through two
rotations of its query: at t for the window, at min(t, C - 1) for the sinks (C = S + W), so angles
never leave the trained range. Keys are stored rotated at their own position and never touched again.

Rows are handled in pieces of at most spare + 1, because a piece is written before it is attended
and the spare slots are what keeps it from overwriting keys its first row still needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kakeya.engine.batch import Segment
from kakeya.engine.bounded import Positions, query_growth, rotations, visibility
from kakeya.engine.slab import KVSlab, SlabPool
from kakeya.kernels import Kernels
from kakeya.kernels.network import AttentionContext
from kakeya.models.config import ModelConfig
from kakeya.models.rope import RopeConfig
from kakeya.types import Numerics


def attention_context(model: ModelConfig, pool: SlabPool, segments: Sequence[Segment]) -> AttentionContext:
    """The attention of one planned batch in all layers, for a decoder that runs them in one native call.

    Such layers all have slots of the same shape.
    """
    capacity, positions = pool.geometry.cache.capacity, _positions(segments)
    tables = {rope: rotations(rope, capacity, positions) for rope in set(model.layer_ropes)}
    places, sinks = _segments_and_sinks(segments)
    return AttentionContext(
        tables=[tables[rope] for rope in model.layer_ropes],
        pool=pool.storage,
        segments=places,
        sinks=sinks,
        capacity=capacity,
        scale=model.query_scale,
        softcap=model.attention_softcap or 0.0,
    )


def _positions(segments: Sequence[Segment]) -> Positions:
    """The position of each row."""
    return np.concatenate([np.arange(s.start, s.end, dtype=np.int64) for s in segments])


def _segments_and_sinks(segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    """As the native kernels take them: slab, first row, rows and start position of each, and its sink."""
    table, first_row = [], 0
    for segment in segments:
        table.append((segment.sequence.slab.index, first_row, segment.rows, segment.start))
        first_row += segment.rows
    sinks = [segment.sequence.slab.sink for segment in segments]
    return torch.tensor(table, dtype=torch.int64), torch.tensor(sinks, dtype=torch.int64)


class AttentionStep(ABC):
    """The attention of one planned batch, layer by layer; `layers_written` counts the layers so far."""

    def __init__(self, model: ModelConfig, pool: SlabPool, segments: Sequence[Segment]) -> None:
        self.layers_written = 0
        self._model, self._pool = model, pool
        self._capacity = pool.geometry.cache.capacity
        self._positions = _positions(segments)
        self._tables: dict[RopeConfig, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows, heads, d], k and v [rows, kv_heads, d], unrotated -> [rows, heads * d] float32."""

    def _rotations(self, rope: RopeConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """cos, sin at each row's position and cos, sin for sink columns, each [rows, d / 2] float32."""
        if rope not in self._tables:
            self._tables[rope] = rotations(rope, self._capacity, self._positions)
        return self._tables[rope]

    def _warmed(self, q: Tensor) -> Tensor:
        """Queries [rows, heads, d] scaled by their temperature at the position that sinks see."""
        growth = query_growth(self._model, self._capacity, self._positions)
        return q if growth is None else q * torch.from_numpy(growth)[:, None, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + d/2) of x [rows, heads, d] by each row's angles [rows, d / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class NativeAttention(AttentionStep):
    """The native kernel, one call a layer. A row's bits do not depend on the rest of the batch."""

    def __init__(
        self, kernels: Kernels, model: ModelConfig, pool: SlabPool, segments: Sequence[Segment]
    ) -> None:
        super().__init__(model, pool, segments)
        self._kernels = kernels
        self._segments, self._sinks = _segments_and_sinks(segments)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        model = self._model
        k, v = filling_slab(model, layer, k, v)
        out = self._kernels.attend(
            self._warmed(q),
            k,
            v,
            *self._rotations(model.layer_ropes[layer]),
            pool_of_layer(self._pool, layer),
            layer,
            self._segments,
            self._sinks,
            self._capacity,
            model.query_scale,
            model.attention_softcap or 0.0,
            model.layer_windows[layer] or 0,
        )
        self.layers_written += 1
        return out


def pool_of_layer(pool: SlabPool, layer: int) -> Tensor:
    """As the kernel takes it: all slabs [count, layers, 2, kv_heads, slots, head_dim] in the shape of that
    layer. Of other layers only the addresses are right."""
    if not pool.geometry.layer_heads:
        return pool.storage
    return pool.storage.view(*pool.storage.shape[:2], *pool.geometry.plane(layer))


@dataclass(frozen=True)
class _Piece:
    """Consecutive rows of one slab, few enough to be written before they are attended."""

    slab: KVSlab
    rows: slice
    slots: Tensor
    columns: int
    visible: dict[int | None, Tensor]
    """Per local window: which columns each row sees, bool [rows, columns]."""


class TorchAttention(AttentionStep):
    """Plain torch, one piece of one sequence at a time.

    In exact numerics every piece has the same shape (spare + 1 rows over all slots, padded), so a
    row's bits cannot depend on how many rows came with it.
    """

    def __init__(
        self, model: ModelConfig, pool: SlabPool, numerics: Numerics, segments: Sequence[Segment]
    ) -> None:
        super().__init__(model, pool, segments)
        self._piece_rows = pool.geometry.cache.spare + 1
        self._fixed_shape = numerics is Numerics.EXACT
        self._pieces = list(self._cut(segments))

    def _cut(self, segments: Sequence[Segment]) -> list[_Piece]:
        pieces, first_row = [], 0
        for segment in segments:
            for offset in range(0, segment.rows, self._piece_rows):
                count = min(self._piece_rows, segment.rows - offset)
                pieces.append(self._piece(segment, offset, count, first_row + offset))
            first_row += segment.rows
        return pieces

    def _piece(self, segment: Segment, offset: int, count: int, first_row: int) -> _Piece:
        slab = segment.sequence.slab
        positions = np.arange(segment.start + offset, segment.start + offset + count)
        slots = slab.geometry.slots_of(positions, slab.sink)
        all_slots = slab.geometry.cache.slots
        columns = all_slots if self._fixed_shape else min(int(positions[-1]) + 1, all_slots)
        windows = set(self._model.layer_windows)
        visible = {local: torch.from_numpy(visibility(slab, positions, columns, local)) for local in windows}
        return _Piece(slab, slice(first_row, first_row + count), torch.from_numpy(slots), columns, visible)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = filling_slab(self._model, layer, k, v)
        cos, sin, sink_cos, sink_sin = self._rotations(self._model.layer_ropes[layer])
        keys = rotate(k, cos, sin).to(self._pool.storage.dtype)
        values = v.to(self._pool.storage.dtype)
        q = self._warmed(q)
        window_queries, sink_queries = rotate(q, cos, sin), rotate(q, sink_cos, sink_sin)
        out = torch.empty(q.shape, dtype=torch.float32)
        for piece in self._pieces:
            storage = piece.slab.layer(layer)
            storage[0][:, piece.slots] = keys[piece.rows].transpose(0, 1)
            storage[1][:, piece.slots] = values[piece.rows].transpose(0, 1)
            out[piece.rows] = self._attend_piece(
                piece, layer, window_queries[piece.rows], sink_queries[piece.rows]
            )
        self.layers_written += 1
        return out.flatten(1)

    def _attend_piece(self, piece: _Piece, layer: int, window_q: Tensor, sink_q: Tensor) -> Tensor:
        storage = piece.slab.layer(layer)[:, :, : piece.columns].float()
        visible = piece.visible[self._model.layer_windows[layer]]
        rows = window_q.shape[0]
        if self._fixed_shape and rows < self._piece_rows:
            padding = self._piece_rows - rows
            window_q, sink_q = (
                torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) for x in (window_q, sink_q)
            )
            visible = torch.cat([visible, visible[-1:].expand(padding, -1)])
        sink = min(piece.slab.sink, piece.columns)
        heads, (_, kv_heads, _, dim) = self._model.num_heads, storage.shape
        scores = torch.cat(
            [
                _grouped(sink_q, kv_heads) @ storage[0][:, :sink].transpose(1, 2),
                _grouped(window_q, kv_heads) @ storage[0][:, sink:].transpose(1, 2),
            ],
            dim=-1,
        )
        weights = self._weights(scores, visible, heads // kv_heads)
        mixed = (weights @ storage[1]).view(kv_heads, heads // kv_heads, -1, dim)
        return mixed.permute(2, 0, 1, 3).reshape(-1, heads, dim)[:rows]

    def _weights(self, scores: Tensor, visible: Tensor, group: int) -> Tensor:
        scores = scores * self._model.query_scale
        softcap = self._model.attention_softcap
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        return scores.masked_fill(~visible.repeat(group, 1), float("-inf")).softmax(dim=-1)


def filling_slab(model: ModelConfig, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As many copies of each key head as fill the layer's place: queries of a group then share fewer."""
    copies = model.kv_copies(model.layer_heads[layer]) if model.layer_heads else 1
    if copies == 1:
        return k, v
    return k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """[rows, heads, d] -> [kv_heads, group * rows, d]: the queries that share a kv head together."""
    rows, heads, dim = q.shape
    return q.view(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
