"""The device kernels in Triton: each method launches the programs of `device` on the current stream."""

import torch
import triton
from torch import Tensor

from kakeya.kernels.gpu import launches, triton_choice
from kakeya.kernels.gpu.choice_scratch import ChoiceScratch
from kakeya.kernels.gpu.device import decode, product, prompt as prompting, rowwise
from kakeya.kernels.gpu.interface import (
    MAX_SPLITS,
    TILE_ROWS,
    Activation,
    AttentionLayer,
    AttentionShape,
    ChoiceTable,
    PromptTable,
    RowTable,
    Scratch,
)

_GATES = {"silu": rowwise.SILU, "gelu_tanh": rowwise.GELU_TANH}
_COLUMNS = 1024  # of the row-wise programs
_MAX_HEAD_DIM = 256
_UNCHAINED: dict[str, bool] = {"CHAINED": False}


class TritonKernels:
    """GpuKernels in Triton. Programs are compiled when first met: run a step before capturing one.

    `chained`: the device can start a launch before the one ahead of it is done (device.chain).
    """

    name = "triton"

    def __init__(self, *, chained: bool = False) -> None:
        self.chained = chained
        self._launch: dict[str, bool] = {"CHAINED": chained}
        if chained:
            self._launch["launch_pdl"] = True

    def supports_head_dim(self, head_dim: int) -> bool:
        return launches.power_of_two(head_dim) == head_dim and 16 <= head_dim <= _MAX_HEAD_DIM

    def scratch(
        self, shape: AttentionShape, dtype: torch.dtype, device: torch.device, *, prompt_rows: int, parts: int
    ) -> Scratch:
        heads, dim = shape.heads, shape.head_dim
        return Scratch(
            parts=torch.empty(parts, heads, dim, device=device),
            stats=torch.empty(parts, heads, 2, device=device),
            arrived=torch.zeros(parts, shape.kv_heads, dtype=torch.int32, device=device),
            queries=torch.empty(prompt_rows, heads, dim, dtype=dtype, device=device),
            sink_queries=torch.empty(prompt_rows, heads, dim, dtype=dtype, device=device),
            keys=torch.empty(prompt_rows, shape.kv_heads, dim, dtype=dtype, device=device),
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
            PARTS=0 if addend is None else addend.numel() // hidden.numel(),
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
        outputs, (weight_rows, columns) = out.shape[1], weight.shape
        launch = launches.product_launch(weight_rows, columns, gated=gate is not None)
        rowwise.one_row_product[(triton.cdiv(outputs, launch.outputs),)](
            x,
            weight,
            x if norm is None else norm,
            x if residual is None else residual,
            out,
            eps,
            outputs,
            K=columns,
            OUTPUTS=launch.outputs,
            COLUMNS=launch.columns,
            NORM=norm is not None,
            RESIDUAL=residual is not None,
            GATE=rowwise.UNGATED if gate is None else _GATES[gate],
            num_warps=launch.warps,
            num_stages=3,
            **self._launch,
        )

    def product_parts(self, rows: int, weight: Tensor, outputs: int, most: int = 1) -> int:
        if weight.dtype != torch.bfloat16:
            return 0
        return launches.own_parts(rows, outputs, weight.shape[1], most)

    def product(self, x: Tensor, weight: Tensor, out: Tensor, *, gate: Activation | None = None) -> None:
        (rows, columns), outputs = x.shape, out.shape[-1]
        parts = out.numel() // (rows * outputs)
        launch = launches.tile_launch(rows, outputs, columns, parts)
        assert launch is not None, f"too large: {rows} rows of {tuple(weight.shape)}"
        assert launch.parts == parts, f"{parts} parts, not {launch.parts}"
        tiles = triton.cdiv(rows, launches.TILE), triton.cdiv(outputs, launch.columns), parts
        product.product[tiles](
            x,
            weight,
            out,
            rows,
            outputs,
            K=columns,
            ROWS=launches.TILE,
            COLUMNS=launch.columns,
            DEPTH=launches.TILE,
            SPLITS=parts,
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
        shape, count = layer.shape, len(qkv)
        assert launches.power_of_two(splits) == splits <= MAX_SPLITS, f"{splits} splits"
        assert splits == 1 or count * splits <= len(scratch.parts), f"{count} rows in {splits} splits"
        programs = count * shape.kv_heads * splits
        padded = launches.power_of_two(shape.group)
        looks = max(2, launches.MATRIX_COLUMNS // padded)
        launch = launches.decode_launch(shape.head_dim, layer.pool.itemsize, looks * padded, splits, programs)
        decode.decode_attention[(count * shape.kv_heads, splits)](
            qkv,
            layer.pool,
            rotations,
            rotations if layer.query_norm is None else layer.query_norm,
            rotations if layer.key_norm is None else layer.key_norm,
            rows.slabs,
            rows.positions,
            rows.sinks,
            out,
            scratch.parts,
            scratch.stats,
            scratch.arrived,
            *_place(layer),
            qkv.stride(0),
            out.stride(0),
            rotations.stride(0),
            shape.capacity,
            shape.slots,
            shape.scale,
            shape.norm_eps,
            shape.softcap,
            layer.local_window,
            KV_HEADS=shape.kv_heads,
            GROUP=shape.group,
            PADDED=padded,
            LOOKS=looks,
            D=shape.head_dim,
            BLOCK=launch.slots,
            SPLITS=splits,
            QK_NORM=layer.query_norm is not None,
            CAPPED=shape.softcap > 0,
            num_warps=launch.warps,
            num_stages=launch.stages,
            maxnreg=launch.registers,
            **self._attending(programs),
        )

    def store_rows(self, qkv: Tensor, layer: AttentionLayer, rotations: Tensor, rows: RowTable) -> None:
        shape = layer.shape
        decode.store_rows[(len(qkv), shape.kv_heads)](
            qkv,
            layer.pool,
            rotations,
            rotations if layer.key_norm is None else layer.key_norm,
            rows.slabs,
            rows.positions,
            rows.sinks,
            *_place(layer),
            qkv.stride(0),
            rotations.stride(0),
            shape.slots,
            shape.norm_eps,
            HEADS=shape.heads,
            KV_HEADS=shape.kv_heads,
            D=shape.head_dim,
            QK_NORM=layer.key_norm is not None,
            num_warps=1,
            **self._launch,
        )

    def prompt_attention(
        self,
        qkv: Tensor,
        layer: AttentionLayer,
        rotations: Tensor,
        prompt: PromptTable,
        scratch: Scratch,
        out: Tensor,
    ) -> None:
        shape = layer.shape
        assert len(qkv) <= len(scratch.queries), f"{len(qkv)} prompt rows, room for {len(scratch.queries)}"
        launch = launches.prompt_launch(shape.head_dim, layer.pool.itemsize)
        heads = {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "D": shape.head_dim}
        heads |= self._attending(len(prompt.tiles) * shape.heads)
        prompting.prepare_rows[(len(qkv), shape.heads + shape.kv_heads)](
            qkv,
            rotations,
            rotations if layer.query_norm is None else layer.query_norm,
            rotations if layer.key_norm is None else layer.key_norm,
            scratch.queries,
            scratch.sink_queries,
            scratch.keys,
            qkv.stride(0),
            rotations.stride(0),
            shape.scale,
            shape.norm_eps,
            **heads,
            QK_NORM=layer.query_norm is not None,
            num_warps=1,
        )
        prompting.prompt_attention[(len(prompt.tiles), shape.heads)](
            scratch.queries,
            scratch.sink_queries,
            scratch.keys,
            qkv,
            layer.pool,
            out,
            prompt.tiles,
            prompt.segments,
            *_place(layer),
            qkv.stride(0),
            out.stride(0),
            shape.capacity,
            shape.slots,
            shape.softcap,
            layer.local_window,
            **heads,
            ROWS=TILE_ROWS,
            BLOCK=launch.slots,
            CAPPED=shape.softcap > 0,
            num_warps=launch.warps,
            num_stages=launch.stages,
        )
        prompting.keep_rows[(len(qkv), shape.kv_heads)](
            scratch.keys,
            qkv,
            layer.pool,
            prompt.row_segments,
            prompt.segments,
            *_place(layer),
            qkv.stride(0),
            shape.slots,
            **heads,
            num_warps=1,
        )

    def _attending(self, programs: int) -> dict[str, bool]:
        """Whether so many programs of attention are chained."""
        return self._launch if programs <= launches.FEW_PROGRAMS else _UNCHAINED

    def choose(
        self,
        logits: Tensor,
        rows: RowTable,
        choice: ChoiceTable,
        scratch: ChoiceScratch,
        newest: Tensor,
        chosen: Tensor,
    ) -> None:
        triton_choice.choose(logits, rows, choice, scratch, newest, chosen, self._launch)


def _place(layer: AttentionLayer) -> tuple[int, int, int, int]:
    """Where it lies in its slab, and the strides of slabs, of keys to values, and of key heads."""
    slab, layers, kinds, heads = layer.pool.stride()[:4]
    return layer.index * layers, slab, kinds, heads
