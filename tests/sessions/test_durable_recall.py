"""Sessions with recall in a state directory: what a turn sees again is there after a crash, and exact."""

import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.config import CacheConfig, RuntimeConfig, StateConfig
from kakeya.engine import recall as recall_module
from kakeya.errors import InvalidArgument, StorageFailed
from kakeya.recall.index import RecallIndex
from kakeya.runtime import Runtime
from kakeya.sessions.remembering import Remembering
from kakeya.storage.files import Files
from kakeya.types import DoneEvent, Numerics, SamplingParams, StopReason, TokenEvent, TokenRange
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


def test_a_session_that_recalls_is_closed_while_it_generates(open_tiny: Open, tmp_path: Path) -> None:
    """What its turn brought back is not written any more: there is no history that it could belong to."""
    runtime = open_tiny(CONFIG, settings=kept(tmp_path))
    session = talked(runtime)
    stream = runtime.generate(session, 40, SEEDED)
    for _ in range(3):
        stream.next_event()
    runtime.close_session(session)
    last = list(stream)[-1]
    assert isinstance(last, DoneEvent)
    assert last.stop_reason is StopReason.CANCELLED


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


@pytest.mark.parametrize("host_bytes", [0, 2**30])
def test_a_sleeper_in_host_memory_keeps_its_index(
    open_tiny: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_bytes: int
) -> None:
    config = replace(CONFIG, capacity=1)
    runtime = open_tiny(config, settings=kept(tmp_path, host_tier_bytes=host_bytes))
    told: list[int] = []
    tell = Remembering._tell

    def counted(it: Remembering, index: RecallIndex, token_ids: Sequence[int]) -> None:
        told.append(len(token_ids))
        tell(it, index, token_ids)

    monkeypatch.setattr(Remembering, "_tell", counted)
    first, second = (talked(runtime) for _ in range(2))
    told.clear()
    for _ in range(3):
        for session in (first, second):
            said(runtime, session, 2)
            runtime.append(session, [9])
    if host_bytes:
        assert told == [6, 6, 3, 3, 3, 3]  # what each said and was told since its last turn
        tiers = runtime.tiers()
        assert tiers is not None
        asleep = runtime._store.get(first, "local").asleep
        assert asleep is not None
        assert asleep.retriever is not None
        assert asleep.retriever.nbytes > 0
        assert tiers.host_bytes == asleep.bytes_beside + asleep.state.storage.nbytes
        assert asleep.bytes_beside >= asleep.retriever.nbytes
    else:
        assert min(told) > 60


# After a crash.


def play(runtime: Runtime, session: str, turns: range) -> list[int]:
    """Turns that see parts of the past that were named, or remembered, or found."""
    all_said = []
    for turn in turns:
        if turn % 3 == 1:
            runtime.recall(session, [TokenRange(10 + turn, 13 + turn)])
        if turn == 3:
            runtime.recall(session, [TokenRange(30, 32)], remember=True)
        all_said += said(runtime, session, 5 + turn % 4)
        runtime.append(session, [5 + turn, 6, 7][: 1 + turn % 3])
    return all_said


@pytest.mark.parametrize("period", [6, 10**6])
@pytest.mark.parametrize("damage", [False, True])
def test_a_session_goes_on_exactly_after_a_crash(
    open_tiny: Open, tmp_path: Path, crashed: Crashed, period: int, damage: bool
) -> None:
    """From its last snapshot, or from its history alone."""
    first, alone = (
        open_tiny(CONFIG, settings=kept(tmp_path / "a", snapshot_tokens=period)),
        open_tiny(CONFIG),
    )
    here, there = (new_session(each, TEXT, recall_tokens=6) for each in (first, alone))
    for turns in (range(4), range(4, 9)):
        assert play(first, here, turns) == play(alone, there, turns)
        directory = crashed(tmp_path / "a", tmp_path / f"{turns}", *(["snapshots"] if damage else []))
        (directory / "snapshots").mkdir(exist_ok=True)
        second = open_tiny(CONFIG, settings=kept(directory))
        told = alone.info(there)
        assert told.recalled
        for _ in range(2):  # asleep, and awake
            info = second.info(here)
            assert (info.recalled, info.remembered) == (told.recalled, told.remembered)
            assert info.recall_duration_seconds > 0
            assert second.recalled(here) == alone.recalled(there)
        copy, solo = second.fork(here)[0], alone.fork(there)[0]
        after = range(turns.stop, turns.stop + 4)
        expected = play(alone, solo, after)
        assert play(second, here, after) == expected
        assert play(second, copy, after) == expected
        second.close()
        alone.close_session(solo)


def test_an_answer_goes_on_with_what_its_turn_recalled(
    open_tiny: Open, tmp_path: Path, crashed: Crashed
) -> None:
    first = open_tiny(CONFIG, settings=kept(tmp_path / "a"))
    alone = open_tiny(CONFIG)
    here, there = talked(first), talked(alone)
    for runtime, session in ((first, here), (alone, there)):
        runtime.recall(session, [TokenRange(20, 23)])
    stream = first.generate(here, 20, SEEDED)
    begun = [
        event.token_id for event in (stream.next_event() for _ in range(6)) if isinstance(event, TokenEvent)
    ]
    second = open_tiny(CONFIG, settings=kept(crashed(tmp_path / "a", tmp_path / "b")))
    stream.cancel()
    known = second.info(here).history_length - len(TEXT) - 6
    expected = said(alone, there, 20)
    assert begun == expected[: len(begun)]
    last = answer(second, here, 20 - known, sampling=SEEDED)
    assert [event.token_id for event in last if isinstance(event, TokenEvent)] == expected[known:]
    assert isinstance(last[-1], DoneEvent)
    assert last[-1].recalled == (TokenRange(20, 23),)
    # What was named was for that turn alone.
    for runtime, session in ((second, here), (alone, there)):
        runtime.append(session, [5])
    assert said(second, here, 4) == said(alone, there, 4)
    assert second.info(here).recalled == alone.info(there).recalled


def test_a_session_moves_with_what_its_turns_recalled(
    open_tiny: Open, tmp_path: Path, crashed: Crashed
) -> None:
    """Though its only snapshot does not know of them."""
    first, alone = open_tiny(CONFIG, settings=kept(tmp_path / "a")), open_tiny(CONFIG)
    here, there = (new_session(each, TEXT, recall_tokens=6) for each in (first, alone))
    assert play(first, here, range(5)) == play(alone, there, range(5))
    second = open_tiny(CONFIG, settings=kept(crashed(tmp_path / "a", tmp_path / "b")))
    third = open_tiny(CONFIG, settings=kept(tmp_path / "c"))

    def send(parts: Sequence[bytes | memoryview]) -> None:
        assert third.home.take_in(b"".join(parts)) == here

    second.home.hand_over(here, "c", send)
    assert third.info(here).recalled == alone.info(there).recalled
    file = b"".join(third.export_bytes(here))  # before its past is computed again
    imported, _ = third.import_bytes(file)
    expected = play(alone, there, range(5, 9))
    assert play(third, here, range(5, 9)) == expected
    assert play(third, imported, range(5, 9)) == expected


def test_a_cancel_while_the_past_is_computed_again(
    open_tiny: Open, tmp_path: Path, crashed: Crashed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was computed stays, and the rest follows with the next generate."""
    settings = kept(tmp_path / "a", snapshot_tokens=10**6)
    first, alone = open_tiny(CONFIG, settings=settings), open_tiny(CONFIG)
    here, there = (new_session(each, TEXT, recall_tokens=6) for each in (first, alone))
    assert play(first, here, range(8)) == play(alone, there, range(8))
    second = open_tiny(CONFIG, settings=kept(crashed(tmp_path / "a", tmp_path / "b")))
    computed = recall_module.TurnRecall.computed
    streams, calls = [], []

    def cancel(recall: recall_module.TurnRecall, rows: int) -> None:
        calls.append(rows)
        if len(calls) == 2:
            streams[0].cancel()
        computed(recall, rows)

    monkeypatch.setattr(recall_module.TurnRecall, "computed", cancel)
    started = threading.Event()
    begin = recall_module.TurnRecall.begin

    def wait(recall: recall_module.TurnRecall) -> None:
        assert started.wait(20)
        begin(recall)

    monkeypatch.setattr(recall_module.TurnRecall, "begin", wait)
    streams.append(second.generate(here, 4, SEEDED))
    started.set()
    assert [event for event in streams[0] if isinstance(event, TokenEvent)] == []
    assert second.info(here).recalled == alone.info(there).recalled
    assert said(second, here, 4) == said(alone, there, 4)
    assert play(second, here, range(8, 11)) == play(alone, there, range(8, 11))


def test_an_imported_session_is_soon_safe(open_tiny: Open, tmp_path: Path, crashed: Crashed) -> None:
    """What its turns recalled, only its keys and values tell."""
    alone = open_tiny(CONFIG)
    there = new_session(alone, TEXT, recall_tokens=6)
    play(alone, there, range(6))
    first = open_tiny(CONFIG, settings=kept(tmp_path / "a"))
    here, _ = first.import_bytes(bytearray(b"".join(alone.export_bytes(there))))
    session, end = first._store.get(here, "local"), time.monotonic() + 20
    while session.snapshot is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    second = open_tiny(CONFIG, settings=kept(crashed(tmp_path / "a", tmp_path / "b")))
    assert second.info(here).recalled == alone.info(there).recalled
    assert play(second, here, range(6, 10)) == play(alone, there, range(6, 10))


def test_a_turn_of_which_nothing_was_taken_is_not_stored(open_tiny: Open, tmp_path: Path) -> None:
    runtime = open_tiny(CONFIG, settings=kept(tmp_path))
    session = talked(runtime)
    history = runtime._store.get(session, "local").history
    store = runtime._keeping._store
    before = store.turns_of(history)
    stream = runtime.generate(session, 4, SEEDED)
    while not stream.unread or store.turns_of(history) == before:
        time.sleep(0.001)
    stream.cancel()
    runtime.append(session, [])
    assert store.turns_of(history) == before
    said(runtime, session, 4)
    assert len(store.turns_of(history)) == len(before) + 1
