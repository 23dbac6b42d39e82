"""The second kernel of sampling (see `sampling`): the histogram bins in which the cutoff lies."""

import triton
import triton.language as tl

from kakeya.kernels.gpu.device.pdl import wait_for_predecessor
from kakeya.kernels.gpu.device.sampling import (
    FAR_OFF,
    INFINITY,
    arrives_last,
    beta_of,
    bins_per_distance,
    limits_count,
    reach_of,
    segment_ids,
    share_of,
    weight_of,
)


@triton.jit
def _up_to(nearer, amounts):
    return nearer + tl.cumsum(amounts, 0)


@triton.jit
def _before(nearer, amounts, at, bin_index):
    return nearer + tl.sum(tl.where(at < bin_index, amounts, 0), 0)


@triton.jit
def _store_cutoff(
    bins_ptr, brackets_ptr, cutoffs_ptr, nearer, nearer_count, total, near, far, beta, top_k, top_p, vocab,
    BINS: tl.constexpr,
):  # fmt: skip
    """Find the bins of the cutoff: tokens before them are kept, tokens behind them are not.

    With both top-k and top-p there are several bins: the weight of the top k is known once the k-th token is.
    """
    at = tl.arange(0, BINS)
    weights = tl.load(bins_ptr + at, volatile=True)
    counts = tl.load(bins_ptr + BINS + at, volatile=True)
    tl.store(bins_ptr + at, tl.zeros_like(weights))
    tl.store(bins_ptr + BINS + at, tl.zeros_like(counts))
    takes_k, takes_p = limits_count(top_k, vocab), top_p < 1.0
    k_bin = tl.sum((_up_to(nearer_count, counts) < top_k).to(tl.int32), 0)
    k_bin = tl.where(takes_k, k_bin, BINS)
    ends_at_k = k_bin < BINS  # or fewer than k have any weight
    wanted = share_of(top_p, tl.where(ends_at_k, _before(nearer, weights, at, k_bin), total))
    p_bin = tl.sum((_up_to(nearer, weights) < wanted).to(tl.int32), 0)
    p_bin = tl.where(takes_p, p_bin, BINS)
    first, last = tl.minimum(p_bin, k_bin), tl.where(ends_at_k, k_bin, p_bin)
    missing = tl.where(ends_at_k, top_k - _before(nearer_count, counts, at, first), 0)
    kept = _before(nearer, weights, at, first)

    misses_k = takes_k & ((nearer_count >= top_k) | ((k_bin == BINS) & (far < reach_of(beta))))
    misses_p = takes_p & ((nearer >= wanted) | (p_bin == BINS))
    if misses_k | misses_p:  # the bracket was wrong: take the whole row
        near, far = near * 0.0, near * 0.0 + FAR_OFF
        first, last = first * 0, first * 0 + (BINS - 1)
        missing = tl.where(takes_k, top_k, 0).to(tl.int64)
        kept = kept * 0
    tl.store(brackets_ptr + 1, tl.where(first == BINS, FAR_OFF, near))
    tl.store(brackets_ptr + 2, tl.where(first == BINS, 0.0, far))
    tl.store(cutoffs_ptr, first)
    tl.store(cutoffs_ptr + 1, last)
    tl.store(cutoffs_ptr + 2, missing)
    tl.store(cutoffs_ptr + 3, kept)
    tl.store(cutoffs_ptr + 4, total)


@triton.jit(
    do_not_specialize=["share"],
    # Logits without known alignment are laid out over the threads as the atomic additions are.
    do_not_specialize_on_alignment=["logits_ptr", "slab_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr"],
)
def find_cutoff(
    logits_ptr, slab_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    arrived_ptr, partials_ptr, brackets_ptr, bins_ptr, cutoffs_ptr, row_stride, vocab, share,
    SEGMENT: tl.constexpr, MAX_PROGRAMS: tl.constexpr, BINS: tl.constexpr, THREADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, n-th of the row): reads `share` segments."""
    wait_for_predecessor(PDL)
    row, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if (tl.load(slab_ptr + row) < 0) | (temperature <= 0):
        return
    brackets_ptr += row * 3
    best, near, far = tl.load(brackets_ptr), tl.load(brackets_ptr + 1), tl.load(brackets_ptr + 2)
    if near > far:
        return
    logits = logits_ptr + row * row_stride
    partials_ptr += row * MAX_PROGRAMS * 3
    bins_ptr += row * 2 * BINS
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    nearer = tl.zeros([THREADS], tl.int64)
    nearer_count = tl.zeros([THREADS], tl.int32)
    total = tl.zeros([THREADS], tl.int64)
    beta, scale = beta_of(temperature), bins_per_distance(near, far, BINS)
    begin = program * share * SEGMENT
    for start in range(begin, tl.minimum(begin + share * SEGMENT, vocab), SEGMENT):
        ids = segment_ids(start, SEGMENT, THREADS)
        distance = best - tl.load(logits + ids, mask=ids < vocab, other=-INFINITY)
        weight = weight_of(distance, beta)
        total += tl.sum(weight, 1)
        nearer += tl.sum(tl.where(distance < near, weight, 0), 1)
        nearer_count += tl.sum((distance < near).to(tl.int32), 1)
        between = (distance >= near) & (distance <= far)
        place = tl.where(between, (distance - near) * scale, 0.0)
        bin_ptrs = bins_ptr + tl.minimum(place, BINS - 1.0).to(tl.int32)
        tl.atomic_add(bin_ptrs, weight, mask=between, sem="relaxed")
        if limits_count(top_k, vocab):
            tl.atomic_add(bin_ptrs + BINS, tl.full(ids.shape, 1, tl.int64), mask=between, sem="relaxed")
    partial_ptr = partials_ptr + program * 3
    tl.store(partial_ptr, tl.sum(nearer, 0))
    tl.store(partial_ptr + 1, tl.sum(nearer_count, 0).to(tl.int64))
    tl.store(partial_ptr + 2, tl.sum(total, 0))
    if arrives_last(arrived_ptr + row * 2):
        at = tl.arange(0, MAX_PROGRAMS)
        real = at < tl.num_programs(1)
        _store_cutoff(
            bins_ptr,
            brackets_ptr,
            cutoffs_ptr + row * 5,
            tl.sum(tl.load(partials_ptr + at * 3, mask=real, other=0, volatile=True), 0),
            tl.sum(tl.load(partials_ptr + at * 3 + 1, mask=real, other=0, volatile=True), 0),
            tl.sum(tl.load(partials_ptr + at * 3 + 2, mask=real, other=0, volatile=True), 0),
            near, far, beta, top_k, top_p, vocab, BINS,
        )  # fmt: skip
