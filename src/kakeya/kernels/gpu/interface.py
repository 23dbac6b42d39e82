"""What a device backend asks of its kernels, and the tables that tell them about a step's rows.

Shapes: n the width of a hidden state, D of a head, I of an MLP. "Element" is the dtype of weights,
activations and pool alike: bfloat16 or float32. Sums are float32 or better.

Every operation writes into tensors it is given, keeps nothing, never waits for the device, and can be
captured in a graph. A row's bits depend on that row's inputs alone (and on `splits`), never on the rest of
the batch; `product` alone does not promise it.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kakeya.kernels.gpu.choice_scratch import ChoiceScratch

Activation = Literal["silu", "gelu_tanh"]

TILE_ROWS = 64
"""Rows of one prompt tile: `PromptTable.tiles` begins a tile at every multiple of this within its segment."""
SEGMENT_FIELDS = 5
"""slab, start position, first row, row count, sink."""
MAX_SPLITS = 16
_FILLING = 512
"""Programs of attention that fill a device."""
MAX_PARTS = 4
"""Of a product whose sum is left to whoever reads it."""


@dataclass(frozen=True)
class AttentionShape:
    """The heads of a model and the slots of its cache."""

    heads: int
    kv_heads: int
    head_dim: int
    capacity: int  # sink + window
    slots: int  # with the spare ones
    scale: float
    softcap: float  # 0.0: none
    norm_eps: float

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention: where its keys and values lie, and how it looks at them."""

    pool: Tensor  # element [slabs, layers, 2, kv_heads, slots, D]
    index: int
    shape: AttentionShape
    query_norm: Tensor | None = None  # float32 [D]; both norms or neither
    key_norm: Tensor | None = None
    local_window: int = 0  # 0: none


@dataclass(frozen=True)
class RowTable:
    """Where each row belongs: int32 [rows] each, in storage that is refilled for every step.

    A slab of -1 marks padding: no slab is touched for the row, and its results may be anything.
    """

    slabs: Tensor
    positions: Tensor
    sinks: Tensor


@dataclass(frozen=True)
class PromptTable:
    """How prompt rows form segments: int32, and -1 marks padding.

    The rows of a segment are neighbours in the tensors handed over with the table, and first rows count from
    the beginning of those tensors.
    """

    segments: Tensor  # [segments, 5]: slab, start position, first row, row count, sink
    tiles: Tensor  # [tiles, 2]: segment or -1, first row within the segment (a multiple of TILE_ROWS)
    row_segments: Tensor  # [rows]: segment or -1


@dataclass(frozen=True)
class ChoiceTable:
    """How each row of logits is sampled: one value a row."""

    temperature: Tensor  # float32; 0 takes the best
    top_k: Tensor  # int32; 0: all
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seed: Tensor  # int64: the bits of the unsigned seed
    positions: Tensor  # int32: of the token to choose


@dataclass(frozen=True)
class Scratch:
    """What attention leaves between its launches. Calls on one stream may share it."""

    parts: Tensor  # float32 [parts, heads, D]: what each split has mixed
    stats: Tensor  # float32 [parts, heads, 2]: its top score and its total
    arrived: Tensor  # int32 [parts, kv_heads]: splits that are done; all zero between calls
    queries: Tensor  # element [prompt rows, heads, D]: rotated for the window
    sink_queries: Tensor  # the same, rotated for the sinks
    keys: Tensor  # element [prompt rows, kv_heads, D]


class GpuKernels(Protocol):
    """The operations of a step between its matrix products, and the product of a single row.

    Rows are contiguous and there is at least one.
    """

    name: str

    def supports_head_dim(self, head_dim: int) -> bool:
        """Whether attention takes heads of this size."""
        ...

    def scratch(
        self, shape: AttentionShape, dtype: torch.dtype, device: torch.device, *, prompt_rows: int, parts: int
    ) -> Scratch:
        """Room for prompt_attention over `prompt_rows`, and for decode_attention wherever
        rows * splits <= parts (a single split needs none)."""
        ...

    def embed(
        self, table: Tensor, token_ids: Tensor, newest: Tensor, rows: RowTable, scale: float, hidden: Tensor
    ) -> None:
        """hidden[r] = scale * table[token], float32 [rows, n]; zeros for padding.

        `table` is bfloat16 or float32 [vocab, n]. A negative id of `token_ids` (int32 [rows]) stands for the
        token that the slab's last step chose: `newest` int32 [slabs].
        """
        ...

    def rotations(
        self, rows: RowTable, capacity: int, inverse_frequencies: Tensor, factor: float, out: Tensor
    ) -> None:
        """factor * (cos, sin at the row's position; cos, sin at the position sinks see it at), float32
        [4, rows, D / 2]. Angles are float64 like `inverse_frequencies` [D / 2]; where that is 0, nothing
        turns and the factor is 1. Padding: anything finite."""
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

        hidden float32 [rows, n] changes in place; addend element or float32, and may be the parts of a
        product: [parts, rows, n]; out element or float32; weights float32 [n].
        """
        ...

    def norm_rows(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """x = rms_norm(x) * weight in place, for element [rows, n]: contiguous columns of wider rows."""
        ...

    def gated(self, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
        """activation(gate) * up for gate_up [rows, 2 I], gate first; out [rows, I]. Computed in float32."""
        ...

    def one_row_product(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        gate: Activation | None = None,
    ) -> None:
        """out [1, N] = x [1, K] @ weight [N, K]^T.

        norm (float32 [K]): x is float32 and normed first. residual (float32 [1, N], may be out itself):
        added, and out is float32. gate: weight is [2 N, K] and out = gate(first half) * second half. Not
        both.
        """
        ...

    def product_parts(self, rows: int, weight: Tensor, outputs: int, most: int = 1) -> int:
        """In how many parts, `most` or fewer, `product` is quickest; 0 if a library's product is quicker.

        `outputs`: the rows of the weight, or half of them where they are gated.
        """
        ...

    def product(self, x: Tensor, weight: Tensor, out: Tensor, *, gate: Activation | None = None) -> None:
        """out [rows, N] = x [rows, K] @ weight [N, K]^T; gate: as above.

        out is element, or float32 [parts, rows, N], ungated: what the product is the sum of. As many parts as
        product_parts has said.
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

        qkv: element [rows, (heads + 2 kv_heads) * D], neither normed nor rotated. rotations: as made above; a
        view of some of its rows will do. splits: a power of two up to MAX_SPLITS. Rows of one session may
        come together once store_rows has stored them: no row sees a later one.
        """
        ...

    def store_rows(self, qkv: Tensor, layer: AttentionLayer, rotations: Tensor, rows: RowTable) -> None:
        """Only the storing half of decode_attention, with the same bits. Of a session at most as many rows as
        displace nothing that the first of them sees: spare + 1, or up to the end of the first lap."""
        ...

    def prompt_attention(
        self,
        qkv: Tensor,
        layer: AttentionLayer,
        rotations: Tensor,
        prompt: PromptTable,
        scratch: Scratch,
        out: Tensor,
    ) -> None:
        """The rows of multi-row segments: attend to slab and block, then store what later tokens will see.

        The tensors are those of decode_attention. A session has one segment at most.
        """
        ...

    def choose(
        self,
        logits: Tensor,
        rows: RowTable,
        choice: ChoiceTable,
        scratch: ChoiceScratch,
        newest: Tensor,
        chosen: Tensor,
    ) -> None:
        """chosen int32 [rows] = the token of each row of logits (float32 [rows, vocab]), -1 where the best
        logit is not finite. What engine.sampler says of rows without penalties, bias, mask and
        log-probabilities.

        Also newest[slab] = the token (0 for a broken row, so that it can be looked up); nothing for padding.
        Of `rows`, only the slabs are read. `scratch` has room for as many rows of this vocabulary.
        """
        ...


def splits_for(rows: int, kv_heads: int) -> int:
    """How many splits decode_attention is quickest with: enough programs to fill the device, no more."""
    share = max(1, _FILLING // max(rows * kv_heads, 1))
    return min(MAX_SPLITS, 1 << (share.bit_length() - 1))
