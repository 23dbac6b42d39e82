"""What `bench gpu` measures, at which sizes: in full, or quickly with tiny shapes to see that it runs."""

from dataclasses import dataclass, field
from typing import Any

from kakeya.config import CacheConfig, EngineConfig
from kakeya.types import ShareBeginnings

LARGE, MIDDLE, SMALL = "qwen3-8b", "qwen3-0.6b", "smollm2-135m"


@dataclass(frozen=True)
class GpuPlan:
    """Shapes by name, and for each the numbers of sessions; histories, lengths and repetitions."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    sessions: int = 256
    prefill_block: int = 2048
    max_batch_tokens: int = 2304

    large: str = LARGE
    middle: str = MIDDLE
    small: str = SMALL

    large_rows: tuple[int, ...] = (1, 64, 256)
    middle_rows: tuple[int, ...] = (256,)
    small_rows: tuple[int, ...] = (1, 64, 256)
    position: int = 5000
    near: int = 2000
    far: int = 1_000_000
    history_rows_large: int = 64
    history_rows_small: int = 256
    prompt_rows: int = 2048
    exact_rows: int = 64
    repeats: int = 15

    kernel_calls: tuple[int, int] = (4, 64)
    """The fewest and the most calls of a kernel in one graph, each on data of its own."""
    kernel_call_seconds: float = 0.5
    """A kernel that takes longer is not repeated."""

    exact_prompt: int = 1200
    exact_cut: int = 700
    exact_others: int = 150
    exact_tokens: int = 8

    filled: int = 1100
    tokens_large: int = 256
    tokens_small: int = 1024
    runtime_repeats: int = 3

    peer_sessions: tuple[int, ...] = (1, 64)
    peer_prompt: int = 64
    peer_tokens: int = 128
    peer_repeats: int = 2

    parity_prompts: tuple[int, ...] = (16, 60, 300, 1100)
    parity_tokens: int = 64

    copy_bytes: int = 4 * 2**30
    product_size: int = 8192

    def engine_config(self, sessions: int, **settings: Any) -> EngineConfig:
        settings |= {"prefill_block": self.prefill_block, "max_batch_tokens": self.max_batch_tokens}
        # No two of its sessions begin alike, and the memory of the device is compared with what they take.
        settings["share_beginnings"] = ShareBeginnings.OFF
        return EngineConfig(cache=self.cache, capacity=sessions, **settings)

    @property
    def past_the_wrap(self) -> int:
        """Tokens of KV that a row reads once its window is full."""
        return self.cache.capacity


FULL = GpuPlan()
QUICK = GpuPlan(
    cache=CacheConfig(sink=4, window=24, spare=8),
    sessions=4,
    prefill_block=16,
    max_batch_tokens=64,
    large="tiny-qwen3",
    middle="tiny-llama",
    small="tiny-llama",
    large_rows=(1, 4),
    middle_rows=(2,),
    small_rows=(1, 4),
    position=100,
    near=50,
    far=1000,
    history_rows_large=2,
    history_rows_small=4,
    prompt_rows=16,
    exact_rows=4,
    repeats=3,
    kernel_calls=(1, 2),
    kernel_call_seconds=60.0,
    exact_prompt=40,
    exact_cut=21,
    exact_others=9,
    exact_tokens=3,
    filled=40,
    tokens_large=24,
    tokens_small=24,
    runtime_repeats=2,
    peer_sessions=(1, 2),
    peer_prompt=8,
    peer_tokens=8,
    peer_repeats=1,
    parity_prompts=(5, 40),
    parity_tokens=8,
    copy_bytes=2**20,
    product_size=64,
)
