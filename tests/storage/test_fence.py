"""The fence of a state directory: whoever opened it last may write, and nobody before."""

from pathlib import Path

import pytest

from kakeya.config import StateConfig
from kakeya.errors import Fenced
from kakeya.storage.records import Details, StoredSession
from kakeya.storage.store import StateStore

SESSION = StoredSession("s", "me", 1, 0, 0, 4, Details("label", (1,)), 5.0, is_open=True)


def test_a_later_process_takes_the_directory_over(tmp_path: Path) -> None:
    config = StateConfig(tmp_path, fenced=True)
    first = StateStore(config, 10)
    history = first.add(SESSION, [7]).result()
    first.check_home()
    second = StateStore(config, 10)
    assert (first.epoch, second.epoch) == (1, 2)
    writes = first.write(history, 1, [8]), first.write(history, 1, [9])
    for write in writes:
        with pytest.raises(Fenced, match="epoch 2 has followed 1"):
            write.result()
    with pytest.raises(Fenced):
        first.check_home()
    with pytest.raises(Fenced):
        first.save("s", history, [b"contents"], 1)
    assert second.tokens(history).tolist() == [7]
    assert list((tmp_path / "snapshots").iterdir()) == []
    second.write(history, 1, [8]).result()
    first.close()
    second.close()


def test_a_directory_that_is_locked_has_no_epoch(tmp_path: Path) -> None:
    store = StateStore(StateConfig(tmp_path), 10)
    assert store.epoch == 0
    store.check_home()
    store.close()


def test_a_fenced_directory_keeps_no_memory_that_its_users_would_share(tmp_path: Path) -> None:
    """WAL mode needs a file that processes map, which only works on one machine."""
    locked = StateStore(StateConfig(tmp_path), 10)
    locked.add(SESSION, [7]).result()
    assert (tmp_path / "sessions.db-wal").exists()
    locked.close()
    fenced = StateStore(StateConfig(tmp_path, fenced=True), 10)
    fenced.write(fenced.sessions()[0].history, 1, [8]).result()
    assert not list(tmp_path.glob("sessions.db-wal")) + list(tmp_path.glob("sessions.db-shm"))
    assert fenced.tokens(fenced.sessions()[0].history).tolist() == [7, 8]
    fenced.close()
