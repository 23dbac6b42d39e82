"""Sampling with top-k, top-p and min-p, with several programs per row of logits.

Every filter keeps a prefix of one ranking: the higher logit first, and of equal logits the lower id. So one
number describes what the filters keep: the cutoff, which is the rank of the last token that is kept. Three
kernels find it and draw a token. Each reads the row once, and the program of a row that finishes last
combines the results.

1. `best.find_best` finds the greatest logit. A greedy row is done. For other rows it takes a subset of the
   row's logits to estimate a bracket: two distances from the greatest logit between which the cutoff lies.
2. `cutoff.find_cutoff` makes a histogram of the tokens in the bracket, and finds the bins of the cutoff.
3. `draw.draw` sums the weights before these bins by segments of the row, lists the tokens in the bins, finds
   the last token that is kept, and draws.

Weights are integers, so sums are exact in any order: neither the bracket nor the number of programs changes a
result. If the bracket was wrong or the list is too short, the last program reads the whole row instead.

This file has what the three kernels share.
"""

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))
FAR_OFF = tl.constexpr(1e38)
"""Further from the greatest logit than any finite one."""
ANY_ID = tl.constexpr(2**31 - 1)
LAST_RANK = tl.constexpr(2**63 - 1)

_REACH = tl.constexpr(30.0)  # in temperatures from the greatest logit: a token beyond has no weight
_ONE = tl.constexpr(2.0**43)  # the weight of the greatest logit: 64 bits hold the sum of a million


@triton.jit
def rank_of(x, ids):
    """int64: the greatest logit has the least rank. 0.0 and -0.0 are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # in the order of x
    return ((~key).to(tl.int64) << 32) | ids


@triton.jit
def ranked(rank):
    """The logit and the id that have this rank."""
    key = ~((rank >> 32).to(tl.int32))
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), (rank & ANY_ID).to(tl.int32)


@triton.jit
def beta_of(temperature):
    """The inverse temperature; finite, so that a distance of zero stays zero."""
    return tl.minimum(1.0 / temperature, FAR_OFF)


@triton.jit
def reach_of(beta):
    """The distance from the greatest logit beyond which a token has no weight."""
    # The interpreter of Triton 3.7 takes a constant divided by a tensor for a constant: so both are tensors.
    return tl.full([], _REACH, tl.float32) / beta


@triton.jit
def weight_of(distance, beta):
    return (tl.exp(-distance * beta) * _ONE).to(tl.int64)


@triton.jit
def bins_per_distance(near, far, BINS: tl.constexpr):
    """Bins per unit of distance, from `near` to `far`."""
    return tl.minimum(BINS / (far - near), FAR_OFF)


@triton.jit
def share_of(top_p, whole):
    """The least sum that is top_p of the whole, and at least 1."""
    share = tl.ceil(top_p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(share, whole), 1)


@triton.jit
def segment_ids(start, SEGMENT: tl.constexpr, THREADS: tl.constexpr):
    """[THREADS, SEGMENT / THREADS]: each thread has one row, and sums it without the others."""
    return start + tl.arange(0, THREADS)[:, None] + tl.arange(0, SEGMENT // THREADS)[None, :] * THREADS


@triton.jit
def limits_count(top_k, vocab):
    return (top_k > 0) & (top_k < vocab)


@triton.jit
def arrives_last(arrived_ptr):
    """Whether the row's other programs are done, so that their results can be read."""
    tl.debug_barrier()  # every thread has stored its results before the arrival is counted
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == tl.num_programs(1) - 1
    if last:
        tl.store(arrived_ptr, 0)
    return last
