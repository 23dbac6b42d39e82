"""Sessions with recall in a state directory: what a turn sees again is there after a crash, and exact."""

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.config import CacheConfig, RuntimeConfig, StateConfig
from kakeya.engine import recall as recall_module
from kakeya.errors import InvalidArgument, StorageFailed
from kakeya.runtime import Runtime
from kakeya.storage.files import Files
from kakeya.types import DoneEvent, Numerics, SamplingParams, TokenEvent, TokenRange
from support import tiny
from support.crashes import Crashed
from support.tiny import answer, new_session

Open = Callable[..., Runtime]
SEEDED = SamplingParams(temperature=1.0, seed=7)
CACHE = CacheConfig(sink=2, window=8, spare=4, recall=6)
CONFIG = tiny.engine_config(threads=1, capacity=2, numerics=Numerics.EXACT, cache=CACHE)
TEXT = [7 + n * 3 % 40 for n in range(60)]


@pytest.fixture(autouse=True)
def short_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of a few tokens recall before their last ones."""
    monkeypatch.setattr(recall_module, "TAIL", 4)


def kept(directory: Path, **changes: object) -> RuntimeConfig:
    return RuntimeConfig(session_idle_ttl_s=None, state=replace(StateConfig(directory), **changes))


def said(runtime: Runtime, session: str, count: int, **options: object) -> list[int]:
    events = answer(runtime, session, count, sampling=SEEDED, **options)
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


def talked(runtime: Runtime) -> str:
    """A session whose window has moved on, with a new message."""
    session = new_session(runtime, TEXT, recall_tokens=6)
    said(runtime, session, 3)
    runtime.append(session, [5, 6, 7])
    return session


def test_ranges_that_cannot_be_stored_are_taken_back(
    open_tiny: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = open_tiny(CONFIG, settings=kept(tmp_path))
    session = talked(runtime)
    runtime.recall(session, [TokenRange(10, 12)], remember=True)
    commit = Files.commit

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(Files, "commit", full)
    for remember in (False, True):
        with pytest.raises(StorageFailed, match="the disk is full"):
            runtime.recall(session, [TokenRange(20, 23)], remember=remember)
    monkeypatch.setattr(Files, "commit", commit)
    assert runtime.info(session).remembered == (TokenRange(10, 12),)
    last = answer(runtime, session, 2)[-1]
    assert isinstance(last, DoneEvent)
    assert last.recalled == (TokenRange(10, 12),)


def test_a_repeat_after_a_crash_names_nothing_twice(
    open_tiny: Open, tmp_path: Path, crashed: Crashed
) -> None:
    first = open_tiny(CONFIG, settings=kept(tmp_path / "a"))
    session = talked(first)
    named = first.recall(session, [TokenRange(20, 23)], request_id="r")
    assert first.recall(session, [TokenRange(10, 12)], remember=True) == (*named, TokenRange(10, 12))[::-1]
    second = open_tiny(CONFIG, settings=kept(crashed(tmp_path / "a", tmp_path / "b")))
    assert second.recall(session, [TokenRange(20, 23)], request_id="r") == named == (TokenRange(20, 23),)
    second.close_session(session)
    with pytest.raises(InvalidArgument, match="no slots"):
        second.recall(new_session(second), [TokenRange(0, 1)], request_id="r")
