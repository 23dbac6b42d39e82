"""Decode attention over slabs in place: one new token for each session of a batch.

One program holds the query heads that share a key head. It norms and rotates its queries and the new key,
stores the new key and value in their slot, and attends to what the session may see: its sinks, through
queries rotated for the distance they are kept at, and its window. With several splits the slots are shared
out, and the program that finishes last joins the parts in a fixed order: a row's bits depend on nothing else.
"""

import triton
import triton.language as tl

from kakeya.kernels.gpu.device.chain import follow
from kakeya.kernels.gpu.device.common import (
    NOTHING,
    capped,
    new_key,
    rotated,
    slot_of,
    softmax_step,
)


@triton.jit
def _queries(at, real, norm_ptr, eps, D: tl.constexpr, QK_NORM: tl.constexpr):
    """The heads of a group and their other selves, float32 [heads, D], normed; zeros below the real ones."""
    dim = tl.arange(0, D)
    other = (dim + D // 2) % D
    q = tl.load(at + dim[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    swapped = tl.load(at + other[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(q * q, 1) / D + eps)[:, None]
        q = q * scale * tl.load(norm_ptr + dim)[None, :]
        swapped = swapped * scale * tl.load(norm_ptr + other)[None, :]
    return q, swapped


@triton.jit
def _store_token(keys, values, slot, key, value, D: tl.constexpr):
    dim = tl.arange(0, D)
    tl.store(keys + slot * D + dim, key)
    tl.store(values + slot * D + dim, value)


@triton.jit
def _seen_in_ring(t, sink, slots, capacity, local_window):
    """The ring's tokens before t that are seen: the oldest's slot, how many lie from there up to the ring's
    end, and how many on from its beginning."""
    window = capacity - sink
    # A local layer sees distances below its window; without one every distance is.
    reach = tl.where(local_window > 0, tl.minimum(local_window, window), window)
    oldest = tl.maximum(sink, t - reach + 1)
    count = tl.maximum(t - oldest, 0)
    begin = slot_of(oldest, sink, slots - sink)
    upper = tl.minimum(count, slots - begin)
    return begin, upper, count - upper


@triton.jit
def _columns(keys, values, start, seen, D: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and values of the slots from `start` on, zeros for those not seen: they may be no numbers."""
    at = start * D + (tl.arange(0, BLOCK)[:, None] * D + tl.arange(0, D)[None, :])
    k = tl.load(keys + at, mask=seen[:, None], other=0.0)
    return k, tl.load(values + at, mask=seen[:, None], other=0.0)


@triton.jit
def _join(
    parts_ptr, stats_ptr, first_place, heads, real, out_at,
    HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Add up what the splits left behind, each faded to the greatest top."""
    dim = tl.arange(0, D)
    places = first_place + tl.arange(0, SPLITS)[:, None] * HEADS + heads[None, :]
    tops = tl.load(stats_ptr + places * 2, mask=real[None, :], other=0.0, volatile=True)
    totals = tl.load(stats_ptr + places * 2 + 1, mask=real[None, :], other=1.0, volatile=True)
    parts_at = parts_ptr + places[:, :, None] * D + dim[None, None, :]
    parts = tl.load(parts_at, mask=real[None, :, None], other=0.0, volatile=True)
    weights = tl.exp(tops - tl.max(tops, 0)[None, :])
    joined = tl.sum(weights[:, :, None] * parts, 0) / tl.sum(weights * totals, 0)[:, None]
    tl.store(out_at, joined.to(out_at.dtype.element_ty), mask=real[:, None])


@triton.jit
def _leave_part(
    parts_ptr, stats_ptr, arrived_ptr, row, split, heads, real, top, total, mixed, out_at,
    HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Leave what this split has found; the one that comes last joins them all."""
    place = (row * SPLITS + split) * HEADS + heads
    tl.store(parts_ptr + place[:, None] * D + tl.arange(0, D)[None, :], mixed, mask=real[:, None])
    tl.store(stats_ptr + place * 2, top, mask=real)
    tl.store(stats_ptr + place * 2 + 1, total, mask=real)
    tl.debug_barrier()  # every thread's part is there before the arrival is counted
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == SPLITS - 1:
        _join(parts_ptr, stats_ptr, row * SPLITS * HEADS, heads, real, out_at, HEADS, D, SPLITS)
        tl.store(arrived_ptr, 0)


@triton.jit(do_not_specialize_on_alignment=["slab_ptr", "position_ptr", "sink_ptr"])
def decode_attention(
    qkv_ptr, pool_ptr, rotation_ptr, query_norm_ptr, key_norm_ptr,
    slab_ptr, position_ptr, sink_ptr, out_ptr, parts_ptr, stats_ptr, arrived_ptr,
    layer_offset, slab_stride, kv_stride, head_stride, qkv_stride, out_stride, rotation_stride,
    capacity, slots, scale, eps, softcap, local_window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, QK_NORM: tl.constexpr, CAPPED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row and key head, split). ROWS: the group padded to what a matrix unit takes."""
    follow(CHAINED)
    row, kv_head, split = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS, tl.program_id(1)
    slab = tl.load(slab_ptr + row).to(tl.int64)
    if slab < 0:
        return
    ELEMENT: tl.constexpr = pool_ptr.dtype.element_ty
    HEADS: tl.constexpr = KV_HEADS * GROUP
    t = tl.load(position_ptr + row).to(tl.int32)
    sink = tl.load(sink_ptr + row).to(tl.int32)
    heads = tl.arange(0, ROWS)
    real = heads < GROUP
    dim = tl.arange(0, D)

    mine = qkv_ptr + row * qkv_stride
    q_at = mine + (kv_head * GROUP + heads)[:, None] * D
    q, swapped = _queries(q_at, real, query_norm_ptr, eps, D, QK_NORM)
    cos_ptr = rotation_ptr + row * (D // 2)
    sin_ptr, sink_cos_ptr = cos_ptr + rotation_stride, cos_ptr + 2 * rotation_stride
    queries = (rotated(q, swapped, cos_ptr, sin_ptr, D) * scale).to(ELEMENT)
    as_sinks = rotated(q, swapped, sink_cos_ptr, sink_cos_ptr + rotation_stride, D)
    sink_queries = (as_sinks * scale).to(ELEMENT)
    keys = pool_ptr + slab * slab_stride + layer_offset + kv_head * head_stride
    values = keys + kv_stride

    top = tl.full([ROWS], NOTHING, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D], tl.float32)
    if split == 0:
        # The new token sees itself at distance 0, where both rotations agree.
        key_at = mine + (HEADS + kv_head) * D
        key = new_key(key_at, cos_ptr, sin_ptr, key_norm_ptr, eps, D, QK_NORM)
        value = tl.load(key_at + KV_HEADS * D + dim)
        _store_token(keys, values, slot_of(t, sink, slots - sink), key, value, D)
        score = tl.sum(queries.to(tl.float32) * key.to(tl.float32)[None, :], 1)
        top = capped(score, softcap, CAPPED)
        total = tl.full([ROWS], 1.0, tl.float32)
        mixed += value.to(tl.float32)[None, :]

    # What is seen lies in three pieces: sinks, and the ring's tokens from the oldest up to the ring's end and
    # on from its beginning. Each is taken in blocks from its own beginning.
    begin, upper, lower = _seen_in_ring(t, sink, slots, capacity, local_window)
    sinks_from = tl.where(local_window > 0, tl.minimum(t, capacity - 1) - local_window + 1, 0)
    sinks_end = tl.minimum(sink, t)
    sink_blocks = tl.cdiv(sinks_end, BLOCK)
    upper_blocks = sink_blocks + tl.cdiv(upper, BLOCK)
    blocks = upper_blocks + tl.cdiv(lower, BLOCK)
    for block in range(split * blocks // SPLITS, (split + 1) * blocks // SPLITS):
        is_sinks, is_upper = block < sink_blocks, block < upper_blocks
        start = tl.where(is_upper, begin - sink_blocks * BLOCK, sink - upper_blocks * BLOCK)
        start = tl.where(is_sinks, 0, start) + block * BLOCK
        end = tl.where(is_sinks, sinks_end, tl.where(is_upper, begin + upper, sink + lower))
        slot = start + tl.arange(0, BLOCK)
        seen = (slot < end) & (slot >= tl.where(is_sinks, sinks_from, 0))
        k, v = _columns(keys, values, start, seen, D, BLOCK)
        scores = tl.dot(tl.where(is_sinks, sink_queries, queries), k.T, input_precision="ieee")
        scores = capped(scores, softcap, CAPPED)
        top, total, mixed = softmax_step(scores, seen[None, :], v, top, total, mixed)

    head = kv_head * GROUP + heads
    out_at = out_ptr + row * out_stride + head[:, None] * D + dim[None, :]
    if SPLITS == 1:
        tl.store(out_at, (mixed / total[:, None]).to(ELEMENT), mask=real[:, None])
    else:
        _leave_part(
            parts_ptr, stats_ptr, arrived_ptr + tl.program_id(0), row, split, head, real, top, total, mixed,
            out_at, HEADS, D, SPLITS,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["slab_ptr", "position_ptr", "sink_ptr"])
def store_rows(
    qkv_ptr, pool_ptr, rotation_ptr, key_norm_ptr, slab_ptr, position_ptr, sink_ptr,
    layer_offset, slab_stride, kv_stride, head_stride, qkv_stride, rotation_stride, slots, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, QK_NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row, key head): what decode_attention stores, and nothing else."""
    follow(CHAINED)
    row, kv_head = tl.program_id(0), tl.program_id(1)
    slab = tl.load(slab_ptr + row).to(tl.int64)
    if slab < 0:
        return
    t, sink = tl.load(position_ptr + row).to(tl.int32), tl.load(sink_ptr + row).to(tl.int32)
    key_at = qkv_ptr + row * qkv_stride + (HEADS + kv_head) * D
    cos_ptr = rotation_ptr + row * (D // 2)
    key = new_key(key_at, cos_ptr, cos_ptr + rotation_stride, key_norm_ptr, eps, D, QK_NORM)
    value = tl.load(key_at + KV_HEADS * D + tl.arange(0, D))
    keys = pool_ptr + slab * slab_stride + layer_offset + kv_head * head_stride
    _store_token(keys, keys + kv_stride, slot_of(t, sink, slots - sink), key, value, D)
