"""The idle sweep: it runs by itself, closes what is idle and nothing else."""

import threading
import time
from collections.abc import Callable

import pytest

from kakeya.config import Quotas, RuntimeConfig
from kakeya.errors import InvariantViolation, SessionNotFound, Unavailable
from kakeya.runtime import Runtime
from kakeya.sessions.sweep import Sweeper
from support.tiny import PROMPT, new_session, sequence_of

OpenTiny = Callable[..., Runtime]


def idle_for(runtime: Runtime, session_id: str, seconds: float) -> None:
    runtime._store.get(session_id, "local").last_used_at -= seconds


def open_sessions(runtime: Runtime) -> set[str]:
    return {info.session_id for info in runtime.list_sessions()[0]}


def test_an_idle_session_is_closed_without_anybody_asking(open_tiny: OpenTiny) -> None:
    runtime = open_tiny(settings=RuntimeConfig(0.4))
    idle, used, busy = new_session(runtime), new_session(runtime), new_session(runtime)
    stream = runtime.generate(busy, 10_000)
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        runtime.append(used, [])
        time.sleep(0.05)
    assert open_sessions(runtime) == {used, busy}
    with pytest.raises(SessionNotFound):
        runtime.append(idle, [3])
    stream.cancel()
    time.sleep(1.2)
    assert open_sessions(runtime) == set()


def test_a_sweep_frees_slab_and_quota(open_tiny: OpenTiny) -> None:
    runtime = open_tiny(settings=RuntimeConfig(1000, Quotas(max_sessions=4)))
    sessions = [runtime.create_session() for _ in range(4)]
    assert runtime.sweep() == 0
    for session in sessions[:3]:
        idle_for(runtime, session, 1000)
    assert runtime.sweep() == 3
    assert open_sessions(runtime) == {sessions[3]}
    for _ in range(3):
        runtime.create_session()


def test_generating_is_not_idling(open_tiny: OpenTiny) -> None:
    runtime = open_tiny(settings=RuntimeConfig(1000))
    session = new_session(runtime)
    stream = runtime.generate(session, 10_000)
    idle_for(runtime, session, 2000)
    assert runtime.info(session).idle_seconds == 0
    assert runtime.sweep() == 0
    stream.cancel()
    list(stream)
    assert runtime.info(session).idle_seconds < 500
    assert runtime.sweep() == 0


def test_the_idle_clock_starts_when_a_generate_ends(open_tiny: OpenTiny) -> None:
    runtime = open_tiny(settings=RuntimeConfig(1000))
    session = new_session(runtime)
    stream = runtime.generate(session, 3)
    idle_for(runtime, session, 2000)
    list(stream)
    assert runtime.info(session).idle_seconds < 500


def test_looking_is_not_using(open_tiny: OpenTiny) -> None:
    runtime = open_tiny(settings=RuntimeConfig(1000))
    session = new_session(runtime)
    idle_for(runtime, session, 1000)
    assert runtime.info(session).idle_seconds >= 1000
    runtime.list_sessions()
    assert runtime.sweep() == 1


def test_a_session_used_at_the_last_moment_stays(
    open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = open_tiny(settings=RuntimeConfig(1000))
    session = new_session(runtime)
    idle_for(runtime, session, 2000)
    close_if = runtime._engine.close_if

    def used_meanwhile(*args: object) -> bool:
        runtime.append(session, [3])
        return close_if(*args)

    monkeypatch.setattr(runtime._engine, "close_if", used_meanwhile)
    assert runtime.sweep() == 0
    assert runtime.info(session).history_length == len(PROMPT) + 1


def test_a_session_closed_meanwhile_is_counted_once(
    open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = open_tiny(settings=RuntimeConfig(1000, Quotas(max_sessions=1)))
    session = runtime.create_session()
    idle_for(runtime, session, 2000)
    close_if = runtime._engine.close_if

    def closed_meanwhile(*args: object) -> bool:
        runtime.close_session(session)
        return close_if(*args)

    monkeypatch.setattr(runtime._engine, "close_if", closed_meanwhile)
    assert runtime.sweep() == 0
    assert runtime._limits._owners["local"].sessions == 0


def test_a_failed_session_is_swept_too(open_tiny: OpenTiny) -> None:
    runtime = open_tiny(settings=RuntimeConfig(1000))
    session = new_session(runtime)
    list(runtime.generate(session, 2))
    sequence_of(runtime, session).slab.committed = 99
    with pytest.raises(InvariantViolation):
        runtime.append(session, [3])
    idle_for(runtime, session, 2000)
    assert runtime.sweep() == 1
    assert len([runtime.create_session() for _ in range(4)]) == 4


def test_without_a_ttl_sessions_stay(open_tiny: OpenTiny) -> None:
    runtime = open_tiny()
    session = runtime.create_session()
    idle_for(runtime, session, 10**9)
    assert runtime.sweep() == 0
    assert not any(thread.name == "kakeya-sweep" for thread in threading.enumerate())


def test_a_sweep_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    calls, twice = [], threading.Event()

    def sweep() -> None:
        calls.append(1)
        if len(calls) == 2:
            twice.set()
        raise ValueError("a bug")

    sweeper = Sweeper(sweep, 0.04)
    sweeper.start()
    assert twice.wait(10)
    sweeper.stop()
    sweeper.stop()
    assert "tried again" in caplog.text


def test_the_sweep_ends_with_the_engine() -> None:
    def gone() -> None:
        raise Unavailable("the engine is shut down")

    sweeper = Sweeper(gone, 0.04)
    sweeper.start()
    sweeper._thread.join(10)
    assert not sweeper._thread.is_alive()


def test_closing_the_runtime_ends_its_threads(open_tiny: OpenTiny) -> None:
    before = set(threading.enumerate())
    runtime = open_tiny(settings=RuntimeConfig(1000))
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert names == {"kakeya-engine", "kakeya-sweep"}
    runtime.close()
    assert not {"kakeya-engine", "kakeya-sweep"} & {t.name for t in set(threading.enumerate()) - before}
