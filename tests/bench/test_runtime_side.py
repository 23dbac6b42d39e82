"""Our side of `bench engine`, over the real default model."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.bench.cases import CHOICES, Case
from kakeya.bench.runtime_side import RuntimeSide, round_times
from kakeya.bench.text import prose
from kakeya.config import CacheConfig, EngineConfig
from kakeya.engine.stream import EventStream
from kakeya.runtime import Runtime
from kakeya.types import SamplingParams, TokenEvent, TruncatedEvent


@pytest.fixture(scope="module")
def runtime(default_model: Path) -> Iterator[Runtime]:
    config = EngineConfig(cache=CacheConfig(sink=4, window=64), capacity=4, threads=2)
    with Runtime.open(str(default_model), config) as runtime:
        yield runtime


@pytest.fixture
def side(runtime: Runtime) -> Iterator[RuntimeSide]:
    side = RuntimeSide(runtime, runtime.tokenizer.encode(prose()))
    yield side
    side.release()
    assert histories(runtime) == []


def histories(runtime: Runtime) -> list[int]:
    return [runtime.info(session.session_id).history_length for session in runtime.list_sessions()[0]]


def test_a_history_is_shared_by_its_cases_and_as_it_was(side: RuntimeSide, runtime: Runtime) -> None:
    assert len(side.text) >= 2_500, "prose is long enough for a verdict"
    for case in (Case(0, 1, 20, 2), Case(0, 3, 20, 2), Case(30)):
        side.prepare(case)
        for _ in range(2):
            assert side.measure(case) > 0
            assert histories(runtime) == [21]  # the history and the token that made the engine compute it


def test_speeds_fit_the_clock(side: RuntimeSide) -> None:
    for case, tokens in ((Case(0, 2, 70, 8), 16), (Case(100), 100)):
        side.prepare(case)
        began = time.perf_counter()
        speed = side.measure(case)
        assert tokens / speed < time.perf_counter() - began


def test_a_sampled_case_samples_with_a_seed_for_each_session(
    side: RuntimeSide, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SamplingParams | None] = []
    generate = runtime.generate

    def recording(session_id: str, max_tokens: int, sampling: SamplingParams | None = None) -> EventStream:
        asked.append(sampling)
        return generate(session_id, max_tokens, sampling)

    monkeypatch.setattr(runtime, "generate", recording)
    side.prepare(Case(0, 2, 8, 2, "top-p and penalty"))
    assert asked[0] is None  # the history
    assert asked[1:] == [replace(CHOICES["top-p and penalty"], seed=seed) for seed in (0, 1)]


def test_only_full_rounds_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams, one of which is a token ahead: a round counts when the slower one has delivered."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def stream(ready_at: list[float]) -> Iterator[TokenEvent | TruncatedEvent]:
        nonlocal now
        yield TruncatedEvent(3)
        for moment in ready_at:
            now = max(now, moment)
            yield TokenEvent(1)

    assert round_times([stream([1, 2, 3]), stream([2, 3, 4])], 3) == [2, 3, 4]
