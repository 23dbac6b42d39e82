"""The decoder on the device: one network for every family, with small operations fused around the matmuls.

It writes to static buffers and reads static tables, so a step can be captured in a CUDA graph and replayed.
Matmuls run over all rows together. Attention runs over single tokens and over longer segments separately.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kakeya.config import CacheConfig
from kakeya.engine.cuda.arranging import Arrangement
from kakeya.engine.cuda.matmul import Matmuls
from kakeya.engine.cuda.shapes import StepShape
from kakeya.engine.cuda.tables import StepTables
from kakeya.engine.cuda.weights import DeviceLayer, DeviceWeights
from kakeya.engine.cuda.workspace import Workspace
from kakeya.engine.slab import SlabPool
from kakeya.kernels.gpu import (
    READ_TOGETHER,
    AttentionLayer,
    AttentionShape,
    GpuKernels,
    RowTable,
    SamplingScratch,
    Scratch,
    kv_splits,
)
from kakeya.models.config import ModelConfig, QueryTemperature
from kakeya.models.rope import inverse_frequencies
from kakeya.types import Numerics

# KV splits in exact numerics: the order of additions must not depend on the number of rows.
EXACT_SPLITS = 2

_ONE_ROW = StepShape(1)

# tap(layer, hidden) gets each layer's output, float32 [rows, hidden], before it changes again.
Tap = Callable[[int, Tensor], None]
# Where the outputs of some layers are copied to, as elements: columns of wider rows.
Copies = Mapping[int, Tensor]
_NO_COPIES: Copies = {}


class FusedDecoder:
    """Runs arranged steps: from token ids in the tables to sampled tokens in the workspace."""

    def __init__(
        self,
        weights: DeviceWeights,
        pool: SlabPool,
        kernels: GpuKernels,
        tables: StepTables,
        workspace: Workspace,
        numerics: Numerics,
        max_rows: int,
        draft_counts: Sequence[int] = (),
    ) -> None:
        self._weights, self._model, self._kernels = weights, weights.config, kernels
        self._tables, self._space = tables, workspace
        self._exact = numerics is Numerics.EXACT
        self._matmuls = Matmuls(kernels, workspace, self._exact)
        self.newest = torch.zeros(pool.storage.shape[0], dtype=torch.int32, device=pool.device)
        self.attention = attention_shape(weights.config, pool.geometry.cache)
        self._attention_layers = self._layers_over(pool.storage)
        self._scratch = self._make_scratch(max_rows, draft_counts, pool.device)
        self._sampling_scratch = SamplingScratch.of(
            len(workspace.logits), self._model.vocab_size, pool.device
        )
        self._ropes = self._rope_tables(pool.device)
        self._temperature = query_temperature(self._model, self.attention.capacity)
        self._fuses = not self._exact and self._temperature is None and weights.is_plain

    def rotations(self, shape: StepShape) -> list[Tensor]:
        """The RoPE tables of a step's rows, for each RoPE. Valid until those of another step are made."""
        rows = self._tables.rows(0, shape.rows)
        return [self._rotations(rows, shape.rows, rope) for rope in range(len(self._ropes))]

    def run(
        self,
        step: Arrangement,
        rotations: Sequence[Tensor],
        tap: Tap | None = None,
        copies: Copies = _NO_COPIES,
    ) -> None:
        """Run all layers. The rows that go through the head are left in the workspace, normed."""
        shape, space = step.shape, self._space
        rows = self._tables.rows(0, shape.rows)
        self._kernels.embed(
            self._weights.embedding,
            self._tables.token_ids[: shape.rows],
            self.newest,
            rows,
            self._model.embed_scale,
            space.hidden[: shape.rows],
        )
        if self._fuses_rows(shape.rows):
            self._few_rows(step, rotations, tap, copies)
        else:
            self._many_rows(step, rotations, tap, copies)

    def head(self, shape: StepShape, first: int = 0, count: int | None = None) -> Tensor:
        """The logits of `count` rows that go through the head, from `first` on: float32 [count, vocab].

        They are valid until the next call.
        """
        space = self._space
        if shape == _ONE_ROW and self._fuses and self._model.logit_softcap is None:
            self._kernels.gemv(space.normed[:1], self._weights.head.weight, space.logits[:1])
            return space.logits[:1]
        count = shape.head_rows - first if count is None else count
        if shape.logit_rows:
            picked = self._tables.logit_rows[first : first + count]
            torch.index_select(space.normed, 0, picked, out=space.gathered[:count])
            hidden = space.gathered
        else:
            assert first == 0, "rows that are not gathered go through the head at once"
            hidden = space.normed
        return self._matmuls.logits(
            hidden, self._weights.head, space.logits, count, self._model.logit_softcap
        )

    def sample(self, shape: StepShape, logits: Tensor, first: int = 0) -> None:
        """Sample a token for each of these rows of logits."""
        rows, sampling = self._tables.logits(shape, first, len(logits))
        sampled = self._space.sampled[first : first + len(logits)]
        self._kernels.sample(logits, rows, sampling, self._sampling_scratch, self.newest, sampled)

    def _many_rows(
        self, step: Arrangement, rotations: Sequence[Tensor], tap: Tap | None, copies: Copies
    ) -> None:
        space, count, eps = self._space, step.shape.rows, self._model.norm_eps
        hidden, normed = space.hidden[:count], space.normed[:count]
        layers, add_norm = self._weights.layers, self._kernels.add_norm
        add_norm(hidden, None, None, layers[0].input_norm, eps, normed)
        for index, layer in enumerate(layers):
            self._matmuls(space.normed, layer.qkv, space.qkv, count)
            self._finish_queries_and_keys(layer, count)
            self._attend(index, step, rotations)
            projected = self._matmuls.project(space.attended, layer.output, count)
            add_norm(hidden, projected, layer.post_attention_norm, layer.mlp_norm, eps, normed)
            self._matmuls.gated(space.normed, layer.gate_up, self._model.activation, space.gated, count)
            projected = self._matmuls.project(space.gated, layer.down, count)
            is_last = index == len(layers) - 1
            next_norm = self._weights.final_norm if is_last else layers[index + 1].input_norm
            add_norm(hidden, projected, layer.post_mlp_norm, next_norm, eps, normed)
            if index in copies:
                self._kernels.drafts.take_columns(hidden, copies[index])
            if tap is not None:
                tap(index, hidden)

    def _fuses_rows(self, rows: int) -> bool:
        matrices = self._weights.layers[0].matrices.values()
        return self._fuses and all(self._kernels.fuses_rows(rows, each.weight) for each in matrices)

    def _few_rows(
        self, step: Arrangement, rotations: Sequence[Tensor], tap: Tap | None, copies: Copies
    ) -> None:
        """One row or a few: norms are the prologues of the matmuls, residuals and gates their epilogues."""
        space, eps, gemv, count = self._space, self._model.norm_eps, self._kernels.gemv, step.shape.rows
        buffers = (space.hidden, space.qkv, space.attended, space.gated)
        hidden, qkv, attended, gated = (buffer[:count] for buffer in buffers)
        for index, layer in enumerate(self._weights.layers):
            gemv(hidden, layer.qkv.weight, qkv, norm=layer.input_norm, eps=eps)
            self._attend(index, step, rotations)
            gemv(attended, layer.output.weight, hidden, residual=hidden)
            gate = self._model.activation
            gemv(hidden, layer.gate_up.weight, gated, norm=layer.mlp_norm, eps=eps, gate=gate)
            gemv(gated, layer.down.weight, hidden, residual=hidden, copy=copies.get(index))
            if tap is not None:
                tap(index, hidden)
        self._kernels.add_norm(hidden, None, None, self._weights.final_norm, eps, space.normed[:count])

    def _finish_queries_and_keys(self, layer: DeviceLayer, count: int) -> None:
        """Do what attention does not: norms over all heads of a row, the temperature of queries."""
        model, qkv = self._model, self._space.qkv[:count]
        queries, keys, _ = qkv.split_with_sizes([model.query_size, model.kv_size, model.kv_size], 1)
        if model.qk_norm == "width":
            assert layer.query_norm is not None
            assert layer.key_norm is not None
            self._kernels.norm_rows(queries, layer.query_norm, model.norm_eps)
            self._kernels.norm_rows(keys, layer.key_norm, model.norm_eps)
        if self._temperature is not None:
            positions = self._tables.rows(0, count).positions.clamp(max=self.attention.capacity - 1)
            laps = torch.log1p((positions // self._temperature.positions).float())
            queries.mul_((1 + self._temperature.beta * laps)[:, None])

    def _attend(self, index: int, step: Arrangement, rotations: Sequence[Tensor]) -> None:
        space, kernels, shape = self._space, self._kernels, step.shape
        layer, rotation = self._attention_layers[index], rotations[self.rope_of_layer[index]]
        if shape.drafts and not self._exact:
            reads_together = shape.sessions >= READ_TOGETHER
            splits = self._splits(shape.sessions if reads_together else shape.rows)
            rows = self._tables.rows(0, shape.rows)
            qkv, out = space.qkv[: shape.rows], space.attended[: shape.rows]
            kernels.draft_attention(qkv, layer, rotation, rows, shape.sessions, splits, self._scratch, out)
            return
        for wave in step.waves:
            part = slice(wave.first, wave.first + wave.count)
            rows, angles = self._tables.rows(wave.first, wave.count), rotation[:, part]
            if wave.has_neighbours:
                kernels.store_rows(space.qkv[part], layer, angles, rows)
            splits, out = self._splits(wave.count), space.attended[part]
            kernels.decode_attention(space.qkv[part], layer, angles, rows, splits, self._scratch, out)
        if shape.prefill_rows:
            part = slice(shape.decode_rows, shape.rows)
            prefill, out = self._tables.prefill(shape), space.attended[part]
            kernels.prefill_attention(space.qkv[part], layer, rotation[:, part], prefill, self._scratch, out)

    def _splits(self, rows: int) -> int:
        return EXACT_SPLITS if self._exact else kv_splits(rows, self._model.num_kv_heads)

    def _layers_over(self, pool: Tensor) -> list[AttentionLayer]:
        windows, norms_heads = self._model.layer_windows, self._model.qk_norm == "head"
        return [
            AttentionLayer(
                pool,
                index,
                self.attention,
                query_norm=layer.query_norm if norms_heads else None,
                key_norm=layer.key_norm if norms_heads else None,
                local_window=windows[index] or 0,
            )
            for index, layer in enumerate(self._weights.layers)
        ]

    def _make_scratch(self, max_rows: int, draft_counts: Sequence[int], device: torch.device) -> Scratch:
        splits = {rows: self._splits(rows) for rows in range(1, max_rows + 1)}
        partials = max((rows * count for rows, count in splits.items() if count > 1), default=0)
        partials *= 1 + max(draft_counts, default=0)
        return self._kernels.scratch(
            self.attention,
            self._weights.dtype,
            device,
            prefill_rows=0 if self._exact else max_rows,
            partials=partials,
        )

    def _rope_tables(self, device: torch.device) -> list[tuple[Tensor, float]]:
        """The inverse frequencies and the attention factor of each RoPE that a layer uses."""
        bounded = [rope.within(self.attention.capacity) for rope in self._model.layer_ropes]
        distinct = list(dict.fromkeys(bounded))
        self.rope_of_layer = [distinct.index(rope) for rope in bounded]
        return [
            (
                torch.tensor(inverse_frequencies(rope).tolist(), dtype=torch.float64, device=device),
                rope.attention_factor,
            )
            for rope in distinct
        ]

    def _rotations(self, rows: RowTable, count: int, rope: int) -> Tensor:
        frequencies, factor = self._ropes[rope]
        out = self._space.rotations(rope, count, self._model.head_dim // 2)
        self._kernels.rotations(rows, self.attention.capacity, frequencies, factor, out)
        return out


def attention_shape(model: ModelConfig, cache: CacheConfig) -> AttentionShape:
    """The model's heads over the slots of its cache."""
    return AttentionShape(
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        capacity=cache.capacity,
        slots=cache.slots,
        scale=model.query_scale,
        softcap=model.attention_softcap or 0.0,
        norm_eps=model.norm_eps,
    )


def query_temperature(model: ModelConfig, capacity: int) -> QueryTemperature | None:
    """None if no position of the bounded cache reaches it."""
    temperature = model.query_temperature
    return None if temperature is None or capacity <= temperature.positions else temperature
