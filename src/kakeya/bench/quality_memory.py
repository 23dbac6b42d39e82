"""The part `memory` of `bench quality`: one long text through one session for each way to remember."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from kakeya.bench.quality_memory_results import (
    FAR_TOKENS,
    STRETCH_TOKENS,
    Scored,
    Way,
    far_stretches,
    fresh_row,
    way_row,
)
from kakeya.bench.work import Work
from kakeya.config import CacheConfig, EngineConfig
from kakeya.errors import ConfigError
from kakeya.runtime import Runtime


@dataclass(frozen=True)
class MemoryBench:
    """How long a history, how much of it with full attention, and which windows.

    Full attention computes more for each token than for the one before, so it stops at `full_tokens`; that is
    beyond what the default model was trained for, so that one sees it leave what it knows.
    """

    history_tokens: int = 131_072
    full_tokens: int = 16_384
    sliding_window: int = 1024
    windows: tuple[int, ...] = (252, 508, 1020, 2044)
    far_tokens: int = FAR_TOKENS

    def __post_init__(self) -> None:
        for name in ("history_tokens", "full_tokens"):
            if getattr(self, name) < 2:
                raise ConfigError(f"{name} must be at least 2, got {getattr(self, name)}")
        for way in self.ways:
            cache_of(way)

    @property
    def ways(self) -> tuple[Way, ...]:
        return (
            Way(0, min(self.full_tokens, self.history_tokens), full=True),
            Way(0, self.sliding_window),
            *(Way(CacheConfig.sink, window) for window in self.windows),
        )

    @property
    def judged(self) -> Way:
        """Of the ways with sinks the one nearest to what a session has by default."""
        return nearest_to_default(self.windows)

    @property
    def work(self) -> int:
        """How many tokens will be computed."""
        stretches = len(far_stretches(self.history_tokens, self.far_tokens))
        afresh = stretches * (self.judged.window + STRETCH_TOKENS)
        return sum(self.tokens_of(way) for way in self.ways) + afresh

    def tokens_of(self, way: Way) -> int:
        return way.window if way.full else self.history_tokens


def nearest_to_default(windows: Sequence[int]) -> Way:
    """The window nearest to the default one, with the default sinks. Raises ConfigError for no window."""
    if not windows:
        raise ConfigError("windows must name at least one window")
    window = min(windows, key=lambda each: abs(each - CacheConfig.window))
    return Way(CacheConfig.sink, window)


def cache_of(way: Way) -> CacheConfig:
    """The engine's settings for a way. Raises ConfigError for what cannot be."""
    return CacheConfig(sink=way.sink, window=way.window)


def measure(
    model: str, config: EngineConfig, bench: MemoryBench, token_ids: Sequence[int], work: Work
) -> Iterator[dict[str, Any]]:
    """The results so far after each way, and at last with sessions begun afresh beside the judged one."""
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {"fresh": None}
    streamed = Scored(1, ())
    for way in bench.ways:
        work.begin(f"memory: {way.label}")
        with Runtime.open(model, replace(config, cache=cache_of(way), capacity=1)) as runtime:
            began = time.perf_counter()
            scored = Scored(1, surprises(runtime, token_ids[: bench.tokens_of(way)], work))
            seconds = time.perf_counter() - began
            rows.append(way_row(way, scored, seconds, runtime.describe().session_bytes))
            results |= {"ways": list(rows), "trained_tokens": runtime.model_config.max_positions}
        if way == bench.judged:
            streamed = scored
        yield dict(results)
    starts = far_stretches(bench.history_tokens, bench.far_tokens)
    if starts:
        work.begin(f"memory: the same text afresh, for {bench.judged.label}")
        afresh = _afresh(model, config, bench.judged.window, token_ids, starts, work)
        yield results | {"fresh": fresh_row(bench.judged, streamed, afresh)}


def _afresh(
    model: str,
    config: EngineConfig,
    before: int,
    token_ids: Sequence[int],
    starts: Sequence[int],
    work: Work,
) -> dict[int, list[float]]:
    """Each stretch in a session of its own that begins `before` tokens earlier and forgets nothing.

    Its later tokens see more than a window's worth, so the comparison errs against the long session.
    """
    cache = CacheConfig(sink=0, window=before + STRETCH_TOKENS)
    with Runtime.open(model, replace(config, cache=cache, capacity=1)) as runtime:
        return {
            start: surprises(runtime, token_ids[max(0, start - before) : start + STRETCH_TOKENS], work)[
                -STRETCH_TOKENS:
            ]
            for start in starts
        }


def surprises(runtime: Runtime, token_ids: Sequence[int], work: Work) -> list[float]:
    """How much each token but the first surprises the model, in nats, through one session."""
    start = runtime.tokenizer.encode("", bos=True)
    whole = [*start, *token_ids]
    following = torch.tensor(whole[1:], dtype=torch.int64)
    found: list[float] = []
    with closing(runtime.score_blocks(whole)) as blocks:
        for block in blocks:
            wanted = following[len(found) : len(found) + len(block)].to(block.device)
            rows = block[: len(wanted)].float()
            chosen = rows.gather(1, wanted[:, None])[:, 0]
            found += (rows.logsumexp(dim=-1) - chosen).tolist()
            work.advance(len(block))
    return found[len(start) :]
