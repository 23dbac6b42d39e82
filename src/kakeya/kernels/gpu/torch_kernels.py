"""GPU kernels in plain torch: for devices without Triton, for head sizes it does not support, and for tests.

Sums and transcendental functions are float64 and rounded once. So the order in which torch adds, and whether
an element falls into a vector loop or its tail, hardly ever shows in a result.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kakeya.kernels.gpu import torch_attention, torch_sampling
from kakeya.kernels.gpu.interface import (
    Activation,
    AttentionLayer,
    AttentionShape,
    GpuDrafts,
    PrefillTable,
    RowTable,
    SamplingTable,
    Scratch,
)
from kakeya.kernels.gpu.sampling_scratch import SamplingScratch
from kakeya.kernels.gpu.torch_drafts import TorchDrafts


class TorchKernels:
    """GpuKernels in torch, on any device. It needs no scratch and ignores `splits`."""

    name = "torch"

    def __init__(self) -> None:
        self.drafts: GpuDrafts = TorchDrafts()

    def supports_head_dim(self, head_dim: int) -> bool:
        return head_dim % 2 == 0

    def scratch(
        self,
        shape: AttentionShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        prefill_rows: int,
        partials: int,
    ) -> Scratch:
        del shape, prefill_rows, partials
        none = torch.empty(0, dtype=dtype, device=device)
        return Scratch(none, none, none, none, none, none)

    def embed(
        self, table: Tensor, token_ids: Tensor, newest: Tensor, rows: RowTable, scale: float, hidden: Tensor
    ) -> None:
        last = newest.index_select(0, rows.slabs.clamp(min=0))
        tokens = torch.where(token_ids >= 0, token_ids, last)
        looked_up = functional.embedding(tokens, table).float() * scale
        hidden.copy_(looked_up.masked_fill_((rows.slabs < 0)[:, None], 0.0))

    def rotations(
        self, rows: RowTable, capacity: int, inverse_frequencies: Tensor, factor: float, out: Tensor
    ) -> None:
        growth = torch.where(inverse_frequencies == 0, 1.0, factor)
        for at, positions in enumerate((rows.positions, rows.positions.clamp(max=capacity - 1))):
            angles = positions.double()[:, None] * inverse_frequencies
            out[2 * at].copy_(angles.cos() * growth)
            out[2 * at + 1].copy_(angles.sin() * growth)

    def add_norm(
        self,
        hidden: Tensor,
        addend: Tensor | None,
        post_weight: Tensor | None,
        weight: Tensor | None,
        eps: float,
        out: Tensor,
    ) -> None:
        if addend is not None:
            addend = addend.float().view(-1, *hidden.shape).sum(0)
            hidden.add_(addend if post_weight is None else torch_attention.normed(addend, post_weight, eps))
        out.copy_(hidden if weight is None else torch_attention.normed(hidden, weight, eps))

    def norm_rows(self, x: Tensor, weight: Tensor, eps: float) -> None:
        x.copy_(torch_attention.normed(x, weight, eps))

    def gated(self, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
        gate, up = gate_up.double().chunk(2, dim=-1)
        out.copy_(_activated(gate, activation) * up)

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
        row = x.float() if norm is None else torch_attention.normed(x, norm, eps)
        result = functional.linear(row, weight.float())
        if gate is not None:
            self.gated(result, gate, out)
        else:
            out.copy_(result if residual is None else result + residual)
        if copy is not None:
            copy.copy_(out)

    def fuses_rows(self, rows: int, weight: Tensor) -> bool:
        del weight
        return rows == 1

    def k_splits(self, rows: int, weight: Tensor, outputs: int, most: int = 1) -> int:
        del rows, weight, outputs, most
        return 0

    def matmul(self, x: Tensor, weight: Tensor, out: Tensor, *, gate: Activation | None = None) -> None:
        if gate is not None:
            self.gated(functional.linear(x.float(), weight.float()), gate, out)
            return
        partials = out.view(-1, len(x), out.shape[-1])
        splits = zip(x.float().chunk(len(partials), -1), weight.float().chunk(len(partials), -1), strict=True)
        for partial, (x_split, weight_split) in zip(partials, splits, strict=True):
            partial.copy_(functional.linear(x_split, weight_split))

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
        del splits, scratch
        block = torch_attention.prepare(qkv, layer, rotations)
        torch_attention.store(block, layer, rows)
        torch_attention.attend_stored(block, layer, rows, out)

    def store_rows(self, qkv: Tensor, layer: AttentionLayer, rotations: Tensor, rows: RowTable) -> None:
        torch_attention.store(torch_attention.prepare(qkv, layer, rotations), layer, rows)

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
        del sessions
        self.decode_attention(qkv, layer, rotations, rows, splits, scratch, out)

    def prefill_attention(
        self,
        qkv: Tensor,
        layer: AttentionLayer,
        rotations: Tensor,
        table: PrefillTable,
        scratch: Scratch,
        out: Tensor,
    ) -> None:
        del scratch
        block = torch_attention.prepare(qkv, layer, rotations)
        rows = torch_attention.PrefillRows.of(table, layer.shape)
        torch_attention.attend_block(block, layer, rows, out)
        torch_attention.store(block, layer, rows.lasting)

    def sample(
        self,
        logits: Tensor,
        rows: RowTable,
        sampling: SamplingTable,
        scratch: SamplingScratch,
        newest: Tensor,
        sampled: Tensor,
    ) -> None:
        del scratch
        tokens = torch_sampling.sample(logits, sampling).int()
        sampled.copy_(tokens)
        torch_attention.put_real(newest, (rows.slabs,), tokens.clamp(min=0), rows.slabs >= 0)


def _activated(gate: Tensor, activation: Activation) -> Tensor:
    return functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
