"""Streams of a runtime: only tokens count, and what was opened is closed again."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kakeya.bench.streams import all_arrivals, arrivals, gaps, session, streaming, tokens_of
from kakeya.errors import SessionNotFound
from kakeya.options import EngineOptions
from kakeya.runtime import Runtime
from kakeya.types import TokenEvent, TruncatedEvent


@pytest.fixture(scope="module")
def runtime(tiny: dict[str, Any]) -> Iterator[Runtime]:
    with Runtime.open(tiny["model"], EngineOptions(**tiny).engine_config(capacity=3)) as runtime:
        yield runtime


def test_nothing_but_tokens_counts() -> None:
    """Neither the news of a truncation nor an end is a token that somebody waited for."""
    events = [TokenEvent(7), TruncatedEvent(3), TokenEvent(9), object()]
    assert tokens_of(events) == [7, 9]
    times = arrivals(iter(events))
    assert len(times) == 2
    assert gaps(times) == [times[1] - times[0]]
    assert gaps(times[:1]) == []


def test_every_stream_has_a_reader_of_its_own(runtime: Runtime) -> None:
    with session(runtime, [5, 6]) as one, session(runtime, [7]) as other:
        times = all_arrivals([runtime.generate(one, 3), runtime.generate(other, 2)])
    assert [len(each) for each in times] == [3, 2]
    with pytest.raises(SessionNotFound):
        runtime.info(one)
    with session(runtime) as empty:
        assert runtime.info(empty).history_length == 0


def test_streams_go_on_until_they_are_left(runtime: Runtime) -> None:
    began = time.perf_counter()
    with streaming(runtime, [[2, 3], [4]]) as between:
        while min(each.history_length for each in runtime.list_sessions()[0]) < 6:
            time.sleep(0.01)
        middle = time.perf_counter()
    ended = time.perf_counter()
    before, after = between(began, middle), between(middle, ended)
    assert len(before) >= 4
    assert sorted(before + after) == sorted(between(began, ended))
    assert sum(before + after) <= 2 * (ended - began)
    assert between(ended, ended + 1) == []
    assert runtime.list_sessions()[0] == []


def test_streams_end_also_when_what_they_stand_beside_breaks(runtime: Runtime) -> None:
    with pytest.raises(ValueError, match="broken"), streaming(runtime, [[2, 3]]):
        raise ValueError("broken")
    assert runtime.list_sessions()[0] == []
