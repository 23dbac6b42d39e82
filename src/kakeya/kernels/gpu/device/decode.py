"""Decode attention over slabs in place: one new token for each session of a batch.

One program holds the query heads that share a key head. It norms and rotates its queries and the new key,
stores the new key and value in their slot, and attends to what the session may see: its sinks, through
queries rotated for the distance they are kept at, and its window. With several splits the slots are shared
out, and the program that finishes last joins the parts in a fixed order: a row's bits depend on nothing else.
"""

import triton
import triton.language as tl

from kakeya.kernels.gpu.device.common import NOTHING, capped, new_key, rotated, slot_of, softmax_step


@triton.jit
def _queries(at, real, norm_ptr, eps, HALF: tl.constexpr, QK_NORM: tl.constexpr):
    """The heads of a group as halves, float32 [heads, D / 2], normed; zeros below the real ones."""
    half = tl.arange(0, HALF)
    q1 = tl.load(at, mask=real[:, None], other=0.0).to(tl.float32)
    q2 = tl.load(at + HALF, mask=real[:, None], other=0.0).to(tl.float32)
    if QK_NORM:
        scale = tl.rsqrt((tl.sum(q1 * q1, 1) + tl.sum(q2 * q2, 1)) / (2 * HALF) + eps)[:, None]
        q1 = q1 * scale * tl.load(norm_ptr + half)[None, :]
        q2 = q2 * scale * tl.load(norm_ptr + HALF + half)[None, :]
    return q1, q2


@triton.jit
def _rotated_queries(q1, q2, cos_ptr, sin_ptr, scale, ELEMENT: tl.constexpr, HALF: tl.constexpr):
    half = tl.arange(0, HALF)
    cos, sin = tl.load(cos_ptr + half)[None, :], tl.load(sin_ptr + half)[None, :]
    r1, r2 = rotated(q1, q2, cos, sin)
    return (r1 * scale).to(ELEMENT), (r2 * scale).to(ELEMENT)


@triton.jit
def _store_token(keys, values, slot, k1, k2, v, HALF: tl.constexpr):
    half, dim = tl.arange(0, HALF), tl.arange(0, 2 * HALF)
    tl.store(keys + slot * 2 * HALF + half, k1)
    tl.store(keys + slot * 2 * HALF + HALF + half, k2)
    tl.store(values + slot * 2 * HALF + dim, v)


@triton.jit
def _load_columns(keys, values, slot, seen, HALF: tl.constexpr):
    """Keys as halves and values of the slots that are seen, zeros for the others."""
    half, dim = tl.arange(0, HALF), tl.arange(0, 2 * HALF)
    at = keys + slot[:, None] * 2 * HALF + half[None, :]
    k1 = tl.load(at, mask=seen[:, None], other=0.0)
    k2 = tl.load(at + HALF, mask=seen[:, None], other=0.0)
    v = tl.load(values + slot[:, None] * 2 * HALF + dim[None, :], mask=seen[:, None], other=0.0)
    return k1, k2, v


@triton.jit
def _narrow_product(q, k):
    return tl.sum(q.to(tl.float32)[:, None, :] * k.to(tl.float32)[None, :, :], 2)


@triton.jit
def _products(q1, q2, k1, k2, HALF: tl.constexpr):
    if HALF < 16:  # too narrow for a matrix unit
        scores = _narrow_product(q1, k1) + _narrow_product(q2, k2)
    else:
        scores = tl.dot(q1, k1.T, input_precision="ieee") + tl.dot(q2, k2.T, input_precision="ieee")
    return scores


@triton.jit
def _behind(slot, t, sink, ring):
    """How far before t the token lies that a ring slot holds, 0 for the slot of t itself."""
    distance = tl.maximum(t - sink, 0) % ring - (slot - sink)
    return tl.where(distance < 0, distance + ring, distance)


@triton.jit
def _ring_seen(slot, t, sink, ring, reach):
    """Whether a slot of the ring holds one of the tokens before t that are seen."""
    behind = _behind(slot, t, sink, ring)
    return (behind > 0) & (behind < reach) & (t - behind >= sink)


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
):  # fmt: skip
    """Program (row and key head, split). ROWS: the group padded to what a matrix unit takes."""
    row, kv_head, split = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS, tl.program_id(1)
    slab = tl.load(slab_ptr + row).to(tl.int64)
    if slab < 0:
        return
    ELEMENT: tl.constexpr = pool_ptr.dtype.element_ty
    HEADS: tl.constexpr = KV_HEADS * GROUP
    HALF: tl.constexpr = D // 2
    t = tl.load(position_ptr + row).to(tl.int32)
    sink = tl.load(sink_ptr + row).to(tl.int32)
    ring, window = slots - sink, capacity - sink
    heads = tl.arange(0, ROWS)
    real = heads < GROUP
    dim = tl.arange(0, D)

    mine = qkv_ptr + row * qkv_stride
    q_at = mine + (kv_head * GROUP + heads)[:, None] * D + tl.arange(0, HALF)[None, :]
    q1, q2 = _queries(q_at, real, query_norm_ptr, eps, HALF, QK_NORM)
    cos_ptr = rotation_ptr + row * HALF
    sin_ptr, sink_cos_ptr = cos_ptr + rotation_stride, cos_ptr + 2 * rotation_stride
    w1, w2 = _rotated_queries(q1, q2, cos_ptr, sin_ptr, scale, ELEMENT, HALF)
    s1, s2 = _rotated_queries(q1, q2, sink_cos_ptr, sink_cos_ptr + rotation_stride, scale, ELEMENT, HALF)
    keys = pool_ptr + slab * slab_stride + layer_offset + kv_head * head_stride
    values = keys + kv_stride

    top = tl.full([ROWS], NOTHING, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D], tl.float32)
    if split == 0:
        # The new token sees itself at distance 0, where both rotations agree.
        key_at = mine + (HEADS + kv_head) * D
        new1, new2 = new_key(key_at, cos_ptr, sin_ptr, key_norm_ptr, eps, HALF, QK_NORM)
        new_v = tl.load(key_at + KV_HEADS * D + dim)
        _store_token(keys, values, slot_of(t, sink, ring), new1, new2, new_v, HALF)
        product1 = w1.to(tl.float32) * new1.to(tl.float32)[None, :]
        product2 = w2.to(tl.float32) * new2.to(tl.float32)[None, :]
        top = capped(tl.sum(product1 + product2, 1), softcap, CAPPED)
        total = tl.full([ROWS], 1.0, tl.float32)
        mixed += new_v.to(tl.float32)[None, :]

    filled = tl.minimum(t, slots)
    share = tl.cdiv(slots, SPLITS * BLOCK) * BLOCK
    first, end = split * share, tl.minimum(split * share + share, filled)
    # A local layer sees distances below its window; without one every distance is.
    reach = tl.where(local_window > 0, tl.minimum(local_window, window), window)
    sink_reach = tl.where(local_window > 0, local_window, capacity)
    sinks_end = tl.cdiv(sink, BLOCK) * BLOCK
    # Blocks that hold sinks: their columns are scored with both rotations, and each takes its own.
    for start in range(first, tl.minimum(sinks_end, end), BLOCK):
        slot = start + tl.arange(0, BLOCK)
        is_sink = slot < sink
        sink_seen = (tl.minimum(t, capacity - 1) - slot < sink_reach) & (slot < t)
        seen = (slot < filled) & tl.where(is_sink, sink_seen, _ring_seen(slot, t, sink, ring, reach))
        k1, k2, v = _load_columns(keys, values, slot, seen, HALF)
        as_sink, as_window = _products(s1, s2, k1, k2, HALF), _products(w1, w2, k1, k2, HALF)
        scores = capped(tl.where(is_sink[None, :], as_sink, as_window), softcap, CAPPED)
        top, total, mixed = softmax_step(scores, seen[None, :], v, top, total, mixed)
    for start in range(tl.maximum(first, sinks_end), end, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        seen = (slot < filled) & _ring_seen(slot, t, sink, ring, reach)
        k1, k2, v = _load_columns(keys, values, slot, seen, HALF)
        scores = capped(_products(w1, w2, k1, k2, HALF), softcap, CAPPED)
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
):  # fmt: skip
    """Program (row, key head): what decode_attention stores, and nothing else."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    slab = tl.load(slab_ptr + row).to(tl.int64)
    if slab < 0:
        return
    HALF: tl.constexpr = D // 2
    t, sink = tl.load(position_ptr + row).to(tl.int32), tl.load(sink_ptr + row).to(tl.int32)
    key_at = qkv_ptr + row * qkv_stride + (HEADS + kv_head) * D
    cos_ptr = rotation_ptr + row * HALF
    k1, k2 = new_key(key_at, cos_ptr, cos_ptr + rotation_stride, key_norm_ptr, eps, HALF, QK_NORM)
    v = tl.load(key_at + KV_HEADS * D + tl.arange(0, D))
    keys = pool_ptr + slab * slab_stride + layer_offset + kv_head * head_stride
    _store_token(keys, keys + kv_stride, slot_of(t, sink, slots - sink), k1, k2, v, HALF)
