"""Decode attention over slabs in place: one new token for each session of a batch, or a few new tokens.

One program computes the query heads that share a key head. It norms and rotates its queries and the new key,
stores the new key and value in their slot, and attends to what the session may see: its sinks and its window.
Each query head has two variants, rotated for the window and rotated for the sinks; both are columns of one
matmul, whose rows are slots. Split-KV: with several splits each program takes a share of the slots, and the
one that finishes last combines the partial outputs in a fixed order. So a row's bits depend on nothing else.

Of several new tokens of a session each stores its own key and value, and makes those of the tokens before it
once more, because these may not be stored yet: they are *fresh*.
"""

import triton
import triton.language as tl

from kakeya.kernels.gpu.device.common import (
    MASKED,
    capped,
    heads_of_rows,
    new_key,
    rotated,
    rotated_rows,
    slot_of,
)
from kakeya.kernels.gpu.device.pdl import wait_for_predecessor

# Scores are exponents of 2: exp2 is faster than exp.
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _heads(at, real, norm_ptr, eps, D: tl.constexpr, QK_NORM: tl.constexpr):
    """The heads of a group, and the same with swapped halves: float32 [heads, D], normed, zero-padded."""
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
    q, swapped, cos_ptr, rotation_stride, scale,
    PADDED: tl.constexpr, VARIANTS: tl.constexpr, D: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """[D, VARIANTS * PADDED]: the heads rotated for the window, then rotated for the sinks. Further variants
    repeat the second and only fill the columns."""
    variants, half = tl.arange(0, VARIANTS), tl.arange(0, D) % (D // 2)
    cos_at = cos_ptr + tl.minimum(variants, 1)[:, None] * 2 * rotation_stride + half[None, :]
    cos, sin = tl.load(cos_at)[:, None, :], tl.load(cos_at + rotation_stride)[:, None, :]
    both = rotated(q[None, :, :], swapped[None, :, :], cos, sin, D) * scale
    # Rounded before the transpose: otherwise they take twice the registers, and half as many programs fit.
    return tl.reshape(both.to(ELEMENT), [VARIANTS * PADDED, D]).T


@triton.jit
def exponents(scores, softcap, CAPPED: tl.constexpr):
    """Scores in base 2. Only capped ones are not in it already: the scale of the others has the factor."""
    if CAPPED:
        scores = capped(scores, softcap, CAPPED) * LOG2_E
    return scores


@triton.jit
def _own_score(
    q, swapped, key, cos_ptr, rotation_stride, scale, softcap, D: tl.constexpr, CAPPED: tl.constexpr
):
    """Each head's score of the new token: at distance 0 both rotations agree."""
    half = tl.arange(0, D) % (D // 2)
    q = rotated(q, swapped, tl.load(cos_ptr + half), tl.load(cos_ptr + rotation_stride + half), D)
    query = (q * scale).to(key.dtype)
    return exponents(tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1), softcap, CAPPED)


@triton.jit
def _store_token(keys, values, slot, key, value, D: tl.constexpr):
    dim = tl.arange(0, D)
    tl.store(keys + slot * D + dim, key)
    tl.store(values + slot * D + dim, value)


@triton.jit
def reach_of_window(sink, capacity, local_window):
    """How many tokens the window holds, the newest included: fewer in a layer with a local window."""
    window = capacity - sink
    return tl.where(local_window > 0, tl.minimum(local_window, window), window)


@triton.jit
def first_sink(t, capacity, local_window):
    """The first sink that t sees."""
    return tl.where(local_window > 0, tl.minimum(t, capacity - 1) - local_window + 1, 0)


@triton.jit
def seen_slots(t, fresh, sink, slots, capacity, local_window):
    """The slots of the earlier tokens that t sees, but for the last `fresh` ones, in two ranges: from the
    oldest of the ring up to its end, and from slot 0 on, where sinks come first. Returns the begin and the
    end of the first, the end of the second."""
    oldest = tl.maximum(sink, t - reach_of_window(sink, capacity, local_window) + 1)
    count = tl.maximum(t - fresh - oldest, 0)
    begin = slot_of(oldest, sink, slots - sink)
    upper = tl.minimum(count, slots - begin)
    return begin, begin + upper, tl.where(count > upper, sink + count - upper, tl.minimum(sink, t - fresh))


@triton.jit
def block_of_slots(keys, values, slot, D: tl.constexpr):
    """Keys [slots, D] and values [D, slots]."""
    dim = tl.arange(0, D)
    k = tl.load(keys + (slot[:, None] * D + dim[None, :]))
    return k, tl.load(values + (slot[None, :] * D + dim[:, None]))


@triton.jit
def online_softmax(scores, seen, v, score_max, exp_sum, acc):
    """Add a block of slots to the softmax: scores [slots, variants], acc [D, variants]."""
    scores = tl.where(seen, scores, MASKED)
    new_max = tl.maximum(score_max, tl.max(scores, 0))
    weights = tl.where(seen, tl.exp2(scores - new_max[None, :]), 0.0)
    rescale = tl.exp2(score_max - new_max)
    exp_sum = exp_sum * rescale + tl.sum(weights, 0)
    acc = acc * rescale[None, :] + tl.dot(v, weights.to(v.dtype), input_precision="ieee")
    return new_max, exp_sum, acc


@triton.jit
def _attend_slots(
    queries, keys, values, split, t, fresh, sink, slots, capacity, softcap, local_window,
    PADDED: tl.constexpr, VARIANTS: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The softmax of every variant over a split's slots: score_max, exp_sum [variants], acc [D, variants]."""
    variant = tl.arange(0, VARIANTS * PADDED) // PADDED
    in_window, at_sinks = (variant == 0)[None, :], (variant == 1)[None, :]
    begin, high_end, low_end = seen_slots(t, fresh, sink, slots, capacity, local_window)
    sinks_from = first_sink(t, capacity, local_window)
    sinks_end = tl.minimum(sink, t - fresh)
    high_blocks = tl.cdiv(high_end - begin, BLOCK)
    blocks = high_blocks + tl.cdiv(low_end, BLOCK)
    score_max = tl.full([VARIANTS * PADDED], MASKED, tl.float32)
    exp_sum = tl.zeros([VARIANTS * PADDED], tl.float32)
    acc = tl.zeros([D, VARIANTS * PADDED], tl.float32)
    for block in range(split * blocks // SPLITS, (split + 1) * blocks // SPLITS):
        is_high = block < high_blocks
        start = tl.where(is_high, begin, -high_blocks * BLOCK) + block * BLOCK
        end = tl.where(is_high, high_end, low_end)
        slot = start + tl.arange(0, BLOCK)
        # Beyond the end, repeat the last slot: what lies there may be NaN.
        k, v = block_of_slots(keys, values, tl.minimum(slot, end - 1), D)
        scores = exponents(tl.dot(k, queries, input_precision="ieee"), softcap, CAPPED)
        seen = in_window & ((slot >= sink) & (slot < end))[:, None]
        seen = seen | at_sinks & ((slot >= sinks_from) & (slot < sinks_end))[:, None]
        score_max, exp_sum, acc = online_softmax(scores, seen, v, score_max, exp_sum, acc)
    return score_max, exp_sum, acc


@triton.jit
def _attend_fresh(
    state, queries, first_at, wave_stride, cos_at, rotation_stride, key_norm_ptr, eps, values_from,
    fresh, t, sink, capacity, softcap, local_window,
    PADDED: tl.constexpr, VARIANTS: tl.constexpr, D: tl.constexpr, FRESH: tl.constexpr,
    QK_NORM: tl.constexpr, CAPPED: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Add to the softmax what the fresh tokens say, the first of which has its key at `first_at`."""
    score_max, exp_sum, acc = state
    dim, place = tl.arange(0, D), tl.arange(0, FRESH)
    real = place < fresh
    key_at = first_at + tl.where(real, place, 0).to(tl.int64) * wave_stride[0]
    angle_at = cos_at + tl.where(real, place, 0) * wave_stride[1]
    k, swapped = heads_of_rows(key_at, real, key_norm_ptr, eps, D, QK_NORM)
    k = rotated_rows(k, swapped, angle_at, rotation_stride, D).to(ELEMENT)
    v = tl.load(key_at[None, :] + values_from + dim[:, None], mask=real[None, :], other=0.0)
    scores = exponents(tl.dot(k, queries, input_precision="ieee"), softcap, CAPPED)
    position = t - fresh + place
    reach = reach_of_window(sink, capacity, local_window)
    variant = tl.arange(0, VARIANTS * PADDED) // PADDED
    in_window = real & (position >= sink) & (position > t - reach)
    at_sinks = real & (position < sink) & (position >= first_sink(t, capacity, local_window))
    seen = (variant == 0)[None, :] & in_window[:, None] | (variant == 1)[None, :] & at_sinks[:, None]
    return online_softmax(scores, seen, v, score_max, exp_sum, acc)


@triton.jit
def _merge_variants(
    score_max, exp_sum, acc, own_score, own_value,
    PADDED: tl.constexpr, VARIANTS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Merge the softmax of a head's variants and of the new token: [PADDED], [PADDED], [PADDED, D]."""
    maxima = tl.reshape(score_max, [VARIANTS, PADDED])
    best = tl.maximum(tl.max(maxima, 0), own_score)
    rescale, own = tl.exp2(maxima - best[None, :]), tl.exp2(own_score - best)
    exp_sum = tl.sum(rescale * tl.reshape(exp_sum, [VARIANTS, PADDED]), 0) + own
    acc = tl.sum(rescale[:, :, None] * tl.reshape(acc.T, [VARIANTS, PADDED, D]), 0)
    return best, exp_sum, acc + own[:, None] * own_value.to(tl.float32)[None, :]


@triton.jit
def _combine_splits(
    partial_ptr, stats_ptr, first_place, heads, real, out_at,
    HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Sum the partial outputs of the splits, each rescaled to the greatest maximum."""
    dim = tl.arange(0, D)
    places = first_place + tl.arange(0, SPLITS)[:, None] * HEADS + heads[None, :]
    maxima = tl.load(stats_ptr + places * 2, mask=real[None, :], other=0.0, volatile=True)
    exp_sums = tl.load(stats_ptr + places * 2 + 1, mask=real[None, :], other=1.0, volatile=True)
    partial_at = partial_ptr + places[:, :, None] * D + dim[None, None, :]
    partials = tl.load(partial_at, mask=real[None, :, None], other=0.0, volatile=True)
    weights = tl.exp2(maxima - tl.max(maxima, 0)[None, :])
    combined = tl.sum(weights[:, :, None] * partials, 0) / tl.sum(weights * exp_sums, 0)[:, None]
    tl.store(out_at, combined.to(out_at.dtype.element_ty), mask=real[:, None])


@triton.jit
def _store_split(
    partial_ptr, stats_ptr, arrived_ptr, row, split, heads, real, score_max, exp_sum, acc, out_at,
    HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store this split's partial output. The program that finishes last combines them all."""
    place = (row * SPLITS + split) * HEADS + heads
    tl.store(partial_ptr + place[:, None] * D + tl.arange(0, D)[None, :], acc, mask=real[:, None])
    tl.store(stats_ptr + place * 2, score_max, mask=real)
    tl.store(stats_ptr + place * 2 + 1, exp_sum, mask=real)
    tl.debug_barrier()  # every thread has stored its part before the arrival is counted
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == SPLITS - 1:
        _combine_splits(partial_ptr, stats_ptr, row * SPLITS * HEADS, heads, real, out_at, HEADS, D, SPLITS)
        tl.store(arrived_ptr, 0)


@triton.jit(do_not_specialize_on_alignment=["slab_ptr", "position_ptr", "sink_ptr"])
def decode_attention(
    qkv_ptr, pool_ptr, rotation_ptr, query_norm_ptr, key_norm_ptr,
    slab_ptr, position_ptr, sink_ptr, out_ptr, partial_ptr, stats_ptr, arrived_ptr,
    layer_offset, slab_stride, kv_stride, head_stride, qkv_stride, out_stride, rotation_stride,
    capacity, slots, scale, eps, softcap, local_window, sessions,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, VARIANTS: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, FRESH: tl.constexpr,
    QK_NORM: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row and key head, split). PADDED: the group, padded to a power of two. VARIANTS: two, or as
    many as fill the columns of a tensor core's tile. FRESH: 0, or row `place * sessions + session` is that
    session's token at this place, and there are at most so many before it, padded to what a matmul takes."""
    wait_for_predecessor(PDL)
    row, kv_head, split = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS, tl.program_id(1)
    slab = tl.load(slab_ptr + row).to(tl.int64)
    if slab < 0:
        return
    ELEMENT: tl.constexpr = pool_ptr.dtype.element_ty
    HEADS: tl.constexpr = KV_HEADS * GROUP
    t, sink = tl.load(position_ptr + row).to(tl.int32), tl.load(sink_ptr + row).to(tl.int32)
    keys = pool_ptr + slab * slab_stride + layer_offset + kv_head * head_stride
    values = keys + kv_stride
    mine, cos_ptr = qkv_ptr + row * qkv_stride, rotation_ptr + row * (D // 2)
    dim, real = tl.arange(0, D), tl.arange(0, PADDED) < GROUP
    head = kv_head * GROUP + tl.arange(0, PADDED)
    q, swapped = _heads(mine + head[:, None] * D, real, query_norm_ptr, eps, D, QK_NORM)
    scale = scale if CAPPED else scale * LOG2_E
    queries = _queries(q, swapped, cos_ptr, rotation_stride, scale, PADDED, VARIANTS, D, ELEMENT)

    own_score = tl.full([PADDED], MASKED, tl.float32)
    own_value = tl.zeros([D], ELEMENT)
    if split == 0:
        key_at = mine + (HEADS + kv_head) * D
        key = new_key(key_at, cos_ptr, cos_ptr + rotation_stride, key_norm_ptr, eps, D, QK_NORM)
        own_value = tl.load(key_at + KV_HEADS * D + dim)
        _store_token(keys, values, slot_of(t, sink, slots - sink), key, own_value, D)
        own_score = _own_score(q, swapped, key, cos_ptr, rotation_stride, scale, softcap, D, CAPPED)

    fresh = row // sessions if FRESH > 0 else 0
    score_max, exp_sum, acc = _attend_slots(
        queries, keys, values, split, t, fresh, sink, slots, capacity, softcap, local_window,
        PADDED, VARIANTS, D, BLOCK, SPLITS, CAPPED,
    )  # fmt: skip
    if FRESH > 0:  # noqa: SIM102 - the outer one is decided by the compiler
        if (split == SPLITS - 1) & (fresh > 0):
            session = row % sessions
            score_max, exp_sum, acc = _attend_fresh(
                (score_max, exp_sum, acc), queries,
                qkv_ptr + session * qkv_stride + (HEADS + kv_head) * D,
                (sessions * qkv_stride, sessions * (D // 2)),
                rotation_ptr + session * (D // 2), rotation_stride, key_norm_ptr, eps, KV_HEADS * D,
                fresh, t, sink, capacity, softcap, local_window,
                PADDED, VARIANTS, D, FRESH, QK_NORM, CAPPED, ELEMENT,
            )  # fmt: skip
    score_max, exp_sum, acc = _merge_variants(
        score_max, exp_sum, acc, own_score, own_value, PADDED, VARIANTS, D
    )
    out_at = out_ptr + row * out_stride + head[:, None] * D + dim[None, :]
    if SPLITS == 1:
        tl.store(out_at, (acc / exp_sum[:, None]).to(ELEMENT), mask=real[:, None])
    else:
        _store_split(
            partial_ptr, stats_ptr, arrived_ptr + tl.program_id(0), row, split, head, real,
            score_max, exp_sum, acc, out_at, HEADS, D, SPLITS,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["slab_ptr", "position_ptr", "sink_ptr"])
def store_rows(
    qkv_ptr, pool_ptr, rotation_ptr, key_norm_ptr, slab_ptr, position_ptr, sink_ptr,
    layer_offset, slab_stride, kv_stride, head_stride, qkv_stride, rotation_stride, slots, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, QK_NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, key head): stores what decode_attention stores, and does nothing else."""
    wait_for_predecessor(PDL)
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
