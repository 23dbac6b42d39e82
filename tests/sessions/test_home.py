"""A session moves between two runtimes with a state directory each: exact, once, and with its answers."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kakeya import runtime as runtime_module
from kakeya.config import RuntimeConfig, StateConfig
from kakeya.errors import (
    ConfigError,
    Conflict,
    SessionBusy,
    SessionNotFound,
    StateMismatch,
    StorageFailed,
    Unavailable,
)
from kakeya.runtime import Runtime
from kakeya.storage.store import StateStore
from kakeya.types import Numerics, SamplingParams, TokenEvent
from support import tiny
from support.faults import Faulty, burst
from support.tiny import answer, new_session

Open = Callable[..., Runtime]
SEEDED = SamplingParams(temperature=1.0, seed=7)
CONFIG = tiny.engine_config(threads=1, capacity=2, numerics=Numerics.EXACT)


def kept(directory: Path, prefix: str) -> RuntimeConfig:
    state = StateConfig(directory, snapshot_tokens=6, fenced=True)
    return RuntimeConfig(session_idle_ttl_s=None, state=state, session_prefix=prefix)


def tokens(events: list[object]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


@pytest.fixture
def pair(open_tiny: Open, tmp_path: Path) -> tuple[Runtime, Runtime]:
    first, second = (open_tiny(CONFIG, settings=kept(tmp_path / name, f"{name}.")) for name in "ab")
    return first, second


def into(target: Runtime) -> Callable[[Sequence[bytes | memoryview]], None]:
    return lambda parts: void(target.home.take_in(b"".join(parts)))


def void(_: object) -> None:
    pass


def lost(_: Sequence[bytes | memoryview]) -> None:
    raise Unavailable("the line is dead")


def test_a_session_moves_and_goes_on_exactly(pair: tuple[Runtime, Runtime], open_tiny: Open) -> None:
    here, there = pair
    alone = open_tiny(CONFIG)
    solo, session = new_session(alone), new_session(here)
    assert session.startswith("a.")
    said = tokens(answer(here, session, 20, sampling=SEEDED, request_id="once"))
    assert said == tokens(answer(alone, solo, 20, sampling=SEEDED))
    size = here.home.hand_over(session, "b", into(there))
    assert size > here.info(new_session(here)).kv_capacity_bytes / 2
    with pytest.raises(SessionNotFound):
        here.info(session)
    assert there.home.session_ids() == [session]
    assert there.home.usage()["local"].sessions == 1
    assert tokens(answer(there, session, 20, sampling=SEEDED, request_id="once")) == said
    assert there.info(session).history_length == len(said) + 5
    assert tokens(answer(there, session, 9, sampling=SEEDED)) == tokens(
        answer(alone, solo, 9, sampling=SEEDED)
    )
    there.home.hand_over(session, "a", into(here))
    assert tokens(answer(here, session, 9, sampling=SEEDED)) == tokens(
        answer(alone, solo, 9, sampling=SEEDED)
    )
    assert here.home.was_taken(session, 2)


def test_a_session_without_tokens_moves(pair: tuple[Runtime, Runtime]) -> None:
    here, there = pair
    session = here.create_session()
    here.home.hand_over(session, "b", into(there))
    assert there.append(session, [3]) == 1


def test_a_session_that_generates_stays(pair: tuple[Runtime, Runtime]) -> None:
    here, there = pair
    session = new_session(here)
    stream = here.generate(session, 1000)
    stream.next_event()
    with pytest.raises(SessionBusy, match="moves when it rests"):
        here.home.hand_over(session, "b", into(there))
    stream.cancel()


@pytest.mark.parametrize("arrived", [True, False])
def test_a_sender_in_doubt_asks(
    pair: tuple[Runtime, Runtime], open_tiny: Open, tmp_path: Path, arrived: bool
) -> None:
    here, there = pair
    session = new_session(here)
    sent: list[bytes] = []

    def send(parts: Sequence[bytes | memoryview]) -> None:
        sent.append(b"".join(parts))
        if arrived:
            there.home.take_in(sent[0])
        lost(parts)

    with pytest.raises(Unavailable, match="the line is dead"):
        here.home.hand_over(session, "b", send)
    with pytest.raises(Unavailable, match="on its way"):
        here.append(session, [3])
    here.close()
    again = open_tiny(CONFIG, settings=kept(tmp_path / "a", "a."))
    with pytest.raises(Unavailable, match="on its way"):
        again.append(session, [3])
    (doubt,) = again.home.leaving()
    taken = there.home.was_taken(doubt.session_id, doubt.epoch)
    assert taken is arrived
    again.home.settle(doubt, taken=taken)
    assert again.home.leaving() == []
    home, other = (there, again) if taken else (again, there)
    assert home.append(session, [3]) == 6
    with pytest.raises(SessionNotFound):
        other.append(session, [3])
    with pytest.raises(Conflict):
        there.home.take_in(sent[0])


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("first", range(1, 24, 3))
def test_a_session_moves_while_disks_fail(
    open_tiny: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str, first: int
) -> None:
    files = Faulty(burst(first, 3))
    runtimes = []
    for name in "ab":
        with monkeypatch.context() as patch:
            layer = files if name == side else None
            patch.setattr(runtime_module, "StateStore", partial(StateStore, files=layer))
            runtimes.append(open_tiny(CONFIG, settings=kept(tmp_path / name, f"{name}.")))
    here, there = runtimes
    alone = open_tiny(CONFIG)
    solo, session = new_session(alone), new_session(here)
    said = tokens(answer(here, session, 9, sampling=SEEDED))
    assert said == tokens(answer(alone, solo, 9, sampling=SEEDED))
    files.begin()
    for _ in range(9):
        with suppress(StorageFailed):
            for doubt in here.home.leaving():
                here.home.settle(doubt, taken=there.home.was_taken(doubt.session_id, doubt.epoch))
            if session in here.home.session_ids():
                here.home.hand_over(session, "b", into(there))
            break
    files.end()
    assert (here.home.session_ids(), there.home.session_ids(), here.home.leaving()) == ([], [session], [])
    assert tokens(answer(there, session, 9, sampling=SEEDED)) == tokens(
        answer(alone, solo, 9, sampling=SEEDED)
    )


def test_a_session_in_doubt_does_not_expire(pair: tuple[Runtime, Runtime]) -> None:
    """Its sender must not delete it, and goes on deleting others that nobody uses."""
    here, _ = pair
    doubtful, old = new_session(here), new_session(here)
    with pytest.raises(Unavailable, match="the line is dead"):
        here.home.hand_over(doubtful, "b", lost)
    here.sweep()
    for each in (doubtful, old):
        session = here._store.find(each)
        with session.lock:
            here._keeping._tiers.settle_down(session)
        session.last_used_at -= 1e9
    assert here.sweep() == 1
    assert here.home.session_ids() == [doubtful]
    here.home.settle(here.home.leaving()[0], taken=False)
    assert here.sweep() == 1
    assert here.home.session_ids() == []


def test_a_session_of_another_geometry_is_refused(
    pair: tuple[Runtime, Runtime], open_tiny: Open, tmp_path: Path
) -> None:
    here, _ = pair
    cache = replace(CONFIG.cache, window=16)
    other = open_tiny(replace(CONFIG, cache=cache), settings=kept(tmp_path / "c", "c."))
    session = new_session(here)
    with pytest.raises(StateMismatch, match="sessions here are of"):
        here.home.hand_over(session, "c", into(other))
    here.home.settle(here.home.leaving()[0], taken=other.home.was_taken(session, 1))
    assert here.append(session, [3]) == 6


def test_nothing_moves_without_a_state_directory(pair: tuple[Runtime, Runtime], open_tiny: Open) -> None:
    plain = open_tiny(CONFIG)
    session = new_session(plain)
    assert (plain.home.epoch, plain.home.leaving(), plain.home.check()) == (0, [], None)
    parts: list[bytes] = []
    here, _ = pair

    def keep(sent: Sequence[bytes | memoryview]) -> None:
        parts.append(b"".join(sent))
        lost(sent)

    with pytest.raises(Unavailable):
        here.home.hand_over(new_session(here), "b", keep)
    kept_session = plain._store.find(session)
    for call in (
        lambda: plain.home.hand_over(session, "b", void),
        lambda: plain.home.take_in(parts[0]),
        lambda: plain.home.was_taken(session, 1),
        lambda: plain._keeping.stay(kept_session),
        lambda: plain._keeping.left(kept_session),
    ):
        with pytest.raises(ConfigError, match="has none"):
            call()
