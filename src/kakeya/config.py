"""Frozen settings. Complete at construction; a bad value is named with what would be right."""

import os
from dataclasses import dataclass, field

from kakeya.errors import ConfigError
from kakeya.types import DType, KernelChoice, Numerics, WeightFormat

DEFAULT_MODEL = "smollm2-135m-instruct"


def _positive(name: str, value: object, least: int = 1, most: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, got {value!r}")


@dataclass(frozen=True)
class CacheConfig:
    """The bounded cache: `sink` first tokens kept for ever, `window` most recent ones,
    `spare` ring slots for tokens that are written but not committed."""

    sink: int = 4
    window: int = 1024
    spare: int = 16

    def __post_init__(self) -> None:
        _positive("sink", self.sink, least=0, most=2**24)
        _positive("window", self.window, most=2**24)
        _positive("spare", self.spare, least=0, most=2**16)

    @property
    def capacity(self) -> int:
        """C: how many tokens a session remembers."""
        return self.sink + self.window

    @property
    def slots(self) -> int:
        """Slots a slab holds, the spare ones included."""
        return self.capacity + self.spare


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs: numerics, batching and queues."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    capacity: int = 1
    numerics: Numerics = Numerics.FAST
    dtype: DType = DType.BFLOAT16
    weights: WeightFormat = WeightFormat.AUTO
    kernels: KernelChoice = KernelChoice.AUTO
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    prefill_block: int = 128
    max_batch_tokens: int = 256
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        _positive("capacity", self.capacity, most=2**20)
        _positive("threads", self.threads, most=1024)
        _positive("prefill_block", self.prefill_block, most=2**16)
        _positive("max_batch_tokens", self.max_batch_tokens, most=2**20)
        _positive("max_waiting", self.max_waiting)
        if self.max_batch_tokens < self.prefill_block:
            raise ConfigError(
                f"max_batch_tokens must be at least prefill_block, {self.prefill_block}, "
                f"got {self.max_batch_tokens}"
            )
