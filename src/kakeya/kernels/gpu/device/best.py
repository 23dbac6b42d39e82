"""The first kernel of sampling (see `sampling`): a row's greatest logit, and the bracket of its cutoff."""

import triton
import triton.language as tl

from kakeya.kernels.gpu.device.pdl import wait_for_predecessor
from kakeya.kernels.gpu.device.sampling import (
    FAR_OFF,
    INFINITY,
    LAST_RANK,
    arrives_last,
    beta_of,
    limits_count,
    rank_of,
    ranked,
    reach_of,
)

_LOWEST = tl.constexpr(-1e38)
_UNIT = tl.constexpr(2.0**20)  # programs pass their sums on as integers, in units of 2**-20
_HALVINGS = tl.constexpr(16)  # steps of the bisection: to 30 / 2**16 temperatures


@triton.jit
def _best(logits, begin, end, vocab, beta, WEIGH: tl.constexpr, BLOCK: tl.constexpr):
    """The best rank, where NaN counts as infinity; if WEIGH, also the sum of weights over the best's."""
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -INFINITY, tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    masses = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        ids = start + lane
        x = tl.load(logits + ids, mask=ids < vocab, other=-INFINITY)
        x = tl.where(x != x, INFINITY, x)
        if WEIGH:
            before, new = _finite(top), tl.minimum(x, FAR_OFF)
            now = tl.maximum(before, new)
            masses = masses * _decay(now - before, beta) + _decay(now - new, beta)
        better = x > top
        top = tl.where(better, x, top)
        where = tl.where(better, ids, where)
    mass = tl.full([], 0.0, tl.float32)
    if WEIGH:
        peaks = _finite(top)
        mass = tl.sum(masses * _decay(tl.max(peaks, 0) - peaks, beta), 0)
    return tl.min(rank_of(top, where), 0), mass


@triton.jit
def _finite(x):
    return tl.minimum(tl.maximum(x, _LOWEST), FAR_OFF)


@triton.jit
def _decay(distance, beta):
    return tl.exp(-tl.minimum(distance, reach_of(beta)) * beta)


@triton.jit
def _estimate(sample, at, beta, COUNT: tl.constexpr):
    """Estimate the row's tokens up to a distance from a sample of them, and bound the error.

    The estimate is their count, or the negative weight of the tokens beyond: both grow with the distance. The
    weight beyond is known better, because none of those tokens weighs much. The bound is five standard
    deviations, and more for small counts.
    """
    distances, weights, each = sample
    if COUNT:
        largest = each
        amount = each * tl.sum((distances <= at).to(tl.float32), 0)
    else:
        largest = each * tl.exp(-at * beta)
        amount = -tl.sum(tl.where(distances >= at, weights, 0.0), 0)
    return amount, 5.0 * tl.sqrt(largest * tl.abs(amount)) + 16.0 * largest


@triton.jit
def _bisect(sample, beta, wanted, COUNT: tl.constexpr):
    """Two distances between which the true value passes `wanted`, by bisection."""
    near, far = beta * 0.0, reach_of(beta)
    near_end, far_begin = far, near
    for _ in range(_HALVINGS):
        middle = 0.5 * (near + near_end)
        amount, doubt = _estimate(sample, middle, beta, COUNT)
        short = amount + doubt <= wanted
        near, near_end = tl.where(short, middle, near), tl.where(short, near_end, middle)
        middle = 0.5 * (far_begin + far)
        amount, doubt = _estimate(sample, middle, beta, COUNT)
        passed = amount - doubt >= wanted
        far, far_begin = tl.where(passed, middle, far), tl.where(passed, far_begin, middle)
    return near, far


@triton.jit
def _bracket(logits, vocab, best, mass, beta, top_k, top_p, SAMPLE: tl.constexpr):
    """Two distances from the best between which the cutoff lies; near is FAR_OFF if all are kept."""
    ids = tl.arange(0, SAMPLE) * tl.maximum(vocab // SAMPLE, 1)
    distances = best - tl.load(logits + ids, mask=ids < vocab, other=-INFINITY)
    each = vocab / tl.sum((ids < vocab).to(tl.float32), 0)  # how many tokens one of the sample stands for
    sample = (distances, each * tl.exp(-distances * beta), each)
    near, far = beta * 0.0 + FAR_OFF, beta * 0.0
    if limits_count(top_k, vocab):
        near, far = _bisect(sample, beta, top_k.to(tl.float32), True)
        near = tl.where(top_p < 1.0, 0.0, near)  # top-p may end anywhere among the top k
    elif top_p < 1.0:
        near, far = _bisect(sample, beta, (top_p - 1.0) * mass, False)
    return near, far


@triton.jit(
    do_not_specialize=["share"],
    do_not_specialize_on_alignment=["slab_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "sampled_ptr"],
)
def find_best(
    logits_ptr, slab_ptr, temperature_ptr, top_k_ptr, top_p_ptr, newest_ptr, sampled_ptr,
    arrived_ptr, partials_ptr, brackets_ptr, row_stride, vocab, share,
    BLOCK: tl.constexpr, MAX_PROGRAMS: tl.constexpr, SAMPLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, n-th of the row): reads `share` blocks. Greedy and broken rows end here."""
    wait_for_predecessor(PDL)
    row, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slab = tl.load(slab_ptr + row)
    if slab < 0:
        return
    logits = logits_ptr + row * row_stride
    partials_ptr += row * MAX_PROGRAMS * 3
    brackets_ptr += row * 3
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    begin = program * share * BLOCK
    end = tl.minimum(begin + share * BLOCK, vocab)
    if (temperature > 0) & (top_p < 1.0):
        rank, mass = _best(logits, begin, end, vocab, beta_of(temperature), True, BLOCK // 2)
    else:
        rank, mass = _best(logits, begin, end, vocab, temperature, False, BLOCK)
    tl.store(partials_ptr + program * 3, rank)
    tl.store(partials_ptr + program * 3 + 1, (mass * _UNIT).to(tl.int64))
    if arrives_last(arrived_ptr + row * 2):
        at = tl.arange(0, MAX_PROGRAMS)
        real = at < tl.num_programs(1)
        ranks = tl.load(partials_ptr + at * 3, mask=real, other=LAST_RANK, volatile=True)
        masses = tl.load(partials_ptr + at * 3 + 1, mask=real, other=0, volatile=True)
        best, token = ranked(tl.min(ranks, 0))
        finite = (best > -INFINITY) & (best < INFINITY)
        if finite & (temperature > 0):
            peaks, _ = ranked(ranks)
            beta = beta_of(temperature)
            decay = _decay(best - tl.where(real, _finite(peaks), best), beta)
            mass = tl.sum(masses.to(tl.float32) / _UNIT * decay, 0)
            near, far = _bracket(logits, vocab, best, mass, beta, top_k, top_p, SAMPLE)
            tl.store(brackets_ptr, best)
            tl.store(brackets_ptr + 1, near)
            tl.store(brackets_ptr + 2, far)
        else:
            tl.store(brackets_ptr + 1, FAR_OFF)
            tl.store(brackets_ptr + 2, -1.0)  # nothing to draw
            tl.store(sampled_ptr + row, tl.where(finite, token, -1))
            tl.store(newest_ptr + slab, tl.where(finite, token, 0))
