"""GPU kernels in Triton: each method launches kernels of `device` on the current stream."""

import torch
import triton
from torch import Tensor

from kakeya.kernels.gpu import launches, triton_attention, triton_sampling
from kakeya.kernels.gpu.device import matmul, rowwise
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
from kakeya.kernels.gpu.triton_drafts import TritonDrafts

_GATES = {"silu": rowwise.SILU, "gelu_tanh": rowwise.GELU_TANH}
_FEW_ROWS_OUTPUTS = 16  # that a program of a matmul of a few rows takes
_COLUMNS = 1024  # that a program of a row-wise kernel takes
_MAX_HEAD_DIM = 256


class TritonKernels:
    """GpuKernels in Triton. A kernel is compiled at its first launch, so run a step before you capture one.

    `pdl`: the device supports programmatic dependent launch (device.pdl).
    """

    name = "triton"

    def __init__(self, *, pdl: bool = False) -> None:
        self.pdl = pdl
        self._launch: dict[str, bool] = {"PDL": pdl}
        if pdl:
            self._launch["launch_pdl"] = True
        self.drafts: GpuDrafts = TritonDrafts(self._launch)

    def supports_head_dim(self, head_dim: int) -> bool:
        return launches.power_of_two(head_dim) == head_dim and 16 <= head_dim <= _MAX_HEAD_DIM

    def scratch(
        self,
        shape: AttentionShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        prefill_rows: int,
        partials: int,
    ) -> Scratch:
        heads, dim = shape.heads, shape.head_dim
        return Scratch(
            partial_outputs=torch.empty(partials, heads, dim, device=device),
            stats=torch.empty(partials, heads, 2, device=device),
            arrived=torch.zeros(partials, shape.kv_heads, dtype=torch.int32, device=device),
            queries=torch.empty(prefill_rows, heads, dim, dtype=dtype, device=device),
            sink_queries=torch.empty(prefill_rows, heads, dim, dtype=dtype, device=device),
            keys=torch.empty(prefill_rows, shape.kv_heads, dim, dtype=dtype, device=device),
        )

    def embed(
        self, table: Tensor, token_ids: Tensor, newest: Tensor, rows: RowTable, scale: float, hidden: Tensor
    ) -> None:
        n = hidden.shape[1]
        grid = (len(hidden), triton.cdiv(n, _COLUMNS))
        rowwise.embed[grid](
            table, token_ids, newest, rows.slabs, hidden, scale, n, BLOCK=_COLUMNS, **self._launch
        )

    def rotations(
        self, rows: RowTable, capacity: int, inverse_frequencies: Tensor, factor: float, out: Tensor
    ) -> None:
        _, count, half = out.shape
        rowwise.rotations[(count, 2)](
            rows.positions,
            inverse_frequencies,
            out,
            capacity,
            factor,
            out.stride(0),
            HALF=half,
            num_warps=1,
            **self._launch,
        )

    def add_norm(
        self,
        hidden: Tensor,
        addend: Tensor | None,
        post_weight: Tensor | None,
        weight: Tensor | None,
        eps: float,
        out: Tensor,
    ) -> None:
        rows, n = hidden.shape
        rowwise.add_norm[(rows,)](
            hidden,
            hidden if addend is None else addend,
            hidden if post_weight is None else post_weight,
            hidden if weight is None else weight,
            out,
            eps,
            N=n,
            BLOCK=launches.power_of_two(n),
            SPLITS=0 if addend is None else addend.numel() // hidden.numel(),
            POST=post_weight is not None,
            NORM=weight is not None,
            num_warps=16 if n > 1024 else 8,
            **self._launch,
        )

    def norm_rows(self, x: Tensor, weight: Tensor, eps: float) -> None:
        rows, n = x.shape
        rowwise.norm_rows[(rows,)](
            x,
            weight,
            eps,
            x.stride(0),
            N=n,
            BLOCK=launches.power_of_two(n),
            num_warps=16 if n > 1024 else 8,
            **self._launch,
        )

    def gated(self, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
        rows, width = out.shape
        grid = (rows, triton.cdiv(width, _COLUMNS))
        rowwise.gated[grid](gate_up, out, width, BLOCK=_COLUMNS, GATE=_GATES[activation], **self._launch)

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
        if len(x) > 1:
            self._few_rows(x, weight, out, norm, eps, residual, gate, copy)
            return
        outputs, (weight_rows, columns) = out.shape[1], weight.shape
        launch = launches.gemv_launch(weight_rows, columns, gated=gate is not None)
        rowwise.gemv[(triton.cdiv(outputs, launch.outputs),)](
            x,
            weight,
            x if norm is None else norm,
            x if residual is None else residual,
            out,
            out if copy is None else copy,
            eps,
            outputs,
            K=columns,
            OUTPUTS=launch.outputs,
            COLUMNS=launch.columns,
            NORM=norm is not None,
            RESIDUAL=residual is not None,
            GATE=rowwise.UNGATED if gate is None else _GATES[gate],
            COPY=copy is not None,
            num_warps=launch.warps,
            num_stages=3,
            **self._launch,
        )

    def fuses_rows(self, rows: int, weight: Tensor) -> bool:
        if rows == 1:
            return True
        return weight.dtype == torch.bfloat16 and launches.fits_few_rows(rows, *weight.shape)

    def _few_rows(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        norm: Tensor | None,
        eps: float,
        residual: Tensor | None,
        gate: Activation | None,
        copy: Tensor | None,
    ) -> None:
        rows, outputs = out.shape
        columns = weight.shape[1]
        matmul.few_rows[(triton.cdiv(outputs, _FEW_ROWS_OUTPUTS),)](
            x,
            weight,
            x if norm is None else norm,
            x if residual is None else residual,
            out,
            out if copy is None else copy,
            eps,
            rows,
            outputs,
            out.stride(0) if copy is None else copy.stride(0),
            K=columns,
            ROWS=8 if rows <= 8 else launches.MAX_FEW_ROWS,
            OUTPUTS=_FEW_ROWS_OUTPUTS,
            DEPTH=launches.few_rows_depth(columns),
            LINES=launches.lines(columns * weight.itemsize),
            NORM=norm is not None,
            RESIDUAL=residual is not None,
            GATE=rowwise.UNGATED if gate is None else _GATES[gate],
            COPY=copy is not None,
            num_warps=2,
            num_stages=5,
            **self._launch,
        )

    def k_splits(self, rows: int, weight: Tensor, outputs: int, most: int = 1) -> int:
        if weight.dtype != torch.bfloat16:
            return 0
        return launches.own_k_splits(rows, outputs, weight.shape[1], most)

    def matmul(self, x: Tensor, weight: Tensor, out: Tensor, *, gate: Activation | None = None) -> None:
        (rows, columns), outputs = x.shape, out.shape[-1]
        splits = out.numel() // (rows * outputs)
        launch = launches.tile_launch(rows, outputs, columns, splits)
        assert launch is not None, f"too large: {rows} rows of {tuple(weight.shape)}"
        assert launch.splits == splits, f"{splits} splits, not {launch.splits}"
        tiles = triton.cdiv(rows, launches.TILE), triton.cdiv(outputs, launch.columns), splits
        matmul.matmul[tiles](
            x,
            weight,
            out,
            rows,
            outputs,
            K=columns,
            ROWS=launches.TILE,
            COLUMNS=launch.columns,
            DEPTH=launches.TILE,
            LINES=launches.lines(columns // splits * weight.itemsize),
            SPLITS=splits,
            GATE=rowwise.UNGATED if gate is None else _GATES[gate],
            num_warps=4,
            num_stages=launches.tile_stages(launch.columns, gated=gate is not None),
            **self._launch,
        )

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
        triton_attention.decode_attention(qkv, layer, rotations, rows, splits, scratch, out, self._launch)

    def store_rows(self, qkv: Tensor, layer: AttentionLayer, rotations: Tensor, rows: RowTable) -> None:
        triton_attention.store_rows(qkv, layer, rotations, rows, self._launch)

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
        triton_attention.draft_attention(
            qkv, layer, rotations, rows, sessions, splits, scratch, out, self._launch
        )

    def prefill_attention(
        self,
        qkv: Tensor,
        layer: AttentionLayer,
        rotations: Tensor,
        table: PrefillTable,
        scratch: Scratch,
        out: Tensor,
    ) -> None:
        triton_attention.prefill_attention(qkv, layer, rotations, table, scratch, out, self._launch)

    def sample(
        self,
        logits: Tensor,
        rows: RowTable,
        sampling: SamplingTable,
        scratch: SamplingScratch,
        newest: Tensor,
        sampled: Tensor,
    ) -> None:
        triton_sampling.sample(logits, rows, sampling, scratch, newest, sampled, self._launch)
