"""The third kernel of sampling (see `sampling`): the last token that the filters keep, and the draw."""

import triton
import triton.language as tl

from kakeya.kernels.gpu import philox
from kakeya.kernels.gpu.device.pdl import wait_for_predecessor
from kakeya.kernels.gpu.device.sampling import (
    ANY_ID,
    INFINITY,
    LAST_RANK,
    arrives_last,
    beta_of,
    bins_per_distance,
    rank_of,
    segment_ids,
    share_of,
    weight_of,
)

_MULTIPLIER_A = tl.constexpr(philox.MULTIPLIERS[0])
_MULTIPLIER_B = tl.constexpr(philox.MULTIPLIERS[1])
_INCREMENT_A = tl.constexpr(philox.INCREMENTS[0])
_INCREMENT_B = tl.constexpr(philox.INCREMENTS[1])
_ROUNDS = tl.constexpr(philox.ROUNDS)
_UNIT = tl.constexpr(2.0**-53)

_FIRST_RANK = tl.constexpr(-(2**63))


@triton.jit
def uniform(seed, position):
    """See kernels.gpu.philox: seed and position are a row's scalars; float64 in [0, 1)."""
    key_a = seed.to(tl.uint64, bitcast=True)
    key_b = key_a * 0
    a = (position.to(tl.int64) + 1).to(tl.uint64)
    b, c, d = key_b, key_b, key_b
    multiplier_a, multiplier_b = key_b + _MULTIPLIER_A, key_b + _MULTIPLIER_B
    for _ in tl.static_range(_ROUNDS):
        high_a, low_a = tl.umulhi(a, multiplier_a), a * multiplier_a
        high_c, low_c = tl.umulhi(c, multiplier_b), c * multiplier_b
        a, b, c, d = high_c ^ b ^ key_a, low_c, high_a ^ d ^ key_b, low_a
        key_a, key_b = key_a + _INCREMENT_A, key_b + _INCREMENT_B
    return (a >> 11).to(tl.float64) * _UNIT


@triton.jit
def _load_cutoff(brackets_ptr, cutoffs_ptr, BINS: tl.constexpr):
    """The bins of the cutoff: the distance where bins begin, bins per distance, the first bin and the end of
    the last one, and the greatest distance."""
    near, far = tl.load(brackets_ptr + 1), tl.load(brackets_ptr + 2)
    first, last = tl.load(cutoffs_ptr).to(tl.float32), tl.load(cutoffs_ptr + 1).to(tl.float32)
    end = tl.where(last < BINS - 1.0, last + 1.0, INFINITY)
    if near > far:  # the filters keep all
        near, far, first = near * 0.0, near * 0.0 + 1.0, near * 0.0 + INFINITY
    return near, bins_per_distance(near, far, BINS), first, end, far


@triton.jit
def _place(distance, cutoff):
    """Whether tokens lie before the bins of the cutoff, and whether they lie in them."""
    near, scale, first, end, far = cutoff
    place = (distance - near) * scale
    return place < first, (place >= first) & (place < end) & (distance <= far)


@triton.jit
def _candidates(row, cutoff, at, count, LISTED: tl.constexpr):
    """The tokens in the bins of the cutoff: ids, ranks and weights. They come from the list, or from the row
    if the list is too short. Other tokens get the last rank and no weight."""
    logits, listed_ptr, best, beta = row
    real = at < count
    listed = tl.load(listed_ptr + at, mask=real & (at < LISTED), other=0)
    ids = tl.where(count > LISTED, at, listed)
    x = tl.load(logits + ids, mask=real, other=-INFINITY)
    _, inside = _place(best - x, cutoff)
    weight = tl.where(inside, weight_of(best - x, beta), 0)
    return ids, tl.where(inside, rank_of(x, ids), LAST_RANK), weight


@triton.jit
def _last_kept(
    row, cutoff, count, kept, wanted,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The least rank up to which the candidates that are `kept` add up to `wanted`; the last rank if they do
    not.

    A bisection whose ends jump to the next candidate, so a few steps are enough.
    """
    low = tl.full([], _FIRST_RANK, tl.int64)
    high = tl.full([], LAST_RANK, tl.int64)
    while low < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        reached = tl.full([], 0, tl.int64)
        below, beyond = low, high
        for start in range(0, count, BLOCK):
            _, rank, weight = _candidates(row, cutoff, start + tl.arange(0, BLOCK), count, LISTED)
            here = rank <= middle
            measure = tl.full([BLOCK], 1, tl.int64) if COUNT else weight
            reached += tl.sum(tl.where(here & (rank <= kept), measure, 0), 0)
            below = tl.maximum(below, tl.max(tl.where(here, rank, low), 0))
            beyond = tl.minimum(beyond, tl.min(tl.where(here, high, rank), 0))
        enough = reached >= wanted
        low, high = tl.where(enough, low, beyond), tl.where(enough, below, high)
    return low


@triton.jit
def _kept_weight(row, cutoff, count, kept, BLOCK: tl.constexpr, LISTED: tl.constexpr):
    total = tl.full([], 0, tl.int64)
    for start in range(0, count, BLOCK):
        _, rank, weight = _candidates(row, cutoff, start + tl.arange(0, BLOCK), count, LISTED)
        total += tl.sum(tl.where(rank <= kept, weight, 0), 0)
    return total


@triton.jit
def _filtered(row, cutoff, cutoffs_ptr, count, top_p, BLOCK: tl.constexpr, LISTED: tl.constexpr):
    """The last rank that top-k, and then top-p, keep."""
    missing, before, total = tl.load(cutoffs_ptr + 2), tl.load(cutoffs_ptr + 3), tl.load(cutoffs_ptr + 4)
    kept = tl.full([], LAST_RANK, tl.int64)
    if missing > 0:
        kept = _last_kept(row, cutoff, count, kept, missing, True, BLOCK, LISTED)
        total = before + _kept_weight(row, cutoff, count, kept, BLOCK, LISTED)
    if top_p < 1.0:
        wanted = share_of(top_p, total) - before
        kept = _last_kept(row, cutoff, count, kept, wanted, False, BLOCK, LISTED)
    return kept


@triton.jit
def _drawn(row, segments_ptr, kept, number, vocab, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr):
    """The first id at which the cumulative weight exceeds `number` times the total."""
    logits, _, best, beta = row
    at = tl.arange(0, SEGMENTS)
    sums = tl.load(segments_ptr + at, mask=at < tl.cdiv(vocab, SEGMENT), other=0, volatile=True)
    total = tl.sum(sums, 0)
    target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    segment = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
    before = tl.sum(tl.where(at < segment, sums, 0), 0)
    ids = segment * SEGMENT + tl.arange(0, SEGMENT)
    x = tl.load(logits + ids, mask=ids < vocab, other=-INFINITY)
    weight = tl.where(rank_of(x, ids) <= kept, weight_of(best - x, beta), 0)
    return segment * SEGMENT + tl.sum((before + tl.cumsum(weight, 0) <= target).to(tl.int32), 0)


@triton.jit(
    do_not_specialize=["share"],
    # Logits without known alignment are laid out over the threads as the atomic additions are.
    do_not_specialize_on_alignment=[
        "logits_ptr", "slab_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "position_ptr",
        "sampled_ptr",
    ],
)  # fmt: skip
def draw(
    logits_ptr, slab_ptr, temperature_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, newest_ptr,
    sampled_ptr, arrived_ptr, brackets_ptr, cutoffs_ptr, segments_ptr, listed_ptr, row_stride, vocab, share,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, BINS: tl.constexpr, LISTED: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, n-th of the row): reads `share` segments."""
    wait_for_predecessor(PDL)
    at_row, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + at_row)
    slab = tl.load(slab_ptr + at_row)
    if (slab < 0) | (temperature <= 0):
        return
    brackets_ptr += at_row * 3
    cutoffs_ptr += at_row * 5
    if tl.load(brackets_ptr + 2) < 0:
        return
    best, beta = tl.load(brackets_ptr), beta_of(temperature)
    cutoff = _load_cutoff(brackets_ptr, cutoffs_ptr, BINS)
    logits = logits_ptr + at_row * row_stride
    arrived_ptr += at_row * 2
    segments_ptr += at_row * SEGMENTS
    listed_ptr += at_row * LISTED
    min_p = tl.load(min_p_ptr + at_row)
    # The least logit whose score reaches log(min_p), to a rounding.
    least = tl.where(min_p > 0, best + temperature * tl.log(tl.maximum(min_p, 1e-30)), -INFINITY)
    begin = program * share * SEGMENT
    for start in range(begin, tl.minimum(begin + share * SEGMENT, vocab), SEGMENT):
        ids = segment_ids(start, SEGMENT, THREADS)
        x = tl.load(logits + ids, mask=ids < vocab, other=-INFINITY)
        before, inside = _place(best - x, cutoff)
        weight = weight_of(best - x, beta)
        kept_weight = tl.sum(tl.sum(tl.where(before & (x >= least), weight, 0), 1), 0)
        tl.store(segments_ptr + start // SEGMENT, kept_weight)
        place = tl.atomic_add(
            arrived_ptr + 1 + tl.zeros_like(ids), tl.full(ids.shape, 1, tl.int32), mask=inside, sem="relaxed"
        )
        tl.store(listed_ptr + place, ids, mask=inside & (place < LISTED))
    if arrives_last(arrived_ptr):
        listed = tl.load(arrived_ptr + 1, volatile=True)
        count = tl.where(listed > LISTED, vocab, listed)
        row = (logits, listed_ptr, best, beta)
        kept = tl.full([], LAST_RANK, tl.int64)
        if tl.load(brackets_ptr + 1) <= tl.load(brackets_ptr + 2):
            top_p = tl.load(top_p_ptr + at_row)
            kept = _filtered(row, cutoff, cutoffs_ptr, count, top_p, SEGMENT, LISTED)
        kept = tl.minimum(kept, rank_of(least, ANY_ID))
        for start in range(0, count, SEGMENT):
            ids, rank, weight = _candidates(row, cutoff, start + tl.arange(0, SEGMENT), count, LISTED)
            mask = (rank <= kept) & (weight > 0)
            tl.atomic_add(segments_ptr + ids // SEGMENT, weight, mask=mask, sem="relaxed")
        tl.debug_barrier()  # all sums are stored, and all threads have read the length of the list
        tl.store(arrived_ptr + 1, 0)
        number = uniform(tl.load(seed_ptr + at_row), tl.load(position_ptr + at_row))
        token = _drawn(row, segments_ptr, kept, number, vocab, SEGMENT, SEGMENTS)
        tl.store(sampled_ptr + at_row, token)
        tl.store(newest_ptr + slab, token)
