"""The door of a state directory: what is stored is there again, and what nobody needs is gone."""

from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.config import StateConfig
from kakeya.errors import ConfigError, StateDamaged, StorageFailed
from kakeya.storage.files import Files
from kakeya.storage.records import Details, StoredAnswer, StoredSession
from kakeya.storage.store import StateStore

SESSION = StoredSession("s", "me", 1, 0, 0, 4, Details("label", (1, 2)), 5.0, is_open=True)


class Stuck(Files):
    """Cannot remove anything for a while."""

    is_stuck = True

    def unlink(self, path: Path) -> None:
        if self.is_stuck:
            raise OSError("stuck")
        super().unlink(path)


def test_what_is_stored_is_there_again(tmp_path: Path) -> None:
    store = StateStore(StateConfig(tmp_path), 10)
    history = store.add(SESSION, [7, 8, 9]).result()
    store.write(history, 3, [10], StoredAnswer("me", "append", "s", "r", 4)).result()
    snapshot = store.save("s", history, [b"contents"], 3)
    store.update("s", Details("other", (1,), 2, 3), 6.0, is_open=False).result()
    store.close()
    store = StateStore(StateConfig(tmp_path), 10)
    (found,) = store.sessions()
    expected = replace(SESSION, history=history, length=4, details=Details("other", (1,), 2, 3), used_at=6.0)
    assert found == replace(expected, is_open=False, snapshot=snapshot)
    assert store.tokens(history).tolist() == [7, 8, 9, 10]
    assert bytes(store.load(snapshot)) == b"contents"
    assert [answer.answer for answer in store.answers()] == [4]
    store.delete("s")
    store.delete("s")
    assert (store.sessions(), store.answers(), store.disk_bytes) == ([], [], 0)
    with pytest.raises(StateDamaged, match="is gone"):
        store.load(snapshot)
    store.close()


def test_a_snapshot_of_a_deleted_session_is_not_kept(tmp_path: Path) -> None:
    store = StateStore(StateConfig(tmp_path), 10)
    store.save("nobody", 1, [b"contents"], 3)
    assert list((tmp_path / "snapshots").iterdir()) == []
    store.close()


def test_nothing_is_added_to_what_a_fork_keeps_of_a_deleted_session(tmp_path: Path) -> None:
    store = StateStore(StateConfig(tmp_path), 10)
    history = store.add(SESSION, [7, 8]).result()
    store.fork(replace(SESSION, session_id="fork", length=2), history, "s").result()
    store.delete("s")
    store.write_rest("s", history, [7, 8, 9]).result()
    assert store.tokens(history).tolist() == [7, 8]
    store.close()


def test_files_without_a_session_are_removed_at_the_start(tmp_path: Path) -> None:
    StateStore(StateConfig(tmp_path), 10).close()
    (tmp_path / "snapshots" / "stray").write_text("x")
    StateStore(StateConfig(tmp_path), 10).close()
    assert list((tmp_path / "snapshots").iterdir()) == []


def test_a_file_that_cannot_be_removed_is_removed_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Stuck()
    store = StateStore(StateConfig(tmp_path), 10, files)
    history = store.add(SESSION).result()
    for computed in (1, 2, 3):
        snapshot = store.save("s", history, [b"contents"], computed)
    assert "a snapshot that is not needed stays for now: cannot remove" in caplog.text
    assert store.disk_bytes == 3 * snapshot.bytes, "it takes its room"
    files.is_stuck = False
    store.delete("s")
    assert (list((tmp_path / "snapshots").iterdir()), store.disk_bytes) == ([], 0)
    store.close()


def test_the_disk_tier_is_bounded(tmp_path: Path) -> None:
    store = StateStore(StateConfig(tmp_path, disk_tier_bytes=120), 10)
    history = store.add(SESSION).result()
    store.save("s", history, [b"x" * 40], 1)
    with pytest.raises(StorageFailed, match="full: 104 of 120 bytes are used, 104 are needed"):
        store.save("s", history, [b"x" * 40], 2)
    store.close()


def test_only_the_newest_answers_of_each_owner_stay(tmp_path: Path) -> None:
    store = StateStore(StateConfig(tmp_path), 10)
    history = store.add(SESSION).result()
    for number in range(64):
        owner = "me" if number else "other"
        store.write(history, 0, (), StoredAnswer(owner, "append", "s", f"r{number}", number)).result()
    assert [answer.answer for answer in store.answers()] == [0, *range(54, 64)]
    store.close()


def test_another_model_is_refused(tmp_path: Path) -> None:
    store = StateStore(StateConfig(tmp_path), 10)
    store.check_model("a", "g")
    with pytest.raises(ConfigError, match="another model or weight format: a, here b"):
        store.check_model("b", "g")
    store.close()
