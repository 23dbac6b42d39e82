"""Sessions that wake: without waiting for the engine where a slab is free, and with nothing lost."""

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.config import RuntimeConfig, StateConfig
from kakeya.engine.inbox import Inbox
from kakeya.engine.moving import HostBuffers
from kakeya.errors import StorageFailed, Unavailable
from kakeya.runtime import Runtime
from kakeya.sessions.disk_tier import DiskTier
from kakeya.sessions.hibernation import Hibernation
from kakeya.sessions.session import Session
from kakeya.types import Durability, Numerics, TokenEvent
from support import tiny
from support.tiny import answer, new_session

Open = Callable[..., Runtime]
SLABS = 4
CONFIG = tiny.engine_config(threads=1, capacity=SLABS, numerics=Numerics.EXACT)
PROMPTS = [[5 + n, 9, 22, 13, 7 + n] for n in range(3 * SLABS)]


def opened(open_tiny: Open, directory: Path, **changes: object) -> Runtime:
    state = replace(StateConfig(directory), **changes)
    return open_tiny(CONFIG, settings=RuntimeConfig(session_idle_ttl_s=None, state=state))


def tiers(runtime: Runtime) -> Hibernation:
    return runtime._keeping._tiers  # type: ignore[attr-defined,no-any-return]


def session(runtime: Runtime, name: str) -> Session:
    return runtime._store.get(name, "local")


def said(runtime: Runtime, name: str, count: int = 5) -> list[int]:
    return [each.token_id for each in answer(runtime, name, count) if isinstance(each, TokenEvent)]


def sleeper(runtime: Runtime, names: list[str]) -> str:
    return next(name for name in names if runtime.info(name).state in ("host", "disk"))


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.002)


def wake_two(runtime: Runtime, names: list[str]) -> None:
    """Two wakes, which all others rest through."""
    for _ in range(2):
        runtime.append(sleeper(runtime, names), [])


def make_reserve(runtime: Runtime, names: list[str]) -> None:
    """One slab is free, and nobody makes room by himself from then on."""
    wake_two(runtime, names)
    eventually(lambda: runtime._pool.free_count == 1)
    tiers(runtime).stop()
    assert runtime._pool.free_count == 1


@contextmanager
def engine_at_rest(runtime: Runtime) -> Iterator[None]:
    """The engine thread does nothing meanwhile."""
    begun, over = threading.Event(), threading.Event()

    def rest() -> bool:
        begun.set()
        return over.wait(20)

    is_over = runtime._engine._inbox.post(rest)
    assert begun.wait(20)
    try:
        yield
    finally:
        over.set()
        assert is_over.result(), "somebody waited for the engine"


@pytest.mark.parametrize("host_bytes", [0, 2**30])
def test_a_wake_does_not_wait_for_the_engine(open_tiny: Open, tmp_path: Path, host_bytes: int) -> None:
    runtime = opened(open_tiny, tmp_path, host_tier_bytes=host_bytes)
    names = [new_session(runtime, prompt) for prompt in PROMPTS]
    expected = {name: said(runtime, name, 3) for name in names}
    make_reserve(runtime, names)
    name = sleeper(runtime, names)
    with engine_at_rest(runtime), session(runtime, name).lock:
        sequence = tiers(runtime).wake(session(runtime, name))
        assert runtime._pool.free_count == 0
        assert sequence.committed == 5 + len(expected[name])
        assert session(runtime, name).state == "idle"
    with open_tiny(CONFIG) as alone:
        solo = new_session(alone, PROMPTS[names.index(name)])
        assert said(alone, solo, 3) == expected[name]
        assert said(runtime, name) == said(alone, solo)


def test_a_snapshot_is_taken_of_who_falls_asleep(
    open_tiny: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However quick the thread that takes it: it may look while the slab is still being left."""
    runtime = opened(open_tiny, tmp_path)
    names = [new_session(runtime, prompt) for prompt in PROMPTS[:SLABS]]
    # The turn itself asks for none: on the engine's thread, which then could not wait for it.
    monkeypatch.setattr(DiskTier, "progressed", lambda *_: None)
    said(runtime, names[0])
    save_soon = DiskTier.save_soon

    def save_and_wait(self: DiskTier, falling: Session) -> None:
        save_soon(self, falling)
        eventually(lambda: falling not in self._queued and not self.is_being_saved(falling))

    monkeypatch.setattr(DiskTier, "save_soon", save_and_wait)
    with session(runtime, names[0]).lock:
        assert tiers(runtime).sleep(session(runtime, names[0]))
    assert runtime.info(names[0]).state == "host"
    assert session(runtime, names[0]).snapshot is not None


def test_the_reserve_is_anybodys(open_tiny: Open, tmp_path: Path) -> None:
    """A new session takes the free slab. It counts as room all the time."""
    runtime = opened(open_tiny, tmp_path)
    names = [new_session(runtime, prompt) for prompt in PROMPTS]
    make_reserve(runtime, names)
    asleep = {name for name in names if runtime.info(name).state == "host"}
    assert runtime.free_slabs == SLABS
    runtime.create_session()
    assert runtime._pool.free_count == 0
    assert {name for name in names if runtime.info(name).state == "host"} == asleep
    assert runtime.free_slabs == SLABS


def test_sessions_that_fit_stay_awake(open_tiny: Open, tmp_path: Path) -> None:
    runtime = opened(open_tiny, tmp_path)
    names = [new_session(runtime, prompt) for prompt in PROMPTS[: SLABS + 1]]
    # The first sleeps, and nobody needs it: the others have a slab each.
    for _ in range(5):
        for name in names[1:]:
            runtime.append(name, [3])
    tiers(runtime).stop()
    assert [runtime.info(name).state for name in names] == ["host"] + ["idle"] * SLABS


def test_nobody_leaves_for_one_that_left_too_early(
    open_tiny: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many sessions as slabs, by turns: the reserve is given up, and all of them stay awake."""
    runtime = opened(open_tiny, tmp_path)
    names = [new_session(runtime, prompt) for prompt in PROMPTS[: SLABS + 2]]
    make_reserve(runtime, names)
    looks: list[int] = []
    monkeypatch.setattr(tiers(runtime)._reserve, "look", lambda: looks.append(1))
    early = tiers(runtime)._left_early
    assert early is not None
    assert early.state == "host"
    runtime.append(early.session_id, [])
    assert (runtime._pool.free_count, looks) == (0, [])
    runtime.append(sleeper(runtime, names), [])
    assert looks == [1]


def test_few_slabs_are_all_used(open_tiny: Open, tmp_path: Path) -> None:
    state = RuntimeConfig(session_idle_ttl_s=None, state=StateConfig(tmp_path))
    runtime = open_tiny(replace(CONFIG, capacity=2), settings=state)
    names = [new_session(runtime, prompt) for prompt in PROMPTS]
    for _ in range(3):
        wake_two(runtime, names)
    tiers(runtime).stop()
    assert runtime._pool.free_count == 0


def test_a_burst_of_wakes(open_tiny: Open, tmp_path: Path) -> None:
    runtime = opened(open_tiny, tmp_path, host_tier_bytes=20_000)
    names = [new_session(runtime, prompt) for prompt in PROMPTS]
    answers: dict[str, list[int]] = {name: [] for name in names}

    def talk(name: str) -> None:
        answers[name] += said(runtime, name, 3)

    with ThreadPoolExecutor(SLABS) as pool:
        for _ in range(3):
            list(pool.map(talk, names))
    with open_tiny(CONFIG) as alone:
        for name, prompt in zip(names, PROMPTS, strict=True):
            solo = new_session(alone, prompt)
            assert answers[name] == [token for _ in range(3) for token in said(alone, solo, 3)]
            alone.close_session(solo)
    tiers(runtime).stop()
    facts = runtime.tiers()
    assert facts is not None
    assert facts.active <= SLABS
    assert facts.active + runtime._pool.free_count == SLABS


def test_a_reserve_at_the_end(open_tiny: Open, tmp_path: Path) -> None:
    with opened(open_tiny, tmp_path) as runtime:
        names = [new_session(runtime, prompt) for prompt in PROMPTS]
        expected = [said(runtime, name, 3) for name in names]
        wake_two(runtime, names)
    again = opened(open_tiny, tmp_path)
    assert {again.info(name).state for name in names} == {"disk"}
    assert [again.info(name).history_length for name in names] == [5 + len(each) for each in expected]


class Refuses:
    """A drafter that cannot take a state over."""

    def restore(self, tensors: object) -> None:
        raise RuntimeError("it cannot be restored")


@pytest.mark.parametrize("host_bytes", [0, 2**30])
def test_what_fails_in_the_engine_reaches_the_caller(
    open_tiny: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_bytes: int
) -> None:
    runtime = opened(open_tiny, tmp_path, host_tier_bytes=host_bytes)
    names = [new_session(runtime, prompt) for prompt in PROMPTS]
    expected = {name: said(runtime, name, 3) for name in names}
    name = sleeper(runtime, names)
    was, place = runtime.info(name), runtime.info(name).state
    with monkeypatch.context() as broken:
        broken.setattr(runtime._engine.moves, "_drafter", Refuses())
        for _ in range(2 * SLABS):  # slabs are given back, too
            with pytest.raises(RuntimeError, match="it cannot be restored"):
                runtime.append(name, [3])
    tiers(runtime).stop()
    info = runtime.info(name)
    assert (info.state, info.history_length) == (place, was.history_length)
    facts = runtime.tiers()
    assert facts is not None
    assert facts.active + runtime._pool.free_count == SLABS
    with open_tiny(CONFIG) as alone:
        solo = new_session(alone, PROMPTS[names.index(name)])
        assert said(alone, solo, 3) == expected[name]
        assert said(runtime, name) == said(alone, solo)


def test_an_engine_that_takes_no_calls_leaves_a_sleeper_asleep(
    open_tiny: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = opened(open_tiny, tmp_path)
    names = [new_session(runtime, prompt) for prompt in PROMPTS]
    make_reserve(runtime, names)
    name = sleeper(runtime, names)

    def refuse(*_: object) -> None:
        raise Unavailable("not now")

    with monkeypatch.context() as broken:
        broken.setattr(Inbox, "post", refuse)
        with pytest.raises(Unavailable, match="not now"):
            runtime.append(name, [])
    assert runtime.info(name).state == "host"
    assert runtime._pool.free_count == 1


def test_a_wake_that_cannot_be_noted_gives_its_slab_back(
    open_tiny: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = opened(open_tiny, tmp_path, durability=Durability.NONE)
    names = [new_session(runtime, prompt) for prompt in PROMPTS]
    name = sleeper(runtime, names)

    def full(_: Session) -> None:
        raise StorageFailed("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(tiers(runtime)._disk, "woken", full)
        with pytest.raises(StorageFailed):
            runtime.append(name, [3])
    assert runtime.info(name).state == "host"
    assert runtime._pool.free_count == 1
    assert runtime.append(name, [3]) == 6


def test_the_host_tier_counts_what_memory_a_sleeper_takes(
    open_tiny: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be more than its keys and values."""
    monkeypatch.setattr(HostBuffers, "taken_by", lambda _, size: 3 * size)
    runtime = opened(open_tiny, tmp_path)
    name = new_session(runtime)
    said(runtime, name)
    with session(runtime, name).lock:
        assert tiers(runtime).sleep(session(runtime, name))
    asleep = session(runtime, name).asleep
    assert asleep is not None
    assert asleep.state is not None
    assert tiers(runtime).host_bytes == asleep.bytes_beside + 3 * asleep.state.storage.nbytes


def test_a_snapshot_that_fails_costs_others_none(
    open_tiny: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it fails of."""
    runtime = opened(open_tiny, tmp_path)
    first, second = (session(runtime, new_session(runtime, prompt)) for prompt in PROMPTS[:2])
    save = DiskTier._save_now

    def fail_once(self: DiskTier, asked: Session) -> None:
        if asked is first:
            raise RuntimeError("a bug")
        save(self, asked)

    monkeypatch.setattr(DiskTier, "_save_now", fail_once)
    for each in (first, second):
        said(runtime, each.session_id)
        tiers(runtime)._disk.save_soon(each)
    eventually(lambda: second.snapshot is not None)
    assert first.snapshot is None
    assert "a bug" in caplog.text


def test_a_snapshot_of_a_sleeper_takes_nothing_of_what_it_says_when_it_has_woken(
    open_tiny: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With durability none its history is stored with the snapshot: as it was, without tokens that its
    reader never takes."""
    runtime = opened(open_tiny, tmp_path, durability=Durability.NONE)
    name = new_session(runtime, PROMPTS[0])
    begun, saves, catch_up = threading.Event(), threading.Event(), DiskTier._catch_up

    def catch_up_later(self: DiskTier, falling: Session, tokens: "array[int]") -> None:
        if threading.current_thread() is self._thread:
            begun.set()
            assert saves.wait(20)
        catch_up(self, falling, tokens)

    monkeypatch.setattr(DiskTier, "_catch_up", catch_up_later)
    with session(runtime, name).lock:
        assert tiers(runtime).sleep(session(runtime, name))
    assert begun.wait(20)
    stream = runtime.generate(name, 20)
    stream.next_event()
    eventually(lambda: stream.unread > 0)
    saves.set()
    eventually(lambda: not tiers(runtime)._disk.is_being_saved(session(runtime, name)))
    stream.cancel()
    runtime.append(name, [3])
    sequence = session(runtime, name).sequence
    assert sequence is not None
    expected = sequence.tokens.tolist()
    runtime.close()
    again = opened(open_tiny, tmp_path, durability=Durability.NONE)
    stored = again._keeping._store  # type: ignore[attr-defined]
    assert stored.tokens(session(again, name).history).tolist() == expected
