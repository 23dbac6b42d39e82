"""All layers of a decoder as one native call, and the attention of a step as it takes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kakeya.kernels.checks import address

if TYPE_CHECKING:
    from kakeya.kernels.native import PackedMatrix


@dataclass(frozen=True)
class NetworkProjection:
    """A packed matrix and its bias, float32 [outputs]."""

    matrix: "PackedMatrix"
    bias: Tensor | None

    def arguments(self, name: str, outputs: int, columns: int) -> tuple[Any, int]:
        if (self.matrix.outputs, self.matrix.columns) != (outputs, columns):
            raise ValueError(
                f"{name} must be [{outputs}, {columns}], got [{self.matrix.outputs}, {self.matrix.columns}]"
            )
        return self.matrix.handle, _vector(self.bias, f"the bias of {name}", outputs)


@dataclass(frozen=True)
class NetworkLayer:
    """One layer. Norm weights are float32; None where a family has no such norm."""

    input_norm: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    post_attention_norm: Tensor | None
    mlp_norm: Tensor | None
    post_mlp_norm: Tensor | None
    qkv: NetworkProjection
    output: NetworkProjection
    gate_up: NetworkProjection
    down: NetworkProjection
    local_window: int | None

    def arguments(self, shape: "NetworkShape") -> tuple[Any, ...]:
        """As the native library takes them. Raises ValueError for what does not fit the shape."""
        hidden, query, key = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        query_norm, key_norm = (query, key) if shape.norms_span_heads else (shape.head_dim, shape.head_dim)
        return (
            [
                _vector(self.input_norm, "input_norm", hidden),
                _vector(self.query_norm, "query_norm", query_norm),
                _vector(self.key_norm, "key_norm", key_norm),
                _vector(self.post_attention_norm, "post_attention_norm", hidden),
                _vector(self.mlp_norm, "mlp_norm", hidden),
                _vector(self.post_mlp_norm, "post_mlp_norm", hidden),
            ],
            self.qkv.arguments("qkv", query + 2 * key, hidden),
            self.output.arguments("output", hidden, query),
            self.gate_up.arguments("gate_up", 2 * shape.inner, hidden),
            self.down.arguments("down", hidden, shape.inner),
            self.local_window or 0,
        )


@dataclass(frozen=True)
class NetworkShape:
    """What all layers share. `norms_span_heads`: those of queries and keys cover all heads of a row."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    norms_span_heads: bool
    eps: float
    gelu: bool


@dataclass(frozen=True)
class Network:
    """Layers ready to run; made by `Kernels.network`. Keeps their tensors alive."""

    shape: NetworkShape
    layers: Sequence[NetworkLayer]
    handle: Any


@dataclass(frozen=True)
class AttentionContext:
    """The attention of one planned batch, as `Kernels.attend` takes it, for every layer of a network.

    `tables`: cos, sin and those towards the sinks for each layer, float32 [rows, head_dim / 2].
    """

    tables: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]
    pool: Tensor
    segments: Tensor
    sinks: Tensor
    capacity: int
    scale: float
    softcap: float

    def arguments(self, first: int, end: int) -> tuple[Any, ...]:
        """As the native library takes them for the layers from `first` to `end`."""
        slabs, layers, _, _, slots, _ = self.pool.shape
        tables = [tuple(table.data_ptr() for table in four) for four in self.tables[first:end]]
        pool = (self.pool.data_ptr(), self.pool.dtype is torch.bfloat16, slabs, layers, slots)
        segments = (self.segments.data_ptr(), self.sinks.data_ptr(), self.sinks.shape[0])
        return (first, tables, *pool, *segments, self.capacity, self.scale, self.softcap)


def _vector(tensor: Tensor | None, name: str, size: int) -> int:
    """The address of a float32 vector; 0 for none."""
    return 0 if tensor is None else address(tensor, name, (size,))
