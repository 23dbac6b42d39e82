"""Rotary position angles: the plain ones and the scaled variants that can be bounded.

Pairs follow the half-split convention: dimension i turns with dimension i + head_dim / 2. A head that is
rotated in part, or not at all, has pairs of frequency 0: they never turn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kakeya.errors import CorruptCheckpoint

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: a ramp over the dimensions from kept to divided; cos and sin grow by `attention_factor`."""

    factor: float
    original_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class DivisorScaling:
    """Each frequency divided by its own number, as GGUF files spell out Llama 3's scaling.

    A pair divided by infinity never turns.
    """

    divisors: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE: one set of divisors for contexts up to the original length, another for longer ones.

    Keys are stored rotated, so a session cannot switch between the two. `RopeConfig.within` chooses once, by
    the longest context that the cache can show.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_positions: int
    attention_factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | DivisorScaling | LongRopeScaling


@dataclass(frozen=True)
class RopeConfig:
    """One layer's rotary embedding. Hashable, so that layers which share it share its tables."""

    theta: float
    head_dim: int
    scaling: RopeScaling | None = None
    rotated: int | None = None  # how many of a head's dimensions turn, the first ones; None: all

    def __post_init__(self) -> None:
        if not self.theta > 1:
            raise CorruptCheckpoint(f"rope theta must be greater than 1, got {self.theta}")
        if self.rotated is not None and (self.rotated % 2 or not 0 <= self.rotated <= self.head_dim):
            raise CorruptCheckpoint(
                f"rotary dimensions must be even and at most {self.head_dim}, got {self.rotated}"
            )
        match self.scaling:
            case DivisorScaling(divisors=divisors):
                self._check_divisors(divisors)
            case LongRopeScaling(short=short, long=long):
                self._check_divisors(short)
                self._check_divisors(long)
            case LinearScaling(factor=factor) | Llama3Scaling(factor=factor) | YarnScaling(factor=factor):
                if not factor > 0:
                    raise CorruptCheckpoint(f"rope scaling factor must be positive, got {factor}")
        if (
            isinstance(self.scaling, Llama3Scaling)
            and self.scaling.high_freq_factor <= self.scaling.low_freq_factor
        ):
            raise CorruptCheckpoint("rope scaling llama3 needs high_freq_factor greater than low_freq_factor")

    def _check_divisors(self, divisors: tuple[float, ...]) -> None:
        if len(divisors) != self.rotary_dim // 2 or not all(divisor > 0 for divisor in divisors):
            raise CorruptCheckpoint(f"rope divisors must be {self.rotary_dim // 2} positive numbers")

    @classmethod
    def unrotated(cls, head_dim: int) -> "RopeConfig":
        """The rope of a layer without positions. Its theta is never used."""
        return cls(10_000.0, head_dim, rotated=0)

    @property
    def rotary_dim(self) -> int:
        return self.head_dim if self.rotated is None else self.rotated

    @property
    def attention_factor(self) -> float:
        """What cos and sin of rotated pairs are multiplied by."""
        match self.scaling:
            case YarnScaling(attention_factor=factor) | DivisorScaling(attention_factor=factor):
                return factor
            case LongRopeScaling(attention_factor=factor):
                return factor
        return 1.0

    def within(self, capacity: int) -> "RopeConfig":
        """The rope for a cache of `capacity` positions, sinks and window together."""
        if not isinstance(self.scaling, LongRopeScaling):
            return self
        long = capacity > self.scaling.original_positions
        divisors = self.scaling.long if long else self.scaling.short
        return replace(self, scaling=DivisorScaling(divisors, self.scaling.attention_factor))

    def paired_order(self) -> list[int] | None:
        """The order of a head's dimensions that puts the pairs (i, i + rotary_dim / 2) of a head rotated in
        part where the pairs of a whole head lie; None where they lie there already."""
        if self.rotary_dim in (0, self.head_dim):
            return None
        half, rest = self.rotary_dim // 2, (self.head_dim - self.rotary_dim) // 2
        turning, still = list(range(self.rotary_dim)), list(range(self.rotary_dim, self.head_dim))
        return turning[:half] + still[:rest] + turning[half:] + still[rest:]


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """The growth of cos and sin that YaRN recommends for a stretch by `factor`."""

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return grown(mscale) / grown(mscale_all_dim)
    return grown(1.0)


def rope_tables(rope: RopeConfig, positions: Sequence[int] | npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """cos and sin for each position, float32 [n, head_dim / 2] each, the attention factor folded in.

    Angles are float64 until the last moment, and a row's bits depend on its own position alone.
    """
    frequencies = inverse_frequencies(rope)
    angles = np.multiply.outer(np.asarray(positions, dtype=np.float64), frequencies)
    growth = np.where(frequencies == 0, 1.0, rope.attention_factor)
    cos = (np.cos(angles) * growth).astype(np.float32)
    sin = (np.sin(angles) * growth).astype(np.float32)
    return torch.from_numpy(cos), torch.from_numpy(sin)


@lru_cache(maxsize=64)
def inverse_frequencies(rope: RopeConfig) -> Float64Array:
    """Radians per position for each pair of dimensions, float64 [head_dim / 2]. Read-only."""
    frequencies = np.zeros(rope.head_dim // 2)
    turning = rope.rotary_dim // 2
    if turning:
        plain = rope.theta ** -(np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim)
        frequencies[:turning] = _scaled(plain, rope)
    frequencies.flags.writeable = False
    return frequencies


def _scaled(plain: Float64Array, rope: RopeConfig) -> Float64Array:
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor=factor):
            return plain / factor
        case DivisorScaling(divisors=divisors):
            return plain / np.asarray(divisors, dtype=np.float64)
        case Llama3Scaling() as llama3:
            return _llama3(plain, llama3)
        case YarnScaling() as yarn:
            return _yarn(plain, yarn, rope)
        case LongRopeScaling():
            raise AssertionError("which of LongRoPE's frequencies depends on the cache: use `within` first")


def _llama3(plain: Float64Array, scaling: Llama3Scaling) -> Float64Array:
    turns = scaling.original_positions * plain / (2 * math.pi)  # full turns within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * plain + (1 - kept) * plain / scaling.factor


def _yarn(plain: Float64Array, scaling: YarnScaling, rope: RopeConfig) -> Float64Array:
    def dimension_with(turns: float) -> float:
        ratio = math.log(scaling.original_positions / (turns * 2 * math.pi))
        return rope.rotary_dim * ratio / (2 * math.log(rope.theta))

    low, high = dimension_with(scaling.beta_fast), dimension_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp; the quotient below stays finite
    divided: Float64Array = np.clip((np.arange(len(plain)) - low) / (high - low), 0.0, 1.0)
    return divided * plain / scaling.factor + (1 - divided) * plain
