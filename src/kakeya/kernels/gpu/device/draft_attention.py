"""Attention of a drafting step: the few new tokens of each session read its slab once, together.

One program computes, for all new tokens of a session, the query heads that share a key head. They are columns
of one matmul, as in decode attention, with a mask of their own: a later token sees the earlier new ones and
less of what is about to leave the window. The program of the first split stores the new keys and values: the
slots that they overwrite are out of sight of all of them. A row's bits differ from those of decode attention.
"""

import triton
import triton.language as tl

from kakeya.kernels.gpu.device.common import MASKED, heads_of_rows, rotated_rows, slot_of
from kakeya.kernels.gpu.device.decode import (
    LOG2_E,
    block_of_slots,
    exponents,
    first_sink,
    online_softmax,
    reach_of_window,
    seen_slots,
)
from kakeya.kernels.gpu.device.pdl import wait_for_predecessor


@triton.jit
def _merge_variants(score_max, exp_sum, acc, HALF_COLUMNS: tl.constexpr, D: tl.constexpr):
    """Merge the softmax of the variants of each place and head: [columns], [columns], [columns, D]."""
    maxima = tl.reshape(score_max, [2, HALF_COLUMNS])
    best = tl.max(maxima, 0)
    rescale = tl.exp2(maxima - best[None, :])
    total = tl.sum(rescale * tl.reshape(exp_sum, [2, HALF_COLUMNS]), 0)
    return best, total, tl.sum(rescale[:, :, None] * tl.reshape(acc.T, [2, HALF_COLUMNS, D]), 0)


@triton.jit
def _combine_splits(
    partial_ptr, stats_ptr, first_spot, real, HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr
):
    """Sum the partial outputs of the splits, each rescaled to the greatest maximum."""
    dim = tl.arange(0, D)
    spots = first_spot[None, :] + tl.arange(0, SPLITS)[:, None] * HEADS
    # Other programs have written them: read past this SM's own cache.
    maxima = tl.load(stats_ptr + spots * 2, mask=real[None, :], other=0.0, cache_modifier=".cg")
    sums = tl.load(stats_ptr + spots * 2 + 1, mask=real[None, :], other=1.0, cache_modifier=".cg")
    best = tl.max(maxima, 0)
    total = tl.sum(tl.exp2(maxima - best[None, :]) * sums, 0)
    combined = tl.zeros([first_spot.shape[0], D], tl.float32)
    for split in tl.static_range(SPLITS):
        spot = first_spot + split * HEADS
        weight = tl.exp2(tl.load(stats_ptr + spot * 2, mask=real, other=0.0, cache_modifier=".cg") - best)
        partial_at = partial_ptr + spot[:, None] * D + dim[None, :]
        partial = tl.load(partial_at, mask=real[:, None], other=0.0, cache_modifier=".cg")
        combined += weight[:, None] * partial
    return combined / total[:, None]


@triton.jit(do_not_specialize_on_alignment=["slab_ptr", "position_ptr", "sink_ptr"])
def draft_attention(
    qkv_ptr, pool_ptr, rotation_ptr, query_norm_ptr, key_norm_ptr,
    slab_ptr, position_ptr, sink_ptr, out_ptr, partial_ptr, stats_ptr, arrived_ptr,
    layer_offset, slab_stride, kv_stride, head_stride, qkv_stride, out_stride, rotation_stride,
    capacity, slots, scale, eps, softcap, local_window, sessions,
    ROWS: tl.constexpr, PADDED_ROWS: tl.constexpr, NEW: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    QK_NORM: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (session and key head, split). Row `place * sessions + session` is the session's token at that
    place. A column is a variant, a place and a head: rotated for the window, or for the sinks. NEW: the rows,
    padded to what a matmul takes."""
    wait_for_predecessor(PDL)
    session, kv_head, split = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS, tl.program_id(1)
    slab = tl.load(slab_ptr + session).to(tl.int64)
    if slab < 0:
        return
    ELEMENT: tl.constexpr = pool_ptr.dtype.element_ty
    HEADS: tl.constexpr = KV_HEADS * GROUP
    HALF_COLUMNS: tl.constexpr = PADDED_ROWS * PADDED
    COLUMNS: tl.constexpr = 2 * HALF_COLUMNS
    t, sink = tl.load(position_ptr + session).to(tl.int32), tl.load(sink_ptr + session).to(tl.int32)
    keys = pool_ptr + slab * slab_stride + layer_offset + kv_head * head_stride
    values = keys + kv_stride
    dim = tl.arange(0, D)

    column = tl.arange(0, COLUMNS)
    variant, place, member = column // HALF_COLUMNS, (column % HALF_COLUMNS) // PADDED, column % PADDED
    real = (place < ROWS) & (member < GROUP)
    row = tl.minimum(place, ROWS - 1) * sessions + session
    head = kv_head * GROUP + member
    x, swapped = heads_of_rows(
        qkv_ptr + row.to(tl.int64) * qkv_stride + head * D, real, query_norm_ptr, eps, D, QK_NORM
    )
    cos_at = rotation_ptr + variant * 2 * rotation_stride + row * (D // 2)
    scale = scale if CAPPED else scale * LOG2_E
    queries = (rotated_rows(x, swapped, cos_at, rotation_stride, D) * scale).to(ELEMENT).T

    score_max = tl.full([COLUMNS], MASKED, tl.float32)
    exp_sum = tl.zeros([COLUMNS], tl.float32)
    acc = tl.zeros([D, COLUMNS], tl.float32)
    at_sinks = (variant == 1)[None, :]
    in_window = (variant == 0)[None, :]
    column_t = (t + place)[None, :]
    reach = reach_of_window(sink, capacity, local_window)
    sinks_from = first_sink(column_t, capacity, local_window)

    if split == 0:
        new = tl.arange(0, NEW)
        fresh = new < ROWS
        new_row = (tl.minimum(new, ROWS - 1) * sessions + session).to(tl.int64)
        key_at = qkv_ptr + new_row * qkv_stride + (HEADS + kv_head) * D
        k, k_swapped = heads_of_rows(key_at, fresh, key_norm_ptr, eps, D, QK_NORM)
        k = rotated_rows(k, k_swapped, rotation_ptr + new_row * (D // 2), rotation_stride, D).to(ELEMENT)
        v = tl.load(key_at[:, None] + KV_HEADS * D + dim[None, :], mask=fresh[:, None], other=0.0)
        slot = slot_of(t + new, sink, slots - sink)
        tl.store(keys + slot[:, None] * D + dim[None, :], k, mask=fresh[:, None])
        tl.store(values + slot[:, None] * D + dim[None, :], v, mask=fresh[:, None])
        scores = exponents(tl.dot(k, queries, input_precision="ieee"), softcap, CAPPED)
        position = (t + new)[:, None]
        within = (position >= sink) & (position > column_t - reach)
        at_sink = (position < sink) & (position >= sinks_from)
        seen = fresh[:, None] & (position <= column_t) & ((in_window & within) | (at_sinks & at_sink))
        score_max, exp_sum, acc = online_softmax(scores, seen, v.T, score_max, exp_sum, acc)

    # What the first of them sees is what any of them sees of the slab, and more.
    begin, high_end, low_end = seen_slots(t, 0, sink, slots, capacity, local_window)
    oldest = tl.maximum(sink, t - reach + 1)
    high_blocks = tl.cdiv(high_end - begin, BLOCK)
    blocks = high_blocks + tl.cdiv(low_end, BLOCK)
    for block in range(split * blocks // SPLITS, (split + 1) * blocks // SPLITS):
        is_high = block < high_blocks
        start = tl.where(is_high, begin, -high_blocks * BLOCK) + block * BLOCK
        end = tl.where(is_high, high_end, low_end)
        slot = start + tl.arange(0, BLOCK)
        k, v = block_of_slots(keys, values, tl.minimum(slot, end - 1), D)
        scores = exponents(tl.dot(k, queries, input_precision="ieee"), softcap, CAPPED)
        # The positions in a piece of the ring follow each other.
        first = tl.where(is_high, oldest - begin, oldest + (high_end - begin) - sink)
        position = (slot + first)[:, None]
        within = ((slot >= sink) & (slot < end))[:, None] & (position > column_t - reach)
        at_sink = (slot[:, None] >= sinks_from) & (slot < tl.minimum(sink, t))[:, None]
        seen = (in_window & within) | (at_sinks & at_sink)
        score_max, exp_sum, acc = online_softmax(scores, seen, v, score_max, exp_sum, acc)

    best, total, merged = _merge_variants(score_max, exp_sum, acc, HALF_COLUMNS, D)
    half = tl.arange(0, HALF_COLUMNS)
    place, member = half // PADDED, half % PADDED
    real = (place < ROWS) & (member < GROUP)
    row, head = place * sessions + session, kv_head * GROUP + member
    out_at = out_ptr + (row * out_stride + head * D)[:, None] + dim[None, :]
    if SPLITS == 1:
        tl.store(out_at, (merged / total[:, None]).to(ELEMENT), mask=real[:, None])
    else:
        first_spot = row * SPLITS * HEADS + head
        spot = first_spot + split * HEADS
        tl.store(partial_ptr + spot[:, None] * D + dim[None, :], merged, mask=real[:, None])
        tl.store(stats_ptr + spot * 2, best, mask=real)
        tl.store(stats_ptr + spot * 2 + 1, total, mask=real)
        tl.debug_barrier()  # every thread has stored its part before the arrival is counted
        if tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel") == SPLITS - 1:
            combined = _combine_splits(partial_ptr, stats_ptr, first_spot, real, HEADS, D, SPLITS)
            tl.store(out_at, combined.to(ELEMENT), mask=real[:, None])
            tl.store(arrived_ptr + tl.program_id(0), 0)
