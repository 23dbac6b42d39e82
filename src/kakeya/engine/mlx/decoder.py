"""The decoder over MLX arrays, every family by configuration, with attention over gathered slabs.

A step does not change the pool: it gathers the slabs of its sessions, writes new rows into these copies, and
returns the rows for the host to keep. MLX's arrays never change, so a pool written by the device would be
copied whole wherever something else still holds it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from kakeya.engine.mlx.arrays import MLX_TYPES, bits_of
from kakeya.engine.mlx.shapes import GroupShape
from kakeya.engine.mlx.weights import MlxLayer, MlxWeights
from kakeya.engine.slab import SlabGeometry
from kakeya.models.config import ModelConfig
from kakeya.models.float_types import FLOAT_TYPES
from kakeya.models.rope import RopeConfig

# Arrays by name: `Tables.arrays` fills them.
Inputs = dict[str, Any]


class GroupOutput(NamedTuple):
    """What a group of rows gives, not evaluated yet."""

    kept: mx.array  # keys and values to store [layers, 2, rows, kv_heads, head_dim], as bits
    logits: mx.array | None  # float32 [logit rows, vocab]
    hidden: list[mx.array]  # float32 [rows, hidden] of each layer asked for


class MlxDecoder:
    """Compiles and runs the network. Weights are constants of what is compiled."""

    def __init__(self, weights: MlxWeights, geometry: SlabGeometry) -> None:
        self._weights, self._model = weights, weights.config
        self._type = MLX_TYPES[FLOAT_TYPES[geometry.dtype]]
        self._columns = mx.array(np.arange(geometry.cache.slots))
        self.windows = tuple(dict.fromkeys(self._model.layer_windows))
        self.ropes: tuple[RopeConfig, ...] = tuple(dict.fromkeys(self._model.layer_ropes))
        self._compiled: dict[GroupShape, Callable[[Inputs], tuple[Any, ...]]] = {}

    def run(self, shape: GroupShape, inputs: Inputs) -> GroupOutput:
        """Lay out the work of a group. Nothing is computed until its output is evaluated."""
        if shape not in self._compiled:
            self._compiled[shape] = mx.compile(partial(self._run, shape))
        return GroupOutput(*self._compiled[shape](inputs))

    def embed(self, token_ids: mx.array) -> mx.array:
        return self._weights.embedding.rows(token_ids) * self._model.embed_scale

    def logits(self, normed: mx.array) -> mx.array:
        logits = self._weights.head(normed)
        cap = self._model.logit_softcap
        return logits if cap is None else cap * mx.tanh(logits / cap)

    def _run(self, shape: GroupShape, inputs: Inputs) -> tuple[Any, ...]:
        hidden = self.embed(inputs["token_ids"])  # [sessions, rows, hidden]
        kept, taps = [], {}
        for index, layer in enumerate(self._weights.layers):
            attention = _Attention(self, shape, inputs, index)
            hidden = self._attention_block(attention, layer, hidden)
            hidden = self._mlp_block(layer, hidden)
            if index in shape.hidden_layers:
                taps[index] = hidden.reshape(shape.rows, -1)
            kept += attention.kept
        stored = mx.stack(kept).reshape(len(self._weights.layers), 2, shape.rows, *kept[0].shape[2:])
        logits = None
        if shape.logit_rows:
            last = hidden.reshape(shape.rows, -1)[inputs["logit_rows"]]
            logits = self.logits(self._normed(last, self._weights.final_norm))
        return bits_of(stored), logits, [taps[layer] for layer in shape.hidden_layers]

    def _attention_block(self, attention: "_Attention", layer: MlxLayer, hidden: mx.array) -> mx.array:
        model = self._model
        qkv = layer.qkv(self._normed(hidden, layer.input_norm))
        by_head = qkv.reshape(*qkv.shape[:2], -1, model.head_dim)
        ends = [model.num_heads, model.num_heads + model.num_kv_heads]
        q, k, v = mx.split(by_head, ends, axis=2)
        q, k = self._head_norm(q, layer.query_norm), self._head_norm(k, layer.key_norm)
        attended = layer.output(attention(q, k, v))
        if layer.post_attention_norm is not None:
            attended = self._normed(attended, layer.post_attention_norm)
        return hidden + attended

    def _mlp_block(self, layer: MlxLayer, hidden: mx.array) -> mx.array:
        gate, up = mx.split(layer.gate_up(self._normed(hidden, layer.mlp_norm)), 2, axis=-1)
        result = layer.down(_activated(gate, self._model) * up)
        if layer.post_mlp_norm is not None:
            result = self._normed(result, layer.post_mlp_norm)
        return hidden + result

    def _normed(self, x: mx.array, weight: mx.array | None) -> mx.array:
        return x if weight is None else mx.fast.rms_norm(x, weight, self._model.norm_eps)

    def _head_norm(self, x: mx.array, weight: mx.array | None) -> mx.array:
        """Each head of each row normed on its own, or all heads of a row together: as wide as the weight."""
        if weight is None:
            return x
        return self._normed(x.reshape(*x.shape[:2], -1, weight.shape[0]), weight).reshape(x.shape)


class _Attention:
    """The attention of one layer over a group's slabs; `kept` is what the slabs are to hold of it."""

    def __init__(self, decoder: MlxDecoder, shape: GroupShape, inputs: Inputs, layer: int) -> None:
        model = decoder._model
        self._model, self._shape, self._type = model, shape, decoder._type
        self._inputs, self._layer = inputs, layer
        self._visible = inputs["visible"][decoder.windows.index(model.layer_windows[layer])]
        self._rotations = inputs["rotations"][decoder.ropes.index(model.layer_ropes[layer])]
        self._columns = decoder._columns
        self.kept: list[mx.array] = []

    def __call__(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """q [sessions, rows, heads, d], k and v likewise, unrotated -> [sessions, rows, heads * d]."""
        if "growth" in self._inputs:
            q = q * self._inputs["growth"][..., None, None]
        cos, sin, *sink = self._rotations
        k, v = rotate(k, cos, sin).astype(self._type), v.astype(self._type)
        self.kept = [k, v]
        looks = [rotate(q, cos, sin)] + ([rotate(q, *sink)] if self._shape.sink_columns else [])
        slab = self._inputs["pool"].view(self._type)[self._inputs["slabs"], self._layer]
        keys, values = slab[:, 0], slab[:, 1]  # [sessions, kv_heads, slots, d]
        parts = []
        for piece in range(self._shape.pieces):
            rows = slice(piece * self._shape.piece_rows, (piece + 1) * self._shape.piece_rows)
            slots = self._inputs["slots"][:, None, rows, None]
            keys, values = _written(keys, slots, k[:, rows]), _written(values, slots, v[:, rows])
            parts.append(self._attend(rows, [look[:, rows] for look in looks], keys, values))
        out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
        return out.reshape(*out.shape[:2], -1)

    def _attend(self, rows: slice, looks: list[mx.array], keys: mx.array, values: mx.array) -> mx.array:
        """A piece's rows over all slots, [sessions, rows, heads, d]."""
        scores = self._scores(looks, keys.astype(mx.float32))
        if self._model.attention_softcap is not None:
            cap = self._model.attention_softcap
            scores = cap * mx.tanh(scores / cap)
        visible = self._visible[:, None, None, rows]
        weights = mx.softmax(mx.where(visible, scores, -mx.inf), axis=-1)
        sessions, kv_heads, group, count, slots = weights.shape
        mixed = weights.reshape(sessions, kv_heads, group * count, slots) @ values.astype(mx.float32)
        by_row = mixed.reshape(sessions, kv_heads, group, count, -1).transpose(0, 3, 1, 2, 4)
        return by_row.reshape(sessions, count, kv_heads * group, -1)

    def _scores(self, looks: list[mx.array], keys: mx.array) -> mx.array:
        """[sessions, kv_heads, queries of a group, rows, slots], sinks seen through the second look."""
        first = self._products(looks[0], keys)
        if len(looks) == 1:
            return first
        ends = self._shape.sink_columns
        sinks = self._products(looks[1], keys[:, :, :ends])
        is_sink = self._columns[:ends] < self._inputs["sinks"][:, None, None, None, None]
        return mx.concatenate([mx.where(is_sink, sinks, first[..., :ends]), first[..., ends:]], axis=-1)

    def _products(self, q: mx.array, keys: mx.array) -> mx.array:
        sessions, rows, heads, dim = q.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        by_head = q.reshape(sessions, rows, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
        flat = by_head.reshape(sessions, kv_heads, group * rows, dim)
        scores = (flat @ keys.swapaxes(-1, -2)) * self._model.query_scale
        return scores.reshape(sessions, kv_heads, group, rows, -1)


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotate pairs (i, i + d/2) of x [sessions, rows, heads, d] by each row's angles."""
    first, second = mx.split(x, 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _written(held: mx.array, slots: mx.array, rows: mx.array) -> mx.array:
    """A copy of `held` [sessions, kv_heads, slots, d] with rows [sessions, n, kv_heads, d] in their slots."""
    rows = rows.swapaxes(1, 2)
    return mx.put_along_axis(held, mx.broadcast_to(slots, rows.shape), rows, axis=2)


def _activated(gate: mx.array, model: ModelConfig) -> mx.array:
    if model.activation == "silu":
        return gate * mx.sigmoid(gate)
    cubed = gate + 0.044715 * gate * gate * gate
    return 0.5 * gate * (1 + mx.tanh(0.7978845608028654 * cubed))
