"""The choice of a token, one program a row: the best, or one drawn from what the filters leave.

Every filter keeps a beginning of the same ranking (higher logit first, of equal ones the lower id), so what
is left is said by two numbers: the least logit that may be kept, as an integer of the same order, and the
last id that may be kept at just that logit. The row is walked in blocks, and never written.
"""

import triton
import triton.language as tl

from kakeya.kernels.gpu import philox

_MULTIPLIER_A = tl.constexpr(philox.MULTIPLIERS[0])
_MULTIPLIER_B = tl.constexpr(philox.MULTIPLIERS[1])
_INCREMENT_A = tl.constexpr(philox.INCREMENTS[0])
_INCREMENT_B = tl.constexpr(philox.INCREMENTS[1])
_ROUNDS = tl.constexpr(philox.ROUNDS)
_UNIT = tl.constexpr(2.0**-53)
_JUST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-53)

_INFINITY = tl.constexpr(float("inf"))
_ANY_ID = tl.constexpr(2**31 - 1)
_LOWEST_KEY = tl.constexpr(-(2**31))
_DIGIT_BITS = tl.constexpr(3)
_DIGITS = tl.constexpr(11)  # of 3 bits: 32 bits and one to spare
_PIVOTS = tl.constexpr(8)


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
def _best(logits, vocab, BLOCK: tl.constexpr):
    """The greatest logit and the lowest id that has it; a NaN counts as infinity."""
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -_INFINITY, tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + lane
        x = tl.load(logits + ids, mask=ids < vocab, other=-_INFINITY)
        x = tl.where(x != x, _INFINITY, x)
        better = x > top
        top = tl.where(better, x, top)
        where = tl.where(better, ids, where)
    best = tl.max(top, 0)
    return best, tl.min(tl.where(top == best, where, _ANY_ID), 0)


@triton.jit
def _key(x):
    """An integer of the same order; both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _candidates(logits, ids, vocab, least, last_tie, best, temperature):
    """The keys of some ids, and their weights: those that are not kept have none."""
    x = tl.load(logits + ids, mask=ids < vocab, other=-_INFINITY)
    key = _key(x)
    kept = (ids < vocab) & ((key > least) | ((key == least) & (ids <= last_tie)))
    return key, kept, tl.where(kept, tl.exp((x - best) / temperature), 0.0)


@triton.jit
def _measure(kept, weight, COUNT: tl.constexpr):
    return tl.where(kept, 1.0, 0.0) if COUNT else weight


@triton.jit
def _total(logits, vocab, least, last_tie, best, temperature, BLOCK: tl.constexpr):
    """What all candidates weigh, added up lane by lane as `_least_key` does it."""
    totals = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        _, _, weight = _candidates(logits, ids, vocab, least, last_tie, best, temperature)
        totals += weight
    return tl.sum(totals, 0)


@triton.jit
def _least_key(
    logits, vocab, least, last_tie, best, temperature, target, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """The greatest key such that the candidates from there up measure `target`, found digit by digit."""
    key_base = tl.full([], _LOWEST_KEY, tl.int32)
    for digit in range(_DIGITS):
        shift = tl.maximum(32 - _DIGIT_BITS * (digit + 1), 0)
        pivots = key_base + (tl.arange(0, _PIVOTS) << shift)
        sums = tl.zeros([_PIVOTS, BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            key, kept, weight = _candidates(logits, ids, vocab, least, last_tie, best, temperature)
            measure = _measure(kept, weight, COUNT)
            sums += tl.where(key[None, :] >= pivots[:, None], measure[None, :], 0.0)
        # All candidates reach the target, whatever the rounding says.
        reached = (tl.sum(sums, 1) >= target) | (tl.arange(0, _PIVOTS) == 0)
        key_base += (tl.sum(reached.to(tl.int32), 0) - 1) << shift
    return key_base


@triton.jit
def _last_tie(
    logits, vocab, least, old_least, old_last_tie, best, temperature, target,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last id to keep of those with the key `least`: with all above, just enough to reach `target`."""
    above = tl.zeros([BLOCK], tl.float32)
    ties = tl.zeros([BLOCK], tl.int32)
    share = tl.zeros([BLOCK], tl.float32)  # of a single tie
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        key, kept, weight = _candidates(logits, ids, vocab, old_least, old_last_tie, best, temperature)
        measure = _measure(kept, weight, COUNT)
        above += tl.where(key > least, measure, 0.0)
        tied = kept & (key == least)
        ties += tied.to(tl.int32)
        share = tl.where(tied, measure, share)
    missing = (target - tl.sum(above, 0)) / tl.maximum(tl.max(share, 0), 1e-38)
    needed = tl.maximum(tl.ceil(tl.minimum(missing, 1e9)), 1.0).to(tl.int32)
    result = tl.full([], _ANY_ID, tl.int32)
    if tl.sum(ties, 0) > needed:
        passed = tl.full([], 0, tl.int32)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            key, kept, _ = _candidates(logits, ids, vocab, old_least, old_last_tie, best, temperature)
            tied = (kept & (key == least)).to(tl.int32)
            rank = passed + tl.cumsum(tied, 0)
            result = tl.minimum(result, tl.min(tl.where((tied == 1) & (rank == needed), ids, _ANY_ID), 0))
            passed += tl.sum(tied, 0)
    return result


@triton.jit
def _draw(logits, vocab, least, last_tie, best, temperature, number, BLOCK: tl.constexpr):
    """The first id, counting up, whose running total passes `number` of the whole."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        _, _, weight = _candidates(logits, ids, vocab, least, last_tie, best, temperature)
        total += tl.sum(weight.to(tl.float64), 0)
    # Kept below the total, whatever the rounding, so that one block is sure to pass it.
    target = tl.minimum(number * total, total * _JUST_BELOW_ONE)
    running = tl.full([], 0.0, tl.float64)
    token = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        _, _, weight = _candidates(logits, ids, vocab, least, last_tie, best, temperature)
        after = running + tl.sum(weight.to(tl.float64), 0)
        if (running <= target) & (after > target):
            totals = running + tl.cumsum(weight.to(tl.float64), 0)
            first = tl.min(tl.where((totals > target) & (weight > 0), ids, _ANY_ID), 0)
            # The block as a whole passes, its last element by another rounding may not.
            heaviest = tl.max(tl.where(weight > 0, ids, 0), 0)
            token = tl.minimum(first, heaviest)
        running = after
    return token


@triton.jit
def _sample(
    logits, vocab, best, temperature, top_k, top_p, min_p, number, BLOCK: tl.constexpr, NARROW: tl.constexpr
):
    """Top-k, of these top-p, of these min-p, and one of what remains."""
    least = tl.full([], _LOWEST_KEY, tl.int32)
    last_tie = tl.full([], _ANY_ID, tl.int32)
    if (top_k > 0) & (top_k < vocab):
        wanted = top_k.to(tl.float32)
        key = _least_key(logits, vocab, least, last_tie, best, temperature, wanted, True, NARROW)
        last_tie = _last_tie(logits, vocab, key, least, last_tie, best, temperature, wanted, True, NARROW)
        least = key
    if top_p < 1.0:
        wanted = top_p * _total(logits, vocab, least, last_tie, best, temperature, NARROW)
        key = _least_key(logits, vocab, least, last_tie, best, temperature, wanted, False, NARROW)
        tie = _last_tie(logits, vocab, key, least, last_tie, best, temperature, wanted, False, NARROW)
        last_tie = tl.where(key == least, tl.minimum(tie, last_tie), tie)
        least = key
    if min_p > 0.0:
        # The least logit whose score reaches log(min_p), to a rounding.
        key = _key(best + temperature * tl.log(min_p))
        last_tie = tl.where(key > least, _ANY_ID, last_tie)
        least = tl.maximum(key, least)
    return _draw(logits, vocab, least, last_tie, best, temperature, number, BLOCK)


@triton.jit(
    do_not_specialize_on_alignment=[
        "slab_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "position_ptr",
        "chosen_ptr",
    ]
)  # fmt: skip
def choose(
    logits_ptr, slab_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr,
    newest_ptr, chosen_ptr, row_stride, vocab, BLOCK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Program (row). Greedy rows take one walk. NARROW: the block of walks that keep many sums."""
    row = tl.program_id(0)
    slab = tl.load(slab_ptr + row)
    if slab < 0:
        return
    logits = logits_ptr + row.to(tl.int64) * row_stride
    best, token = _best(logits, vocab, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    finite = (best > -_INFINITY) & (best < _INFINITY)
    if finite & (temperature > 0):
        number = uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        token = _sample(logits, vocab, best, temperature, top_k, top_p, min_p, number, BLOCK, NARROW)
    tl.store(chosen_ptr + row, tl.where(finite, token, -1))
    tl.store(newest_ptr + slab, tl.where(finite, token, 0))
