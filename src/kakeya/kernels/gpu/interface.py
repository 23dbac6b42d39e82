"""What the CUDA backend asks of its kernels, and the tables that describe the rows of a step.

Shapes: n is the width of a hidden state, D of a head, I of an MLP. "Element" is the dtype of weights,
activations and pool: bfloat16 or float32. Sums are float32 or better.

Every operation writes into tensors that it is given, keeps nothing, never waits for the device, and can be
captured in a CUDA graph. A row's bits depend on that row's inputs and on `splits`, never on the rest of the
batch. Only `matmul` does not promise this.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kakeya.kernels.gpu.sampling_scratch import SamplingScratch

Activation = Literal["silu", "gelu_tanh"]

TILE_ROWS = 64
"""Rows of a prefill tile: `PrefillTable.tiles` begins a tile at every multiple of it within a segment."""
SEGMENT_FIELDS = 5
"""slab, start position, first row, row count, sink."""
MAX_KV_SPLITS = 16
"""Of decode attention."""
_FILLING = 512
"""Programs of attention that fill a device."""
MAX_K_SPLITS = 4
"""Of a split-K matmul, whose partial sums `add_norm` adds up."""


@dataclass(frozen=True)
class AttentionShape:
    """The heads of a model and the slots of its cache."""

    heads: int
    kv_heads: int
    head_dim: int
    capacity: int  # sink + window
    slots: int  # capacity + spare
    scale: float
    softcap: float  # 0.0: none
    norm_eps: float

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention: where its keys and values lie, its norms and its window."""

    pool: Tensor  # element [slabs, layers, 2, kv_heads, slots, D]
    index: int
    shape: AttentionShape
    query_norm: Tensor | None = None  # float32 [D]; both norms or neither
    key_norm: Tensor | None = None
    local_window: int = 0  # 0: none


@dataclass(frozen=True)
class RowTable:
    """The slab, position and sink of each row: int32 [rows] each, in storage that is refilled for every step.

    A slab of -1 marks padding: the row touches no slab, and its results may be anything.
    """

    slabs: Tensor
    positions: Tensor
    sinks: Tensor


@dataclass(frozen=True)
class PrefillTable:
    """How prefill rows form segments: int32, and -1 marks padding.

    The rows of a segment are neighbours in the tensors that come with the table. First rows count from the
    beginning of those tensors.
    """

    segments: Tensor  # [segments, 5]: slab, start position, first row, row count, sink
    tiles: Tensor  # [tiles, 2]: segment or -1, first row within the segment (a multiple of TILE_ROWS)
    row_segments: Tensor  # [rows]: segment or -1


@dataclass(frozen=True)
class SamplingTable:
    """How each row of logits is sampled: one value per row."""

    temperature: Tensor  # float32; 0 is greedy
    top_k: Tensor  # int32; 0: all
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seed: Tensor  # int64: the bits of the unsigned seed
    positions: Tensor  # int32: of the token to sample


@dataclass(frozen=True)
class DraftTable:
    """The rows of a drafting step: int32 [(1 + draft) * sessions] each. Row `place * sessions + session` has
    the token at that place behind the session's newest, which is at place 0."""

    token_ids: Tensor
    slabs: Tensor
    positions: Tensor
    sampling_positions: Tensor


@dataclass(frozen=True)
class Scratch:
    """What the kernels of attention leave for each other. Calls on one stream may share it."""

    partial_outputs: Tensor  # float32 [partials, heads, D]: of each KV split
    stats: Tensor  # float32 [partials, heads, 2]: the maximum and the sum of its softmax
    arrived: Tensor  # int32 [partials, kv_heads]: splits that are done; zero between calls
    queries: Tensor  # element [prefill rows, heads, D]: rotated for the window
    sink_queries: Tensor  # the same, rotated for the sinks
    keys: Tensor  # element [prefill rows, kv_heads, D]


class GpuDrafts(Protocol):
    """What a drafter on the device needs beside the operations of a step. Features, anchors and states are
    float32 [.., n]; anchors have one row for each slab."""

    def input(
        self,
        table: Tensor,
        token_ids: Tensor,
        newest: Tensor,
        rows: RowTable,
        anchors: Tensor | None,
        state: Tensor,
        token_norm: Tensor,
        state_norm: Tensor,
        eps: float,
        out: Tensor,
    ) -> None:
        """out element [rows, 2 n] = rms_norm(embedding of the token) * token_norm, then rms_norm(state) *
        state_norm. Tokens as in `embed`. With anchors, each row's state first becomes its slab's anchor."""
        ...

    def take_columns(self, hidden: Tensor, out: Tensor) -> None:
        """out = hidden, float32 [rows, n]. out is element: columns of wider rows."""
        ...

    def keep_anchors(self, features: Tensor, picked: Tensor | None, slabs: Tensor, anchors: Tensor) -> None:
        """anchors[slab] = the feature of each row, or of the row that it picks; nothing for padding."""
        ...

    def choose(
        self,
        logits: Tensor,
        draft_vocab: Tensor,
        rows: RowTable,
        sampling: SamplingTable,
        newest: Tensor,
        sampled: Tensor,
    ) -> None:
        """sampled int32 [rows] = a guess for each row of logits: an id of `draft_vocab`, int32 [columns].

        The likeliest, or one drawn with the row's temperature and random number. Filters are left out, as a
        guess need not keep them. Also newest[slab] = the guess. Nothing for padding."""
        ...

    def judge(
        self,
        table: DraftTable,
        sampled: Tensor,
        newest: Tensor,
        features: Tensor,
        anchors: Tensor,
        runs: Tensor,
    ) -> None:
        """Keep of each draft what the verifier sampled itself, and make the table that of the next step.

        runs int32 [sessions, draft + 2] = how many tokens the session got, then what was sampled at each
        place. Also newest[slab] = the last of them, anchors[slab] = the feature of the row that it comes
        from. Nothing for padding."""
        ...


class GpuKernels(Protocol):
    """The operations of a step beside cuBLAS: attention, what lies between matmuls, small matmuls, sampling.

    Rows are contiguous, and there is at least one.
    """

    name: str
    drafts: GpuDrafts

    def supports_head_dim(self, head_dim: int) -> bool:
        """Whether attention supports heads of this size."""
        ...

    def scratch(
        self,
        shape: AttentionShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        prefill_rows: int,
        partials: int,
    ) -> Scratch:
        """Scratch for prefill_attention over `prefill_rows`, and for decode_attention wherever
        rows * splits <= partials (a single split needs none)."""
        ...

    def embed(
        self, table: Tensor, token_ids: Tensor, newest: Tensor, rows: RowTable, scale: float, hidden: Tensor
    ) -> None:
        """hidden[r] = scale * table[token], float32 [rows, n]; zeros for padding.

        `table` is bfloat16 or float32 [vocab, n]. A negative id in `token_ids` (int32 [rows]) stands for the
        token that the slab's last step sampled: `newest` int32 [slabs].
        """
        ...

    def rotations(
        self, rows: RowTable, capacity: int, inverse_frequencies: Tensor, factor: float, out: Tensor
    ) -> None:
        """RoPE tables: factor * (cos, sin at the row's position; cos, sin at its position as the sinks see
        it), float32 [4, rows, D / 2]. Angles are float64 like `inverse_frequencies` [D / 2]; where that is 0,
        nothing rotates and the factor is 1. Padding gets anything finite."""
        ...

    def add_norm(
        self,
        hidden: Tensor,
        addend: Tensor | None,
        post_weight: Tensor | None,
        weight: Tensor | None,
        eps: float,
        out: Tensor,
    ) -> None:
        """hidden += addend (first normed with post_weight, if given), then out = rms_norm(hidden) * weight,
        or hidden itself if there is no weight.

        hidden float32 [rows, n] changes in place. addend: element or float32 [rows, n], or the partial sums
        of a split-K matmul [splits, rows, n]. out: element or float32. weights: float32 [n].
        """
        ...

    def norm_rows(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """x = rms_norm(x) * weight in place, for element [rows, n]: contiguous columns of wider rows."""
        ...

    def gated(self, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
        """activation(gate) * up for gate_up [rows, 2 I], gate first; out [rows, I]. Computed in float32."""
        ...

    def gemv(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        gate: Activation | None = None,
        copy: Tensor | None = None,
    ) -> None:
        """A matmul of one row, or of a few where `fuses_rows`: out [rows, N] = x [rows, K] @ weight [N, K]^T.

        norm (float32 [K]): x is float32 and normed first. residual (float32 [rows, N], may be out itself) is
        added, and out is float32. gate: weight is [2 N, K], and out = gate(first half) * second half.
        Residual and gate exclude each other. copy: element [rows, N], columns of wider rows, becomes out too.
        """
        ...

    def fuses_rows(self, rows: int, weight: Tensor) -> bool:
        """Whether `gemv` takes so many rows, and is the fastest way to compute them."""
        ...

    def k_splits(self, rows: int, weight: Tensor, outputs: int, most: int = 1) -> int:
        """With how many splits along K, `most` at most, `matmul` is fastest; 0 if cuBLAS is faster.

        `outputs`: the rows of the weight, or half of them if they are gated.
        """
        ...

    def matmul(self, x: Tensor, weight: Tensor, out: Tensor, *, gate: Activation | None = None) -> None:
        """out [rows, N] = x [rows, K] @ weight [N, K]^T; gate: as above.

        out is element, or float32 [splits, rows, N] for the partial sums of an ungated split-K matmul, with
        as many splits as k_splits returned.
        """
        ...

    def decode_attention(
        self,
        qkv: Tensor,
        layer: AttentionLayer,
        rotations: Tensor,
        rows: RowTable,
        splits: int,
        scratch: Scratch,
        out: Tensor,
    ) -> None:
        """Store each row's key and value in its slot and attend: out element [rows, heads * D].

        qkv: element [rows, (heads + 2 kv_heads) * D], neither normed nor rotated. rotations: the RoPE tables,
        or a view of some of their rows. splits: over the slots, a power of two up to MAX_KV_SPLITS. A call
        may have several rows of one session if store_rows has stored them: no row sees a later one.
        """
        ...

    def store_rows(self, qkv: Tensor, layer: AttentionLayer, rotations: Tensor, rows: RowTable) -> None:
        """Store keys and values as decode_attention does, with the same bits, and do nothing else. A session
        may have as many rows as overwrite nothing that the first of them sees: spare + 1, or up to the first
        wrap."""
        ...

    def draft_attention(
        self,
        qkv: Tensor,
        layer: AttentionLayer,
        rotations: Tensor,
        rows: RowTable,
        sessions: int,
        splits: int,
        scratch: Scratch,
        out: Tensor,
    ) -> None:
        """Store and attend as decode_attention does, for the rows of a drafting step (DraftTable), which need
        not be stored before. From READ_TOGETHER sessions on those of one read its slab together. It rounds
        differently."""
        ...

    def prefill_attention(
        self,
        qkv: Tensor,
        layer: AttentionLayer,
        rotations: Tensor,
        table: PrefillTable,
        scratch: Scratch,
        out: Tensor,
    ) -> None:
        """Prefill: the rows of longer segments attend to slab and block, then store what later tokens see.

        The tensors are those of decode_attention. A session has one segment at most.
        """
        ...

    def sample(
        self,
        logits: Tensor,
        rows: RowTable,
        sampling: SamplingTable,
        scratch: SamplingScratch,
        newest: Tensor,
        sampled: Tensor,
    ) -> None:
        """sampled int32 [rows] = a token for each row of logits (float32 [rows, vocab]), -1 where the
        greatest logit is not finite. engine.sampler defines the result, for rows without penalties, bias,
        mask and log-probabilities.

        Also newest[slab] = the token (0 for a broken row, so that it can be looked up); nothing for padding.
        Only the slabs of `rows` are read. `scratch` must be made for this vocabulary and for as many rows.
        """
        ...


# From so many sessions on it pays that the new tokens of a drafting step read their slab together.
READ_TOGETHER = 8


def kv_splits(rows: int, kv_heads: int) -> int:
    """With how many splits decode_attention is fastest: enough programs to fill the device, and no more."""
    share = max(1, _FILLING // max(rows * kv_heads, 1))
    return min(MAX_KV_SPLITS, 1 << (share.bit_length() - 1))
