"""Rotary position angles: the plain ones and the scaled variants that can be bounded.

Pairs follow the half-split convention: dimension i turns with dimension i + head_dim / 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
    """Each frequency divided by its own number, as GGUF files spell out Llama 3's scaling."""

    divisors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | DivisorScaling


@dataclass(frozen=True)
class RopeConfig:
    """One layer's rotary embedding. Hashable, so that layers which share it share its tables."""

    theta: float
    head_dim: int
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if not self.theta > 1:
            raise CorruptCheckpoint(f"rope theta must be greater than 1, got {self.theta}")
        match self.scaling:
            case DivisorScaling(divisors=divisors):
                self._check_divisors(divisors)
            case LinearScaling(factor=factor) | Llama3Scaling(factor=factor) | YarnScaling(factor=factor):
                if not factor > 0:
                    raise CorruptCheckpoint(f"rope scaling factor must be positive, got {factor}")
        if (
            isinstance(self.scaling, Llama3Scaling)
            and self.scaling.high_freq_factor <= self.scaling.low_freq_factor
        ):
            raise CorruptCheckpoint("rope scaling llama3 needs high_freq_factor greater than low_freq_factor")

    def _check_divisors(self, divisors: tuple[float, ...]) -> None:
        if len(divisors) != self.head_dim // 2 or not all(divisor > 0 for divisor in divisors):
            raise CorruptCheckpoint(f"rope divisors must be {self.head_dim // 2} positive numbers")


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
    """cos and sin for each position, float32 [n, head_dim / 2] each, yarn's attention factor folded in.

    Angles are float64 until the last moment, and a row's bits depend on its own position alone.
    """
    angles = np.multiply.outer(np.asarray(positions, dtype=np.float64), inverse_frequencies(rope))
    factor = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    cos = (np.cos(angles) * factor).astype(np.float32)
    sin = (np.sin(angles) * factor).astype(np.float32)
    return torch.from_numpy(cos), torch.from_numpy(sin)


@lru_cache(maxsize=64)
def inverse_frequencies(rope: RopeConfig) -> Float64Array:
    """Radians per position for each pair of dimensions, float64 [head_dim / 2]. Read-only."""
    plain = rope.theta ** -(np.arange(0, rope.head_dim, 2, dtype=np.float64) / rope.head_dim)
    frequencies = _scaled(plain, rope)
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


def _llama3(plain: Float64Array, scaling: Llama3Scaling) -> Float64Array:
    turns = scaling.original_positions * plain / (2 * math.pi)  # full turns within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * plain + (1 - kept) * plain / scaling.factor


def _yarn(plain: Float64Array, scaling: YarnScaling, rope: RopeConfig) -> Float64Array:
    def dimension_with(turns: float) -> float:
        ratio = math.log(scaling.original_positions / (turns * 2 * math.pi))
        return rope.head_dim * ratio / (2 * math.log(rope.theta))

    low, high = dimension_with(scaling.beta_fast), dimension_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp; the quotient below stays finite
    divided: Float64Array = np.clip((np.arange(len(plain)) - low) / (high - low), 0.0, 1.0)
    return divided * plain / scaling.factor + (1 - divided) * plain
