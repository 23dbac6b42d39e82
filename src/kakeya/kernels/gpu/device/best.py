"""The first launch of a choice (see `choice`): a row's best, and where its filters are bound to end."""

import triton
import triton.language as tl

from kakeya.kernels.gpu.device.chain import follow
from kakeya.kernels.gpu.device.choice import (
    FAR_OFF,
    INFINITY,
    LAST_RANK,
    REACH,
    arrives_last,
    coldness_of,
    limits_count,
    rank_of,
    ranked,
)

_LOWEST = tl.constexpr(-1e38)
_UNIT = tl.constexpr(2.0**20)  # of a mass that is handed over as an integer
_HALVINGS = tl.constexpr(16)  # how closely a sample is searched: to REACH / 2**16 temperatures


@triton.jit
def _best(logits, begin, end, vocab, coldness, WEIGH: tl.constexpr, BLOCK: tl.constexpr):
    """The best rank, a NaN counting as infinity; how often the best's weight all weigh, if asked."""
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
            masses = masses * _faded(now - before, coldness) + _faded(now - new, coldness)
        better = x > top
        top = tl.where(better, x, top)
        where = tl.where(better, ids, where)
    mass = tl.full([], 0.0, tl.float32)
    if WEIGH:
        peaks = _finite(top)
        mass = tl.sum(masses * _faded(tl.max(peaks, 0) - peaks, coldness), 0)
    return tl.min(rank_of(top, where), 0), mass


@triton.jit
def _finite(x):
    return tl.minimum(tl.maximum(x, _LOWEST), FAR_OFF)


@triton.jit
def _faded(distance, coldness):
    return tl.exp(-tl.minimum(distance, REACH / coldness) * coldness)


@triton.jit
def _estimate(sample, at, coldness, COUNT: tl.constexpr):
    """What a sample says of the row's tokens up to a distance, and how far off that may be.

    Either their count, or what those beyond weigh, as a negative number: both grow with the distance. That
    of tokens beyond is the better known one, as none of them weighs much. Off by five standard deviations,
    and more for small counts.
    """
    distances, weights, each = sample
    if COUNT:
        largest = each
        amount = each * tl.sum((distances <= at).to(tl.float32), 0)
    else:
        largest = each * tl.exp(-at * coldness)
        amount = -tl.sum(tl.where(distances >= at, weights, 0.0), 0)
    return amount, 5.0 * tl.sqrt(largest * tl.abs(amount)) + 16.0 * largest


@triton.jit
def _bounds(sample, coldness, wanted, COUNT: tl.constexpr):
    """The distances between which the estimate is bound to pass `wanted`."""
    near, far = coldness * 0.0, REACH / coldness
    near_end, far_begin = far, near
    for _ in range(_HALVINGS):
        middle = 0.5 * (near + near_end)
        amount, doubt = _estimate(sample, middle, coldness, COUNT)
        short = amount + doubt <= wanted
        near, near_end = tl.where(short, middle, near), tl.where(short, near_end, middle)
        middle = 0.5 * (far_begin + far)
        amount, doubt = _estimate(sample, middle, coldness, COUNT)
        passed = amount - doubt >= wanted
        far, far_begin = tl.where(passed, middle, far), tl.where(passed, far_begin, middle)
    return near, far


@triton.jit
def _aim(logits, vocab, best, mass, coldness, top_k, top_p, SAMPLE: tl.constexpr):
    """The distances from the best between which the filters end; the nearer one FAR_OFF if they keep all."""
    ids = tl.arange(0, SAMPLE) * tl.maximum(vocab // SAMPLE, 1)
    distances = best - tl.load(logits + ids, mask=ids < vocab, other=-INFINITY)
    each = vocab / tl.sum((ids < vocab).to(tl.float32), 0)  # how many tokens one of the sample stands for
    sample = (distances, each * tl.exp(-distances * coldness), each)
    near, far = coldness * 0.0 + FAR_OFF, coldness * 0.0
    if limits_count(top_k, vocab):
        near, far = _bounds(sample, coldness, top_k.to(tl.float32), True)
        near = tl.where(top_p < 1.0, 0.0, near)  # top-p may end anywhere among the top k
    elif top_p < 1.0:
        near, far = _bounds(sample, coldness, (top_p - 1.0) * mass, False)
    return near, far


@triton.jit(
    do_not_specialize=["share"],
    do_not_specialize_on_alignment=["slab_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "chosen_ptr"],
)
def find_best(
    logits_ptr, slab_ptr, temperature_ptr, top_k_ptr, top_p_ptr, newest_ptr, chosen_ptr,
    arrived_ptr, parts_ptr, aims_ptr, row_stride, vocab, share,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, SAMPLE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row, part): `share` blocks of the row. Greedy rows end here, and those with no finite best."""
    follow(CHAINED)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slab = tl.load(slab_ptr + row)
    if slab < 0:
        return
    logits = logits_ptr + row * row_stride
    parts_ptr += row * PARTS * 3
    aims_ptr += row * 3
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    begin = part * share * BLOCK
    end = tl.minimum(begin + share * BLOCK, vocab)
    if (temperature > 0) & (top_p < 1.0):
        rank, mass = _best(logits, begin, end, vocab, coldness_of(temperature), True, BLOCK // 2)
    else:
        rank, mass = _best(logits, begin, end, vocab, temperature, False, BLOCK)
    tl.store(parts_ptr + part * 3, rank)
    tl.store(parts_ptr + part * 3 + 1, (mass * _UNIT).to(tl.int64))
    if arrives_last(arrived_ptr + row * 2):
        at = tl.arange(0, PARTS)
        real = at < tl.num_programs(1)
        ranks = tl.load(parts_ptr + at * 3, mask=real, other=LAST_RANK, volatile=True)
        masses = tl.load(parts_ptr + at * 3 + 1, mask=real, other=0, volatile=True)
        best, token = ranked(tl.min(ranks, 0))
        finite = (best > -INFINITY) & (best < INFINITY)
        if finite & (temperature > 0):
            peaks, _ = ranked(ranks)
            coldness = coldness_of(temperature)
            faded = _faded(best - tl.where(real, _finite(peaks), best), coldness)
            mass = tl.sum(masses.to(tl.float32) / _UNIT * faded, 0)
            near, far = _aim(logits, vocab, best, mass, coldness, top_k, top_p, SAMPLE)
            tl.store(aims_ptr, best)
            tl.store(aims_ptr + 1, near)
            tl.store(aims_ptr + 2, far)
        else:
            tl.store(aims_ptr + 1, FAR_OFF)
            tl.store(aims_ptr + 2, -1.0)  # nothing to draw
            tl.store(chosen_ptr + row, tl.where(finite, token, -1))
            tl.store(newest_ptr + slab, tl.where(finite, token, 0))
