"""The choice of a token, several programs a row: the best, or one drawn from what the filters leave.

Every filter keeps a beginning of the same ranking (higher logit first, of equal ones the lower id), so what
is left is said by one number: the rank of the last token that is kept. Three launches find and use it. Each
walks the row once, and the program of a row that finishes last joins what the others have found.

1. `best.find_best` finds the best, which is all for a greedy row. A sample of the row then says between which
   distances from the best the filters are bound to end.
2. `cut.find_cut` adds up the tokens between those distances in bins, and finds the ones where the filters
   end.
3. `draw.draw` adds up what comes before by segments of the row, lists the tokens in those bins, finds the
   last one that is kept, and draws.

Weights are integers, so that sums are exact in any order: neither the sample nor the number of programs
changes a result. Where the sample misled, or the list is too short, the last program walks the row instead.

This file has what the three share.
"""

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))
FAR_OFF = tl.constexpr(1e38)
"""Further from the best than any finite logit."""
ANY_ID = tl.constexpr(2**31 - 1)
LAST_RANK = tl.constexpr(2**63 - 1)
REACH = tl.constexpr(30.0)
"""Of temperatures from the best: nothing beyond weighs anything."""

_ONE = tl.constexpr(2.0**43)  # the weight of the best: a million of them can be added up in 64 bits


@triton.jit
def rank_of(x, ids):
    """int64 in the order of preference, the best least; both zeros are one."""
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
def coldness_of(temperature):
    """What distances are multiplied with; finite, so that no distance stays none."""
    return tl.minimum(1.0 / temperature, FAR_OFF)


@triton.jit
def weight_of(distance, coldness):
    return (tl.exp(-distance * coldness) * _ONE).to(tl.int64)


@triton.jit
def bins_per_distance(near, far, BINS: tl.constexpr):
    """What distances beyond `near` are multiplied with for their place among the bins; `far` is the end."""
    return tl.minimum(BINS / (far - near), FAR_OFF)


@triton.jit
def share_of(top_p, whole):
    """The least sum that holds top_p of the whole, and at least something."""
    share = tl.ceil(top_p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(share, whole), 1)


@triton.jit
def segment_ids(start, SEGMENT: tl.constexpr, THREADS: tl.constexpr):
    """[THREADS, SEGMENT / THREADS]: a thread has a row of its own, and adds it up without the others."""
    return start + tl.arange(0, THREADS)[:, None] + tl.arange(0, SEGMENT // THREADS)[None, :] * THREADS


@triton.jit
def limits_count(top_k, vocab):
    return (top_k > 0) & (top_k < vocab)


@triton.jit
def arrives_last(arrived_ptr):
    """Whether the row's other programs are done, so that what they wrote is there to be read."""
    tl.debug_barrier()  # every thread's part is there before the arrival is counted
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == tl.num_programs(1) - 1
    if last:
        tl.store(arrived_ptr, 0)
    return last
