"""Prefill attention: a block of many rows of a session attends to the session's slab and to itself.

The block attends before it is stored, because storing it would overwrite slots that its first rows still
see. `prepare_rows` norms and rotates, `prefill_attention` attends, `keep_rows` stores in the slab what later
tokens see.
"""

import triton
import triton.language as tl

from kakeya.kernels.gpu.device.common import MASKED, capped, head_at, new_key, rotated, slot_of
from kakeya.kernels.gpu.device.pdl import wait_for_predecessor


@triton.jit
def prepare_rows(
    qkv_ptr, rotation_ptr, query_norm_ptr, key_norm_ptr, query_ptr, sink_query_ptr, key_ptr,
    qkv_stride, rotation_stride, scale, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, QK_NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head): queries are scaled and rotated twice, keys rotated once."""
    wait_for_predecessor(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim, half = tl.arange(0, D), tl.arange(0, D) % (D // 2)
    at = qkv_ptr + row * qkv_stride + head * D
    cos_ptr = rotation_ptr + row * (D // 2)
    sin_ptr = cos_ptr + rotation_stride
    if head < HEADS:
        ELEMENT: tl.constexpr = query_ptr.dtype.element_ty
        q, swapped = head_at(at, query_norm_ptr, eps, D, QK_NORM)
        place = (row * HEADS + head) * D + dim
        cos, sin = tl.load(cos_ptr + half), tl.load(sin_ptr + half)
        tl.store(query_ptr + place, (rotated(q, swapped, cos, sin, D) * scale).to(ELEMENT))
        cos, sin = tl.load(sin_ptr + rotation_stride + half), tl.load(sin_ptr + 2 * rotation_stride + half)
        tl.store(sink_query_ptr + place, (rotated(q, swapped, cos, sin, D) * scale).to(ELEMENT))
    else:
        key = new_key(at, cos_ptr, sin_ptr, key_norm_ptr, eps, D, QK_NORM)
        tl.store(key_ptr + (row * KV_HEADS + head - HEADS) * D + dim, key)


@triton.jit
def _segment(segment_ptr, segment):
    """slab, start position, first row, row count, sink."""
    at = segment_ptr + segment * 5
    slab, start, first_row = tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2).to(tl.int64)
    return slab, start, first_row, tl.load(at + 3), tl.load(at + 4)


@triton.jit
def _load_pair(keys_at, values_at, held):
    k = tl.load(keys_at, mask=held[:, None], other=0.0)
    return k, tl.load(values_at, mask=held[:, None], other=0.0)


@triton.jit
def _online_softmax(scores, seen, v, score_max, exp_sum, acc):
    """Add a block of columns to the softmax: score_max and exp_sum [rows], acc [rows, D]."""
    scores = tl.where(seen, scores, MASKED)
    new_max = tl.maximum(score_max, tl.max(scores, 1))
    weights = tl.where(seen, tl.exp(scores - new_max[:, None]), 0.0)
    rescale = tl.exp(score_max - new_max)
    exp_sum = exp_sum * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_max, exp_sum, acc


@triton.jit
def prefill_attention(
    query_ptr, sink_query_ptr, key_ptr, qkv_ptr, pool_ptr, out_ptr, tile_ptr, segment_ptr,
    layer_offset, slab_stride, kv_stride, head_stride, qkv_stride, out_stride,
    capacity, slots, softcap, local_window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, head): attends to the sinks, to earlier tokens in the window, to the block itself."""
    wait_for_predecessor(PDL)
    tile, head = tl.program_id(0), tl.program_id(1)
    segment = tl.load(tile_ptr + tile * 2)
    if segment < 0:
        return
    kv_head = head // (HEADS // KV_HEADS)
    offset = tl.load(tile_ptr + tile * 2 + 1)
    slab, start, first_row, count, sink = _segment(segment_ptr, segment)
    ring, window = slots - sink, capacity - sink
    reach = tl.where(local_window > 0, tl.minimum(local_window, window), window)
    sink_reach = tl.where(local_window > 0, local_window, capacity)

    within = offset + tl.arange(0, ROWS)
    live = within < count
    t = start + within
    last = start + tl.minimum(offset + ROWS, count) - 1
    dim = tl.arange(0, D)
    row = first_row + within
    q_at = (row * HEADS + head)[:, None] * D + dim[None, :]
    keys = pool_ptr + slab * slab_stride + layer_offset + kv_head * head_stride
    values = keys + kv_stride
    new_keys = key_ptr + (first_row * KV_HEADS + kv_head) * D
    new_values = qkv_ptr + first_row * qkv_stride + (HEADS + KV_HEADS + kv_head) * D
    score_max = tl.full([ROWS], MASKED, tl.float32)
    exp_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)

    # Sinks, from the slab or, at the beginning of a history, from the block itself.
    sink_query = tl.load(sink_query_ptr + q_at, mask=live[:, None], other=0.0)
    seen_at = tl.minimum(t, capacity - 1)
    for begin in range(0, tl.minimum(sink, last + 1), BLOCK):
        p = begin + tl.arange(0, BLOCK)
        old, new = (p < start) & (p < sink), (p >= start) & (p < sink) & (p <= last)
        place = p[:, None] * D + dim[None, :]
        k, v = _load_pair(keys + place, values + place, old)
        here = (p - start).to(tl.int64)[:, None]
        new_k, new_v = _load_pair(
            new_keys + here * KV_HEADS * D + dim[None, :], new_values + here * qkv_stride + dim[None, :], new
        )
        scores = capped(tl.dot(sink_query, (k + new_k).T, input_precision="ieee"), softcap, CAPPED)
        seen = (p < sink)[None, :] & (p[None, :] <= t[:, None])
        seen = seen & (seen_at[:, None] - p[None, :] < sink_reach)
        score_max, exp_sum, acc = _online_softmax(scores, seen, v + new_v, score_max, exp_sum, acc)
    query = tl.load(query_ptr + q_at, mask=live[:, None], other=0.0)
    oldest = tl.maximum(sink, start + offset - reach + 1)
    for begin in range(oldest, start, BLOCK):
        p = begin + tl.arange(0, BLOCK)
        held = p < start
        place = slot_of(p, sink, ring)[:, None] * D + dim[None, :]
        k, v = _load_pair(keys + place, values + place, held)
        scores = capped(tl.dot(query, k.T, input_precision="ieee"), softcap, CAPPED)
        seen = held[None, :] & (t[:, None] - p[None, :] < reach)
        score_max, exp_sum, acc = _online_softmax(scores, seen, v, score_max, exp_sum, acc)
    for begin in range(tl.maximum(oldest, start), last + 1, BLOCK):
        p = begin + tl.arange(0, BLOCK)
        held = p <= last
        here = (p - start).to(tl.int64)[:, None]
        k, v = _load_pair(
            new_keys + here * KV_HEADS * D + dim[None, :], new_values + here * qkv_stride + dim[None, :], held
        )
        scores = capped(tl.dot(query, k.T, input_precision="ieee"), softcap, CAPPED)
        seen = (p[None, :] <= t[:, None]) & (t[:, None] - p[None, :] < reach)
        score_max, exp_sum, acc = _online_softmax(scores, seen, v, score_max, exp_sum, acc)
    exp_sum = tl.where(live, exp_sum, 1.0)  # rows of padding may have seen nothing
    out_at = out_ptr + row[:, None] * out_stride + head * D + dim[None, :]
    tl.store(out_at, (acc / exp_sum[:, None]).to(out_at.dtype.element_ty), mask=live[:, None])


@triton.jit
def keep_rows(
    key_ptr, qkv_ptr, pool_ptr, row_segment_ptr, segment_ptr,
    layer_offset, slab_stride, kv_stride, head_stride, qkv_stride, slots,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, key head): stores its key and value, unless a later row of the block takes their slot."""
    wait_for_predecessor(PDL)
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    segment = tl.load(row_segment_ptr + row)
    if segment < 0:
        return
    slab, start, first_row, count, sink = _segment(segment_ptr, segment)
    ring = slots - sink
    p = start + (row - first_row).to(tl.int32)
    if (p >= sink) & (p + ring < start + count):
        return
    dim = tl.arange(0, D)
    place = pool_ptr + slab * slab_stride + layer_offset + kv_head * head_stride
    place += slot_of(p, sink, ring) * D + dim
    tl.store(place, tl.load(key_ptr + (row * KV_HEADS + kv_head) * D + dim))
    tl.store(place + kv_stride, tl.load(qkv_ptr + row * qkv_stride + (HEADS + KV_HEADS + kv_head) * D + dim))
