"""Every write can fail: what was acknowledged is there, nothing wrong is served, and work goes on."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kakeya import runtime as runtime_module
from kakeya.config import RuntimeConfig, StateConfig
from kakeya.errors import StorageFailed
from kakeya.runtime import Runtime
from kakeya.storage.files import Files
from kakeya.storage.store import StateStore
from kakeya.types import Numerics, SamplingParams, TokenEvent
from support import tiny
from support.crashes import Crashed
from support.faults import WRITES, Fails, Faulty, burst, every

Open = Callable[..., Runtime]
CONFIG = tiny.engine_config(threads=1, capacity=2, numerics=Numerics.EXACT)
SEEDED = SamplingParams(temperature=1.0, seed=3)
# A snapshot takes a dozen writes in a row, so with a shorter period none would ever be stored.
BURST, PERIOD = 3, 17


def patiently(call: Callable[[], object]) -> object:
    """The call's answer, as soon as it is not refused for the storage."""
    for _ in range(4 * BURST):
        try:
            return call()
        except StorageFailed:
            pass
    raise AssertionError("refused for ever")


def said(runtime: Runtime, session: str, count: int) -> list[int]:
    """A generate that goes on where the storage broke it off."""
    tokens: list[int] = []
    while len(tokens) < count:
        try:
            for event in patiently(partial(runtime.generate, session, count - len(tokens), SEEDED)):
                tokens += [event.token_id] if isinstance(event, TokenEvent) else []
        except StorageFailed:
            assert runtime.info(session).history_length >= len(tokens)
    return tokens


def play(runtime: Runtime) -> dict[str, list[int]]:
    """Three sessions on two slabs, with a fork, and one that is closed: what each is known to hold."""
    known: dict[str, list[int]] = {}
    for number in range(2):
        session = str(patiently(partial(runtime.create_session, eos_token_ids=())))
        known[session] = []
        for turn in range(2):
            tokens = [5 + number, 9, 22, 7 + turn]
            assert patiently(partial(runtime.append, session, tokens)) == len(known[session]) + 4
            known[session] += tokens
            known[session] += said(runtime, session, 7)
            assert runtime.info(session).history_length == len(known[session])
    fork, length = patiently(partial(runtime.fork, session))
    assert length == len(known[session])
    known[fork] = list(known[session])
    for each in known:
        known[each] += said(runtime, each, 5)
    gone = str(patiently(runtime.create_session))
    patiently(partial(runtime.append, gone, [4, 4]))
    assert patiently(partial(runtime.close_session, gone)) == 2
    return known


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[int]]]:
    """What the sessions hold when nothing fails."""
    model = tiny.write_llama(tmp_path_factory.mktemp("model"))
    with tiny.tiny_runtime(
        model, tiny.engine_config(threads=1, capacity=4, numerics=Numerics.EXACT)
    ) as runtime:
        yield list(play(runtime).values())


# In one of the first each write of the play fails because the disk is full, in another because it is broken.
FAILS = [
    *(pytest.param(every(PERIOD, offset), id=f"from {offset}") for offset in range(PERIOD)),
    *(pytest.param(burst(first, BURST), id=f"{BURST} from {first}") for first in (1, 22, 56)),
]


def settings(directory: Path) -> RuntimeConfig:
    state = StateConfig(directory, host_tier_bytes=0, snapshot_tokens=6)
    return RuntimeConfig(session_idle_ttl_s=None, state=state)


def test_every_write_can_be_made_to_fail() -> None:
    """A primitive of the file layer that is new must be among those that tests make fail."""
    built_of_others = {"make_directory", "replace", "read", "remove"}
    reads = {"fetch"}
    assert {name for name in vars(Files) if not name.startswith("_")} == {*WRITES, *reads, *built_of_others}


@pytest.mark.parametrize("fails", FAILS)
def test_writes_fail_and_nothing_is_lost(
    open_tiny: Open,
    expected: list[list[int]],
    tmp_path: Path,
    fails: Fails,
    crashed: Crashed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = Faulty(fails)
    with monkeypatch.context() as patch:
        patch.setattr(runtime_module, "StateStore", partial(StateStore, files=files))
        runtime = open_tiny(CONFIG, settings=settings(tmp_path / "a"))
    files.begin()
    known = play(runtime)
    assert list(known.values()) == expected
    copy = crashed(tmp_path / "a", tmp_path / "b")
    later = open_tiny(CONFIG, settings=RuntimeConfig(state=StateConfig(copy)))
    assert {info.session_id for info in later.list_sessions()[0]} == set(known)
    for session, tokens in known.items():
        assert later._keeping._store.tokens(later._store.get(session, "local").history).tolist() == tokens
        assert said(later, session, 4) == said(runtime, session, 4)
    assert set(files.kinds) == set(WRITES)
    assert files.failed.total() > 0


def test_a_torn_log_of_the_database_loses_only_its_end(
    open_tiny: Open, expected: list[list[int]], tmp_path: Path, crashed: Crashed
) -> None:
    """As a loss of power may leave it: what is whole is there, and goes on exactly."""
    state = StateConfig(tmp_path / "a", host_tier_bytes=2**20)
    runtime = open_tiny(CONFIG, settings=RuntimeConfig(state=state))
    known = play(runtime)
    log = (tmp_path / "a" / "sessions.db-wal").read_bytes()
    for number, share in enumerate((0.5, 0.8, 0.99)):
        copy = crashed(tmp_path / "a", tmp_path / str(number), "*-shm")
        (copy / "sessions.db-wal").write_bytes(log[: int(len(log) * share)])
        with open_tiny(CONFIG, settings=RuntimeConfig(state=StateConfig(copy))) as later:
            infos, _ = later.list_sessions()
            for info in infos:
                stored = later._keeping._store.tokens(later._store.get(info.session_id, "local").history)
                assert stored.tolist() == known[info.session_id][: info.history_length]
            assert infos or share == 0.5
