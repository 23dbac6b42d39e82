"""All layers of a decoder as one native call, and the attention of a step as it takes it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kakeya.kernels.native import PackedMatrix


@dataclass(frozen=True)
class NetworkProjection:
    """A packed matrix and its bias, float32 [outputs]."""

    matrix: "PackedMatrix"
    bias: Tensor | None

    def arguments(self) -> tuple[Any, int]:
        return self.matrix.handle, address(self.bias)


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

    def norms(self) -> list[int]:
        return [address(getattr(self, field.name)) for field in fields(self)[:6]]


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
    """The attention of one planned batch, as `Kernels.attend` takes it, for every layer.

    `tables`: cos, sin and those towards the sinks for each layer, float32 [rows, head_dim / 2].
    """

    tables: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]
    pool: Tensor
    segments: Tensor
    sinks: Tensor
    capacity: int
    scale: float
    softcap: float

    def arguments(self) -> tuple[Any, ...]:
        slabs, layers, _, _, slots, _ = self.pool.shape
        tables = [tuple(table.data_ptr() for table in four) for four in self.tables]
        pool = (self.pool.data_ptr(), self.pool.dtype is torch.bfloat16, slabs, layers, slots)
        segments = (self.segments.data_ptr(), self.sinks.data_ptr(), self.sinks.shape[0])
        return (tables, *pool, *segments, self.capacity, self.scale, self.softcap)


def address(tensor: Tensor | None) -> int:
    """Of a contiguous float32 tensor; 0 for none."""
    if tensor is None:
        return 0
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
        raise ValueError(f"norms and biases must be contiguous float32, got {tensor.dtype}")
    return tensor.data_ptr()
