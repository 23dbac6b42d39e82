"""Decode attention over slabs in place: one new token for each session of a batch.

One program holds the query heads that share a key head. It norms and rotates its queries and the new key,
stores the new key and value in their slot, and attends to what the session may see: its sinks, through
queries rotated for the distance they are kept at, and its window. A head's two looks, at the window and at
the sinks, are columns of the same products, whose rows are slots. With several splits the slots are shared
out, and the program that finishes last joins the parts in a fixed order: a row's bits depend on nothing else.
"""

import triton
import triton.language as tl

from kakeya.kernels.gpu.device.chain import follow
from kakeya.kernels.gpu.device.common import NOTHING, capped, new_key, rotated, slot_of

# Scores are exponents of two, whose powers are quicker than those of e.
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _heads(at, real, norm_ptr, eps, D: tl.constexpr, QK_NORM: tl.constexpr):
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
def _queries(
    q, swapped, turns, turn_stride, scale,
    PADDED: tl.constexpr, LOOKS: tl.constexpr, D: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """[D, LOOKS * PADDED]: the heads as they look at the window, then as they look at the sinks, and that
    again as often as it takes to fill the columns."""
    looks, half = tl.arange(0, LOOKS), tl.arange(0, D) % (D // 2)
    cos_at = turns + tl.minimum(looks, 1)[:, None] * 2 * turn_stride + half[None, :]
    cos, sin = tl.load(cos_at)[:, None, :], tl.load(cos_at + turn_stride)[:, None, :]
    both = rotated(q[None, :, :], swapped[None, :, :], cos, sin, D) * scale
    # Rounded first: turned over before, they would take twice the registers, and half the programs fit.
    return tl.reshape(both.to(ELEMENT), [LOOKS * PADDED, D]).T


@triton.jit
def _exponents(scores, softcap, CAPPED: tl.constexpr):
    """Scores that are capped are not scaled for it before."""
    if CAPPED:
        scores = capped(scores, softcap, CAPPED) * _LOG2_E
    return scores


@triton.jit
def _own_score(q, swapped, key, turns, turn_stride, scale, softcap, D: tl.constexpr, CAPPED: tl.constexpr):
    """Of each head on the new token: at distance 0, where both rotations agree."""
    half = tl.arange(0, D) % (D // 2)
    turned = rotated(q, swapped, tl.load(turns + half), tl.load(turns + turn_stride + half), D)
    query = (turned * scale).to(key.dtype)
    return _exponents(tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1), softcap, CAPPED)


@triton.jit
def _store_token(keys, values, slot, key, value, D: tl.constexpr):
    dim = tl.arange(0, D)
    tl.store(keys + slot * D + dim, key)
    tl.store(values + slot * D + dim, value)


@triton.jit
def _pieces_seen(t, sink, slots, capacity, local_window):
    """The slots with what t sees of earlier tokens, in two pieces: from the oldest of the ring up to its end,
    and from slot 0 on, where sinks come first. Begin and end of the one, end of the other."""
    window = capacity - sink
    # A local layer sees distances below its window; without one every distance is.
    reach = tl.where(local_window > 0, tl.minimum(local_window, window), window)
    oldest = tl.maximum(sink, t - reach + 1)
    count = tl.maximum(t - oldest, 0)
    begin = slot_of(oldest, sink, slots - sink)
    upper = tl.minimum(count, slots - begin)
    return begin, begin + upper, tl.where(count > upper, sink + count - upper, tl.minimum(sink, t))


@triton.jit
def _block(keys, values, slot, D: tl.constexpr):
    """Keys [slots, D] and values [D, slots]."""
    dim = tl.arange(0, D)
    k = tl.load(keys + (slot[:, None] * D + dim[None, :]))
    return k, tl.load(values + (slot[None, :] * D + dim[:, None]))


@triton.jit
def _take_in(scores, seen, v, top, total, mixed):
    """A block of slots into the running softmax: scores [slots, looks], mixed [D, looks]."""
    scores = tl.where(seen, scores, NOTHING)
    new_top = tl.maximum(top, tl.max(scores, 0))
    weights = tl.where(seen, tl.exp2(scores - new_top[None, :]), 0.0)
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(weights, 0)
    mixed = mixed * fade[None, :] + tl.dot(v, weights.to(v.dtype), input_precision="ieee")
    return new_top, total, mixed


@triton.jit
def _looked_through(
    queries, keys, values, split, t, sink, slots, capacity, softcap, local_window,
    PADDED: tl.constexpr, LOOKS: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Every look's softmax over a split's share of the slots: top and total [looks], mixed [D, looks]."""
    look = tl.arange(0, LOOKS * PADDED) // PADDED
    in_window, at_sinks = (look == 0)[None, :], (look == 1)[None, :]
    begin, high_end, low_end = _pieces_seen(t, sink, slots, capacity, local_window)
    sinks_from = tl.where(local_window > 0, tl.minimum(t, capacity - 1) - local_window + 1, 0)
    high_blocks = tl.cdiv(high_end - begin, BLOCK)
    blocks = high_blocks + tl.cdiv(low_end, BLOCK)
    top = tl.full([LOOKS * PADDED], NOTHING, tl.float32)
    total = tl.zeros([LOOKS * PADDED], tl.float32)
    mixed = tl.zeros([D, LOOKS * PADDED], tl.float32)
    for block in range(split * blocks // SPLITS, (split + 1) * blocks // SPLITS):
        is_high = block < high_blocks
        start = tl.where(is_high, begin, -high_blocks * BLOCK) + block * BLOCK
        end = tl.where(is_high, high_end, low_end)
        slot = start + tl.arange(0, BLOCK)
        # Beyond the end the last one again: what lies there may be no number.
        k, v = _block(keys, values, tl.minimum(slot, end - 1), D)
        scores = _exponents(tl.dot(k, queries, input_precision="ieee"), softcap, CAPPED)
        seen = in_window & ((slot >= sink) & (slot < end))[:, None]
        seen = seen | at_sinks & ((slot >= sinks_from) & (slot < tl.minimum(sink, t)))[:, None]
        top, total, mixed = _take_in(scores, seen, v, top, total, mixed)
    return top, total, mixed


@triton.jit
def _together(
    top, total, mixed, own_score, own_value, PADDED: tl.constexpr, LOOKS: tl.constexpr, D: tl.constexpr
):
    """What heads have seen in their looks, and of the new token: [PADDED], [PADDED], [PADDED, D]."""
    tops = tl.reshape(top, [LOOKS, PADDED])
    best = tl.maximum(tl.max(tops, 0), own_score)
    fade, own = tl.exp2(tops - best[None, :]), tl.exp2(own_score - best)
    total = tl.sum(fade * tl.reshape(total, [LOOKS, PADDED]), 0) + own
    mixed = tl.sum(fade[:, :, None] * tl.reshape(mixed.T, [LOOKS, PADDED, D]), 0)
    return best, total, mixed + own[:, None] * own_value.to(tl.float32)[None, :]


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
    weights = tl.exp2(tops - tl.max(tops, 0)[None, :])
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
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, LOOKS: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, QK_NORM: tl.constexpr, CAPPED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row and key head, split). PADDED: the group as a power of two. LOOKS: two, or as many as fill
    the columns of a matrix unit."""
    follow(CHAINED)
    row, kv_head, split = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS, tl.program_id(1)
    slab = tl.load(slab_ptr + row).to(tl.int64)
    if slab < 0:
        return
    ELEMENT: tl.constexpr = pool_ptr.dtype.element_ty
    HEADS: tl.constexpr = KV_HEADS * GROUP
    t, sink = tl.load(position_ptr + row).to(tl.int32), tl.load(sink_ptr + row).to(tl.int32)
    keys = pool_ptr + slab * slab_stride + layer_offset + kv_head * head_stride
    values = keys + kv_stride
    mine, turns = qkv_ptr + row * qkv_stride, rotation_ptr + row * (D // 2)
    dim, real = tl.arange(0, D), tl.arange(0, PADDED) < GROUP
    head = kv_head * GROUP + tl.arange(0, PADDED)
    q, swapped = _heads(mine + head[:, None] * D, real, query_norm_ptr, eps, D, QK_NORM)
    scale = scale if CAPPED else scale * _LOG2_E
    queries = _queries(q, swapped, turns, rotation_stride, scale, PADDED, LOOKS, D, ELEMENT)

    own_score = tl.full([PADDED], NOTHING, tl.float32)
    own_value = tl.zeros([D], ELEMENT)
    if split == 0:
        key_at = mine + (HEADS + kv_head) * D
        key = new_key(key_at, turns, turns + rotation_stride, key_norm_ptr, eps, D, QK_NORM)
        own_value = tl.load(key_at + KV_HEADS * D + dim)
        _store_token(keys, values, slot_of(t, sink, slots - sink), key, own_value, D)
        own_score = _own_score(q, swapped, key, turns, rotation_stride, scale, softcap, D, CAPPED)

    top, total, mixed = _looked_through(
        queries, keys, values, split, t, sink, slots, capacity, softcap, local_window,
        PADDED, LOOKS, D, BLOCK, SPLITS, CAPPED,
    )  # fmt: skip
    top, total, mixed = _together(top, total, mixed, own_score, own_value, PADDED, LOOKS, D)
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
