"""Launches of bounded attention over slabs. What every launch is told comes last: see `TritonKernels`."""

from torch import Tensor

from kakeya.kernels.gpu import launches
from kakeya.kernels.gpu.device import decode, draft_attention as drafting, prefill as prefilling
from kakeya.kernels.gpu.interface import (
    MAX_KV_SPLITS,
    READ_TOGETHER,
    TILE_ROWS,
    AttentionLayer,
    PrefillTable,
    RowTable,
    Scratch,
)

Launch = dict[str, bool]
_WITHOUT_PDL: Launch = {"PDL": False}


def decode_attention(
    qkv: Tensor,
    layer: AttentionLayer,
    rotations: Tensor,
    rows: RowTable,
    splits: int,
    scratch: Scratch,
    out: Tensor,
    launch: Launch,
    sessions: int | None = None,
) -> None:
    """`sessions`: of a drafting step, whose rows are in waves of so many."""
    shape, count = layer.shape, len(qkv)
    assert launches.power_of_two(splits) == splits <= MAX_KV_SPLITS, f"{splits} splits"
    assert splits == 1 or count * splits <= len(scratch.partial_outputs), f"{count} rows in {splits} splits"
    programs = count * shape.kv_heads * splits
    padded = launches.power_of_two(shape.group)
    variants = max(2, launches.MMA_COLUMNS // padded)
    columns = variants * padded
    form = launches.decode_launch(shape.head_dim, layer.pool.itemsize, columns, splits, programs)
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
        scratch.partial_outputs,
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
        sessions or 0,
        KV_HEADS=shape.kv_heads,
        GROUP=shape.group,
        PADDED=padded,
        VARIANTS=variants,
        D=shape.head_dim,
        BLOCK=form.slots,
        SPLITS=splits,
        FRESH=max(16, launches.power_of_two(count // sessions)) if sessions else 0,
        QK_NORM=layer.query_norm is not None,
        CAPPED=shape.softcap > 0,
        num_warps=form.warps,
        num_stages=form.stages,
        maxnreg=form.registers,
        **_few(programs, launch),
    )


def store_rows(qkv: Tensor, layer: AttentionLayer, rotations: Tensor, rows: RowTable, launch: Launch) -> None:
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
        **launch,
    )


def draft_attention(
    qkv: Tensor,
    layer: AttentionLayer,
    rotations: Tensor,
    rows: RowTable,
    sessions: int,
    splits: int,
    scratch: Scratch,
    out: Tensor,
    launch: Launch,
) -> None:
    if sessions < READ_TOGETHER:
        decode_attention(qkv, layer, rotations, rows, splits, scratch, out, launch, sessions)
        return
    shape, count = layer.shape, len(qkv)
    assert splits == 1 or count * splits <= len(scratch.partial_outputs), f"{count} rows in {splits} splits"
    places, programs = count // sessions, sessions * shape.kv_heads * splits
    drafting.draft_attention[(sessions * shape.kv_heads, splits)](
        qkv,
        layer.pool,
        rotations,
        rotations if layer.query_norm is None else layer.query_norm,
        rotations if layer.key_norm is None else layer.key_norm,
        rows.slabs,
        rows.positions,
        rows.sinks,
        out,
        scratch.partial_outputs,
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
        sessions,
        ROWS=places,
        PADDED_ROWS=launches.power_of_two(places),
        NEW=max(16, launches.power_of_two(places)),
        KV_HEADS=shape.kv_heads,
        GROUP=shape.group,
        PADDED=launches.power_of_two(shape.group),
        D=shape.head_dim,
        BLOCK=32,
        SPLITS=splits,
        QK_NORM=layer.query_norm is not None,
        CAPPED=shape.softcap > 0,
        num_warps=4,
        num_stages=3,
        **_few(programs, launch),
    )


def prefill_attention(
    qkv: Tensor,
    layer: AttentionLayer,
    rotations: Tensor,
    table: PrefillTable,
    scratch: Scratch,
    out: Tensor,
    launch: Launch,
) -> None:
    shape = layer.shape
    assert len(qkv) <= len(scratch.queries), f"{len(qkv)} prefill rows, room for {len(scratch.queries)}"
    form = launches.prefill_launch(shape.head_dim, layer.pool.itemsize)
    heads = {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "D": shape.head_dim}
    heads |= _few(len(table.tiles) * shape.heads, launch)
    _prepare_rows(qkv, layer, rotations, scratch, heads)
    prefilling.prefill_attention[(len(table.tiles), shape.heads)](
        scratch.queries,
        scratch.sink_queries,
        scratch.keys,
        qkv,
        layer.pool,
        out,
        table.tiles,
        table.segments,
        *_place(layer),
        qkv.stride(0),
        out.stride(0),
        shape.capacity,
        shape.slots,
        shape.softcap,
        layer.local_window,
        **heads,
        ROWS=TILE_ROWS,
        BLOCK=form.slots,
        CAPPED=shape.softcap > 0,
        num_warps=form.warps,
        num_stages=form.stages,
    )
    prefilling.keep_rows[(len(qkv), shape.kv_heads)](
        scratch.keys,
        qkv,
        layer.pool,
        table.row_segments,
        table.segments,
        *_place(layer),
        qkv.stride(0),
        shape.slots,
        **heads,
        num_warps=1,
    )


def _prepare_rows(
    qkv: Tensor, layer: AttentionLayer, rotations: Tensor, scratch: Scratch, heads: dict[str, int]
) -> None:
    """Normalize and rotate the queries and keys of prompts."""
    shape = layer.shape
    prefilling.prepare_rows[(len(qkv), shape.heads + shape.kv_heads)](
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


def _few(programs: int, launch: Launch) -> Launch:
    """What attention is launched with: PDL only where programs are few."""
    return launch if programs <= launches.FEW_PROGRAMS else _WITHOUT_PDL


def _place(layer: AttentionLayer) -> tuple[int, int, int, int]:
    """The layer's offset in a slab, and the strides of slabs, from keys to values, and of key heads."""
    slab, layers, kinds, heads = layer.pool.stride()[:4]
    return layer.index * layers, slab, kinds, heads
