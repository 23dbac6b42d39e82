"""Settings: a bad value is named, with what would be right."""

import math
from dataclasses import asdict, replace

import pytest

from kakeya.config import CacheConfig, EngineConfig, Quotas, RuntimeConfig
from kakeya.errors import ConfigError
from kakeya.types import BackendChoice


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window must be a whole number from 1"),
        ({"window": -5}, "window"),
        ({"window": 2**40}, "window"),
        ({"window": 1.5}, "window"),
        ({"window": True}, "window"),
        ({"sink": -1}, "sink must be a whole number from 0"),
        ({"spare": -1}, "spare"),
    ],
)
def test_the_cache_names_what_is_wrong(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**change)


@pytest.mark.parametrize("name", ["capacity", "threads", "prefill_block", "max_batch_tokens", "max_waiting"])
@pytest.mark.parametrize("value", [0, -1, 2**40, "4"])
@pytest.mark.parametrize("backend", BackendChoice)
def test_the_engine_names_what_is_wrong(name: str, value: int, backend: BackendChoice) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a whole number"):
        EngineConfig(backend=backend, **{name: value})


@pytest.mark.parametrize("name", ["backend", "numerics", "dtype", "weights", "kernels", "share_beginnings"])
def test_the_engine_takes_no_words_for_choices(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be one of \w+\.[A-Z0-9_]+, .*, got 'float32'"):
        EngineConfig(**{name: "float32"})


def test_a_budget_must_hold_a_block() -> None:
    with pytest.raises(ConfigError, match="max_batch_tokens must be at least prefill_block, 128, got 64"):
        EngineConfig(max_batch_tokens=64)
    with pytest.raises(ConfigError, match="max_batch_tokens must be at least prefill_block, 512, got 256"):
        EngineConfig(prefill_block=512)


@pytest.mark.parametrize(
    ("backend", "block", "step"),
    [
        (BackendChoice.AUTO, 128, 256),
        (BackendChoice.CPU, 128, 256),
        (BackendChoice.CUDA, 2048, 2560),
    ],
)
def test_what_nobody_asked_for_follows_the_backend(backend: BackendChoice, block: int, step: int) -> None:
    config = EngineConfig(backend=backend, capacity=300)
    assert (config.prefill_block, config.max_batch_tokens) == (None, None)
    assert (config.block_tokens, config.step_tokens) == (block, step)
    complete = config.resolved()
    assert (complete.prefill_block, complete.max_batch_tokens) == (block, step)
    assert complete.resolved() == complete
    unknown = {name for name, value in asdict(complete).items() if value is None}
    assert unknown == {"prefix_cache_bytes"}  # a part of what the slabs of a model take


def test_blocks_that_cannot_be_cut_are_small_where_stalls_are_limited() -> None:
    config = EngineConfig(capacity=2)
    assert config.cut_by(any_cut=True) == config
    assert config.cut_by(any_cut=False).block_tokens == 32
    for change in ({"max_stall_ms": 0}, {"prefill_block": 128}, {"capacity": 1}):
        assert replace(config, **change).cut_by(any_cut=False).block_tokens == 128


def test_slots_are_sink_window_and_spare() -> None:
    cache = CacheConfig(sink=4, window=100, spare=7)
    assert (cache.capacity, cache.slots) == (104, 111)


@pytest.mark.parametrize("name", ["max_sessions", "max_concurrent_requests", "tokens_per_minute"])
@pytest.mark.parametrize("value", [0, -1, 2**40, 1.5, True])
def test_quotas_name_what_is_wrong(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a whole number from 1"):
        Quotas(**{name: value})
    assert getattr(Quotas(**{name: 1}), name) == 1
    assert getattr(Quotas(), name) is None


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "1800", True])
def test_an_idle_time_must_be_one(value: float) -> None:
    with pytest.raises(ConfigError, match="session_idle_ttl_s must be a number of seconds above 0"):
        RuntimeConfig(session_idle_ttl_s=value)
    assert RuntimeConfig(session_idle_ttl_s=None).session_idle_ttl_s is None
    assert RuntimeConfig().session_idle_ttl_s == 1800


@pytest.mark.parametrize("name", ["remembered_requests", "remembered_events"])
def test_the_memory_of_requests_must_hold_something(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a whole number from 1"):
        RuntimeConfig(**{name: 0})
