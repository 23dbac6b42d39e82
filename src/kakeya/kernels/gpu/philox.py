"""The sampler's random numbers on a device: Philox4x64-10, bit for bit numpy's.

numpy counts before it draws, so the number for a position is the first word at counter position + 1. Signed
64-bit integers wrap like unsigned ones; only the high word of a multiplication and the last shift need care.
"""

import torch
from torch import Tensor

MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
INCREMENTS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10
_LOW = 0xFFFFFFFF


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """float64 in [0, 1) with 53 random bits, for seeds int64 and positions int32 of one shape."""
    zero = torch.zeros_like(seeds)
    a, b, c, d = positions.long() + 1, zero, zero, zero
    key_a, key_b = seeds, zero
    for _ in range(ROUNDS):
        high_a, low_a = _mulhilo(a, MULTIPLIERS[0])
        high_c, low_c = _mulhilo(c, MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ key_a, low_c, high_a ^ d ^ key_b, low_a
        key_a, key_b = key_a + _signed(INCREMENTS[0]), key_b + _signed(INCREMENTS[1])
    return _logical_shift(a, 11).double() * 2.0**-53


def _mulhilo(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of the 128-bit product x * factor, from 32-bit halves."""
    x_high, x_low = _logical_shift(x, 32), x & _LOW
    high, low = factor >> 32, factor & _LOW
    low_low = x_low * low
    middle = x_high * low + _logical_shift(low_low, 32)
    other = x_low * high + (middle & _LOW)
    return x_high * high + _logical_shift(middle, 32) + _logical_shift(other, 32), x * _signed(factor)


def _logical_shift(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
