"""A trained drafter on the device: it guesses inside the captured step that verifies its guesses.

Its keys and values lie in the last layers of the slabs, so they are forked, shared and dropped with the
session. A slab's *anchor* is the feature of its newest computed position: drafting starts there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kakeya.engine.cuda.matmul import Matmuls
from kakeya.engine.cuda.shapes import StepLimits, StepShape
from kakeya.engine.cuda.tables import StepTables
from kakeya.engine.cuda.weights import DeviceWeights, Matrix
from kakeya.engine.cuda.workspace import Workspace, WorkspacePlan, whole_tiles
from kakeya.engine.slab import SlabPool
from kakeya.kernels.gpu import (
    AttentionLayer,
    AttentionShape,
    GpuKernels,
    RowTable,
    Scratch,
    kv_splits,
)
from kakeya.models.config import ModelConfig
from kakeya.models.drafter import DrafterConfig, StoredDrafter


@dataclass(frozen=True)
class _DraftLayer:
    """One layer's weights, and where its keys and values lie: those it drafts with and those of history."""

    history_norm: Tensor
    history_kv: Matrix
    token_norm: Tensor
    state_norm: Tensor
    qkv: Matrix
    output: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    attention: AttentionLayer
    history: AttentionLayer


@dataclass(frozen=True)
class DrafterPlan:
    """The sizes of a drafter's buffers: features for all rows of a step, the rest for its sessions."""

    config: DrafterConfig
    model: ModelConfig
    rows: int
    sessions: int
    element: torch.dtype

    @property
    def workspace(self) -> WorkspacePlan:
        limits = StepLimits(self.sessions, segments=1, tiles=1, head_rows=self.sessions)
        shape = replace(
            self.model,
            intermediate_size=self.config.intermediate_size,
            vocab_size=self.config.draft_vocab_size,
        )
        return WorkspacePlan(shape, limits, self.element)

    @property
    def nbytes(self) -> int:
        """Of the buffers and the weights. A generous estimate."""
        config, rows = self.config, whole_tiles(self.rows)
        row = (len(config.taps) + 2) * config.hidden_size + 2 * config.kv_size
        weights = sum(torch.Size(shape).numel() for shape in config.shapes.values())
        if config.draft_vocab_size < self.model.vocab_size:
            weights += config.draft_vocab_size * config.hidden_size  # its rows of the head
        return self.workspace.nbytes + 4 * (rows * row + weights)


class DeviceDrafter:
    """Observes every step, and drafts in those that have room for it."""

    def __init__(
        self,
        stored: StoredDrafter,
        weights: DeviceWeights,
        pool: SlabPool,
        kernels: GpuKernels,
        tables: StepTables,
        plan: DrafterPlan,
        attention: AttentionShape,
        rope: int,
    ) -> None:
        self._config, self._weights, self._kernels, self._tables = stored.config, weights, kernels, tables
        self._model, self._attention, self._rope = weights.config, attention, rope
        self._device, self._element = pool.device, weights.dtype
        self._layers = [self._layer(stored, pool, index) for index in range(stored.config.layers)]
        self._fuse = self._matrix(stored.tensors["fuse.weight"])
        self._fuse_bias = self._vector(stored.tensors["fuse.bias"]).expand(whole_tiles(1), -1).contiguous()
        self._final_norm = self._vector(stored.tensors["final_norm"])
        self._draft_vocab = stored.draft_vocab.to(self._device, torch.int32)
        self._head = self._guessable_rows(weights.head)
        self._make_buffers(plan, len(pool.storage))

    def _make_buffers(self, plan: DrafterPlan, slabs: int) -> None:
        config, device = self._config, self._device
        n, rows = config.hidden_size, whole_tiles(plan.rows)
        self._space = Workspace(plan.workspace, device)
        self._matmuls = Matmuls(self._kernels, self._space, exact=False)
        self._taps = torch.zeros(rows, len(config.taps) * n, dtype=self._element, device=device)
        self._features = torch.zeros(rows, n, device=device)
        self._normed = torch.zeros(rows, n, dtype=self._element, device=device)
        self._kv = torch.zeros(rows, 2 * config.kv_size, dtype=self._element, device=device)
        self._state = torch.zeros(plan.sessions, n, device=device)
        self._input = torch.zeros(plan.sessions, 2 * n, dtype=self._element, device=device)
        self._anchors = torch.zeros(slabs, n, device=device)
        self._guessed = torch.zeros(slabs, dtype=torch.int32, device=device)
        self._scratch = self._attention_scratch(plan.sessions)

    # In every step.

    def taps(self, rows: int) -> Mapping[int, Tensor]:
        """Where the outputs of the layers that it reads are copied to."""
        n = self._config.hidden_size
        return {
            layer: self._taps[:rows, place * n : (place + 1) * n]
            for place, layer in enumerate(self._config.taps)
        }

    def observe(self, shape: StepShape, rotations: Sequence[Tensor]) -> None:
        """Make features of what was copied: keys and values of the history, and the anchors."""
        count = shape.rows
        rows, angles = self._tables.rows(0, count), rotations[self._rope]
        features = self._features[:count]
        fuses = len(self._fuse_bias) >= count and self._kernels.fuses_rows(count, self._fuse.weight)
        (self._observe_few if fuses else self._observe_many)(features)
        for layer in self._layers:
            self._remember(layer, features, fuses=fuses)
            self._kernels.store_rows(self._kv[:count], layer.history, angles, rows)
        if not shape.drafts:
            picked, slabs = self._tables.last_rows(shape)
            self._kernels.drafts.keep_anchors(features, picked, slabs, self._anchors)

    def _observe_few(self, features: Tensor) -> None:
        count = len(features)
        self._kernels.gemv(self._taps[:count], self._fuse.weight, features, residual=self._fuse_bias[:count])

    def _observe_many(self, features: Tensor) -> None:
        count = len(features)
        features.copy_(self._fuse_bias[0].expand_as(features))
        unnormed = self._normed[:count]  # nobody needs what it is given
        self._kernels.add_norm(features, self._fused(count), None, None, self._config.norm_eps, unnormed)

    def _fused(self, count: int) -> Tensor:
        fused = self._normed  # free until a layer norms the features
        if count <= len(self._space.projected):
            return self._matmuls.project(self._taps, self._fuse, count)
        self._matmuls(self._taps, self._fuse, fused, count)
        return fused[:count]

    def _remember(self, layer: _DraftLayer, features: Tensor, *, fuses: bool) -> None:
        """Make a layer's keys and values of features."""
        kernels, count, eps = self._kernels, len(features), self._config.norm_eps
        kv, normed = self._kv[:count], self._normed[:count]
        if fuses and kernels.fuses_rows(count, layer.history_kv.weight):
            kernels.gemv(features, layer.history_kv.weight, kv, norm=layer.history_norm, eps=eps)
            return
        kernels.add_norm(features, None, None, layer.history_norm, eps, normed)
        self._matmuls(self._normed, layer.history_kv, self._kv, count)

    # In a drafting step.

    def draft(self, shape: StepShape, rotations: Sequence[Tensor], newest: Tensor) -> None:
        """Guess token by token, from the anchors on; the tables get the guesses."""
        sessions = shape.sessions
        for place in range(shape.drafts):
            part = slice(place * sessions, (place + 1) * sessions)
            angles = rotations[self._rope][:, part]
            self._guess(shape, place, self._tables.rows(part.start, sessions), angles, newest)

    def _guess(self, shape: StepShape, place: int, rows: RowTable, angles: Tensor, newest: Tensor) -> None:
        sessions = shape.sessions
        tokens = self._tables.token_ids[place * sessions :]
        anchors = None if place else self._anchors
        for index, layer in enumerate(self._layers):
            source = newest if not place else self._guessed
            self._layer_step(layer, tokens[:sessions], source, rows, anchors if not index else None, angles)
        _, sampling = self._tables.logits(shape, place * sessions, sessions)
        sampled = tokens[sessions : 2 * sessions]
        logits = self._logits(sessions)
        self._kernels.drafts.choose(logits, self._draft_vocab, rows, sampling, self._guessed, sampled)

    def _layer_step(
        self,
        layer: _DraftLayer,
        tokens: Tensor,
        newest: Tensor,
        rows: RowTable,
        anchors: Tensor | None,
        angles: Tensor,
    ) -> None:
        kernels, space, count, eps = self._kernels, self._space, len(tokens), self._config.norm_eps
        state, given = self._state[:count], self._input[:count]
        kernels.drafts.input(
            self._weights.embedding, tokens, newest, rows, anchors, state,
            layer.token_norm, layer.state_norm, eps, given,
        )  # fmt: skip
        if kernels.fuses_rows(count, layer.gate_up.weight):
            self._few_rows_step(layer, state, given, rows, angles)
            return
        self._matmuls(self._input, layer.qkv, space.qkv, count)
        self._attend(layer, rows, angles, count)
        projected = self._matmuls.project(space.attended, layer.output, count)
        kernels.add_norm(state, projected, None, layer.mlp_norm, eps, space.normed[:count])
        self._matmuls.gated(space.normed, layer.gate_up, "silu", space.gated, count)
        projected = self._matmuls.project(space.gated, layer.down, count)
        kernels.add_norm(state, projected, None, None, eps, space.normed[:count])

    def _few_rows_step(
        self, layer: _DraftLayer, state: Tensor, given: Tensor, rows: RowTable, angles: Tensor
    ) -> None:
        """Norms are the prologues of the matmuls, residuals and gates their epilogues."""
        space, gemv, count, eps = self._space, self._kernels.gemv, len(state), self._config.norm_eps
        attended, gated = space.attended[:count], space.gated[:count]
        gemv(given, layer.qkv.weight, space.qkv[:count])
        self._attend(layer, rows, angles, count)
        gemv(attended, layer.output.weight, state, residual=state)
        gemv(state, layer.gate_up.weight, gated, norm=layer.mlp_norm, eps=eps, gate="silu")
        gemv(gated, layer.down.weight, state, residual=state)

    def _logits(self, count: int) -> Tensor:
        """What the verifier's head makes of the states, for the tokens that are guessed."""
        space, head, state = self._space, self._head, self._state[:count]
        eps, cap = self._config.norm_eps, self._model.logit_softcap
        if count == 1 and cap is None:
            self._kernels.gemv(state, head.weight, space.logits[:1], norm=self._final_norm, eps=eps)
            return space.logits[:1]
        self._kernels.add_norm(state, None, None, self._final_norm, eps, space.normed[:count])
        return self._matmuls.logits(space.normed, head, space.logits, count, cap)

    def _attend(self, layer: _DraftLayer, rows: RowTable, angles: Tensor, count: int) -> None:
        space, splits = self._space, kv_splits(count, self._config.num_kv_heads)
        self._kernels.decode_attention(
            space.qkv[:count], layer.attention, angles, rows, splits, self._scratch, space.attended[:count]
        )

    def judge(self, shape: StepShape, sampled: Tensor, newest: Tensor, runs: Tensor) -> None:
        """Keep of the guesses what the verifier sampled itself; the tables become those of the next step."""
        table = self._tables.drafts(shape)
        self._kernels.drafts.judge(table, sampled[: shape.rows], newest, self._features, self._anchors, runs)

    # Weights.

    def _layer(self, stored: StoredDrafter, pool: SlabPool, index: int) -> _DraftLayer:
        def tensor(name: str) -> Tensor:
            return stored.tensors[f"layers.{index}.{name}"]

        def matrix(name: str) -> Matrix:
            return self._matrix(tensor(name))

        def vector(name: str) -> Tensor:
            return self._vector(tensor(name))

        place = pool.geometry.model_layers + index
        return _DraftLayer(
            history_norm=vector("history_norm"),
            history_kv=matrix("history_kv"),
            token_norm=vector("token_norm"),
            state_norm=vector("state_norm"),
            qkv=matrix("qkv"),
            output=matrix("output"),
            mlp_norm=vector("mlp_norm"),
            gate_up=matrix("gate_up"),
            down=matrix("down"),
            attention=AttentionLayer(pool.storage, place, self._attention),
            # What is stored of the history has keys and values and no queries.
            history=AttentionLayer(pool.storage, place, replace(self._attention, heads=0)),
        )

    def _guessable_rows(self, head: Matrix) -> Matrix:
        """The rows of the verifier's head for the tokens that it can guess."""
        is_whole = len(self._draft_vocab) == self._model.vocab_size
        return head if is_whole else Matrix(head.weight.index_select(0, self._draft_vocab))

    def _matrix(self, tensor: Tensor) -> Matrix:
        return Matrix(tensor.to(self._device, self._element))

    def _vector(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, torch.float32)

    def _attention_scratch(self, sessions: int) -> Scratch:
        kv_heads = self._config.num_kv_heads
        splits = {rows: kv_splits(rows, kv_heads) for rows in range(1, sessions + 1)}
        partials = max((rows * count for rows, count in splits.items() if count > 1), default=0)
        return self._kernels.scratch(
            self._attention, self._element, self._device, prefill_rows=0, partials=partials
        )
