"""A session moves while disks fail and processes die, at each write of either side: one directory has it."""

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from kakeya.config import StateConfig
from kakeya.errors import StorageFailed
from kakeya.storage.files import Files
from kakeya.storage.records import Details, StoredAnswer, StoredSession
from kakeya.storage.session_file import unpacked
from kakeya.storage.store import StateStore
from support.faults import Fails, Faulty, burst, dead

SESSION = StoredSession("s", "me", 1, 0, 0, 4, Details("label", (1,)), 5.0, is_open=False)
ANSWER = StoredAnswer("me", "append", "s", "r", 3)
SIDES = ("a", "b")


def opened(directory: Path, files: Files | None = None) -> StateStore:
    store = StateStore(StateConfig(directory, fenced=True), 10, files)
    store.check_model("model", "geometry")
    return store


def begun(directory: Path) -> StateStore:
    """A store with a session and its snapshot."""
    store = opened(directory)
    history = store.add(SESSION, [7, 8, 9], ANSWER).result()
    store.save("s", history, [b"keys", b"values"], 2)
    return store


def move(sender: StateStore, receiver: StateStore) -> None:
    epoch = sender.leave("s", "b")
    receiver.take_in(unpacked(b"".join(sender.pack("s", epoch))), 1)
    sender.left("s")


def settle(sender: StateStore, receiver: StateStore) -> None:
    for doubt in sender.leaving():
        taken = receiver.was_taken(doubt.session_id, doubt.epoch)
        (sender.left if taken else sender.stay)(doubt.session_id)


def check_home(*stores: StateStore) -> StateStore:
    """The one store that has the session, with all that belongs to it; others have nothing of it."""
    homes = [store for store in stores if store.sessions()]
    assert len(homes) == 1
    (stored,) = homes[0].sessions()
    assert homes[0].tokens(stored.history).tolist() == [7, 8, 9]
    assert stored.snapshot is not None
    assert bytes(homes[0].load(stored.snapshot)) == b"keysvalues"
    assert homes[0].answers() == [ANSWER]
    for store in stores:
        files = {path.name for path in (store.config.directory / "snapshots").iterdir()}
        assert files == ({stored.snapshot.file} if store is homes[0] else set())
    return homes[0]


def pair(directory: Path, side: str, fails: Fails) -> tuple[StateStore, StateStore, Faulty]:
    """Two stores, of which one writes through a faulty file layer from now on."""
    begun(directory / "a").close()
    files = Faulty(fails)
    sender, receiver = (opened(directory / name, files if name == side else None) for name in SIDES)
    files.begin()
    return sender, receiver, files


@pytest.mark.parametrize("side", SIDES)
def test_a_process_that_dies_at_any_write_leaves_one_home(tmp_path: Path, side: str) -> None:
    homes = set()
    for number in count(1):
        here = tmp_path / str(number)
        sender, receiver, files = pair(here, side, dead(number))
        with suppress(StorageFailed):
            move(sender, receiver)
        again, other = opened(here / "a"), opened(here / "b")  # they follow on those that died
        settle(again, other)
        homes.add(check_home(again, other).config.directory.name)
        for store in (sender, receiver, again, other):
            store.close()
        if not files.failed:
            break
    assert number > 4
    assert homes == {"a", "b"}


@pytest.mark.parametrize("side", SIDES)
def test_a_write_that_fails_once_is_made_up_for(tmp_path: Path, side: str) -> None:
    for number in count(1):
        sender, receiver, files = pair(tmp_path / str(number), side, burst(number, 1))
        until_stored(lambda s=sender, r=receiver: bring(s, r))
        files.end()
        for store in (sender, receiver):
            store.delete("nobody")  # takes along what could not be removed before
        assert check_home(sender, receiver) is receiver
        sender.close()
        receiver.close()
        if not files.failed:
            break
    assert number > 4


def bring(sender: StateStore, receiver: StateStore) -> None:
    settle(sender, receiver)
    if sender.sessions():
        move(sender, receiver)


def until_stored(work: Callable[[], None]) -> None:
    for _ in range(3):
        with suppress(StorageFailed):
            return work()
    raise AssertionError("refused for ever")
