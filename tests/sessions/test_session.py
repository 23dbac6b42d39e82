"""What a session remembers of its turns, and how it ends."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kakeya.engine.sequence import TokenSequence
from kakeya.errors import InvalidArgument, InvariantViolation, SessionNotFound
from kakeya.runtime import Runtime
from kakeya.sessions import session as sessions
from kakeya.sessions.session import Asleep, Session
from kakeya.types import SessionInfo, TokenEvent
from support import tiny
from support.tiny import PROMPT, answer, new_session, sequence_of

OpenTiny = Callable[..., Runtime]


@pytest.fixture
def runtime(open_tiny: OpenTiny) -> Runtime:
    return open_tiny(tiny.engine_config(threads=1))


class WakesWhileLookedAt(Session):
    """Its sequence comes, and what it was asleep goes, when somebody has seen the one and not the other."""

    comes: "TokenSequence | None" = None

    def __getattribute__(self, name: str) -> object:
        value = super().__getattribute__(name)
        if name == "sequence" and value is None:
            self.sequence, self.asleep = super().__getattribute__("comes"), None
        return value


def test_one_that_wakes_while_it_is_looked_at(runtime: Runtime) -> None:
    sequence = sequence_of(runtime, new_session(runtime))
    asleep = Asleep(3, 2, 2, (), sequence.slab.geometry)
    for look in (Session.describe, lambda each: each.state, lambda each: each.length):
        session = WakesWhileLookedAt("s", "local", "", None, 1, asleep)
        session.comes = sequence
        expected = Session("s", "local", "", sequence, 1)
        assert normalized(look(session)) == normalized(look(expected))


def normalized(seen: object) -> object:
    """Without the time that passes between two looks."""
    return replace(seen, idle_seconds=0.0) if isinstance(seen, SessionInfo) else seen


def test_a_turn_is_remembered_with_its_figures(runtime: Runtime) -> None:
    session = new_session(runtime)
    fresh = runtime.info(session)
    assert (fresh.turns, fresh.generated_tokens, fresh.recent_turns) == (0, 0, ())
    answer(runtime, session, 3)
    runtime.append(session, [4, 4])
    answer(runtime, session, 6)
    info = runtime.info(session)
    first, second = info.recent_turns
    assert (info.turns, info.generated_tokens) == (2, 9)
    assert second.generated_tokens == 6
    assert (first.history_length, first.computed_tokens, first.generated_tokens) == (len(PROMPT) + 3, 5, 3)
    # The newest token of an answer is computed with the next turn.
    assert (second.history_length, second.computed_tokens) == (len(PROMPT) + 3 + 2 + 6, 2 + 1)
    assert second.kv_live_bytes == info.kv_live_bytes > first.kv_live_bytes > 0
    for turn in info.recent_turns:
        assert 0 < turn.first_token_seconds <= turn.seconds


def test_tokens_of_a_running_turn_are_counted_as_they_are_taken(runtime: Runtime) -> None:
    session = new_session(runtime)
    stream = runtime.generate(session, 10_000)
    for _ in range(3):
        assert isinstance(stream.next_event(), TokenEvent)
    running = runtime.info(session)
    assert (running.state, running.turns, running.generated_tokens) == ("generating", 0, 3)
    stream.cancel()
    taken = 3 + sum(isinstance(event, TokenEvent) for event in stream)
    ended = runtime.info(session)
    assert (ended.turns, ended.generated_tokens) == (1, taken)
    assert ended.recent_turns[-1].generated_tokens == taken


def test_a_generate_without_a_token_is_no_turn(runtime: Runtime) -> None:
    session = new_session(runtime)
    stream = runtime.generate(session, 10_000)
    stream.cancel()
    while runtime.info(session).state == "generating":  # and nobody takes a token meanwhile
        pass
    assert runtime.info(session).turns == 0


def test_a_failed_generate_is_no_turn(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    session = new_session(runtime)

    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    answer(runtime, session, 2)
    stream = runtime.generate(session, 1_000)
    assert isinstance(stream.next_event(), TokenEvent)
    monkeypatch.setattr(runtime._engine._backend, "run", broken)
    while stream.poll() is not None or runtime.info(session).state == "generating":
        pass
    assert runtime.info(session).turns == 1


def test_a_fork_has_had_the_turns_of_its_original(runtime: Runtime) -> None:
    session = new_session(runtime)
    answer(runtime, session, 3)
    before = runtime.info(session)
    fork, _ = runtime.fork(session)
    answer(runtime, fork, 2)
    info = runtime.info(fork)
    assert (info.turns, info.generated_tokens) == (2, 5)
    assert info.recent_turns[0] == before.recent_turns[0]
    assert runtime.info(session).recent_turns == before.recent_turns


def test_only_the_newest_turns_are_remembered(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "RECENT_TURNS", 3)
    session = new_session(runtime)
    for _ in range(5):
        answer(runtime, session, 1)
    info = runtime.info(session)
    assert (info.turns, info.generated_tokens) == (5, 5)
    assert [turn.history_length for turn in info.recent_turns] == [len(PROMPT) + n for n in (3, 4, 5)]


def test_free_slabs_follow_the_sessions(runtime: Runtime) -> None:
    assert runtime.free_slabs == runtime.config.capacity
    session = new_session(runtime)
    assert runtime.free_slabs == runtime.config.capacity - 1
    runtime.close_session(session)
    assert runtime.free_slabs == runtime.config.capacity


def test_a_label_has_a_limit(runtime: Runtime) -> None:
    runtime.create_session(client_label="é" * 256)
    with pytest.raises(InvalidArgument, match="client_label must have at most 256 characters, got 257"):
        runtime.create_session(client_label="x" * 257)
    assert len(runtime.list_sessions()[0]) == 1


def test_a_session_is_closed_once(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    session = runtime.create_session()
    found = runtime._store.get(session, "local")
    runtime.close_session(session)
    with pytest.raises(SessionNotFound):
        runtime.close_session(session)
    # Two that close at once both find the session; one of them is too late.
    monkeypatch.setattr(runtime._store, "get", lambda *_: found)
    with pytest.raises(SessionNotFound):
        runtime.close_session(session)


def test_a_failed_session_says_so_until_it_is_closed(runtime: Runtime) -> None:
    session = new_session(runtime)
    answer(runtime, session, 2)
    sequence_of(runtime, session).slab.committed = 99
    with pytest.raises(InvariantViolation):
        runtime.append(session, [3])
    info = runtime.info(session)
    assert (info.state, info.kv_live_bytes, info.cache_invariant_inv2_violations) == ("failed", 0, 1)
    runtime.close_session(session)
    assert runtime.list_sessions() == ([], "")


def test_draining_lets_what_runs_finish(runtime: Runtime) -> None:
    session = new_session(runtime)
    stream = runtime.generate(session, 10_000)
    assert not runtime.drain(0.05)
    stream.cancel()
    assert runtime.drain(10)
