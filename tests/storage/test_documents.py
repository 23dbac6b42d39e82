"""Documents of front ends: stored, changed, sealed and deleted."""

from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.config import StateConfig
from kakeya.errors import StateDamaged
from kakeya.storage.files import Files
from kakeya.storage.store import StateStore
from kakeya.types import Document

LETTER = Document("letter", "a", "me", {"text": "half of a pair \ud800"}, {"read": False}, 5.0)


def test_documents_are_there_again_least_recently_used_first(tmp_path: Path) -> None:
    store = StateStore(StateConfig(tmp_path), 10)
    newer, card = replace(LETTER, name="b", used_at=3.0), replace(LETTER, kind="card")
    store.change_documents([LETTER, newer, card]).result()
    read = replace(LETTER, contents=None, state={"read": True}, used_at=6.0)
    store.change_documents([read, replace(read, name="nobody")], [("card", "a"), ("card", "z")]).result()
    store.close()
    store = StateStore(StateConfig(tmp_path), 10)
    assert store.documents("letter") == [newer, replace(read, contents=LETTER.contents)]
    assert store.documents("card") == []
    store.close()


def test_a_document_in_the_place_of_another_is_found_out(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    store = StateStore(StateConfig(tmp_path / "state", key_file=key), 10)
    store.change_documents([LETTER, replace(LETTER, name="b")]).result()
    move = (
        "UPDATE documents SET contents = (SELECT contents FROM documents WHERE name = 'b') WHERE name = 'a'"
    )
    store.submit(lambda db: db.execute(move) and None).result()
    with pytest.raises(StateDamaged, match="letter a was changed"):
        store.documents("letter")
    store.close()


class Unscrubbed(Files):
    """Cannot empty the log at first."""

    refusals = 1

    def scrub(self, connection: object) -> None:
        if self.refusals:
            self.refusals -= 1
            raise OSError(28, "no space")
        super().scrub(connection)  # type: ignore[arg-type]


def holds(directory: Path, words: bytes) -> bool:
    return any(words in path.read_bytes() for path in directory.iterdir() if path.is_file())


def test_what_is_deleted_leaves_the_log_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = StateStore(StateConfig(tmp_path), 10, Unscrubbed())
    store.change_documents([LETTER]).result()
    store.change_documents([], [("letter", "a")]).result()
    assert "still in the log of the database: cannot empty the log: the disk is full" in caplog.text
    assert holds(tmp_path, b"half of a pair")
    store.change_documents([replace(LETTER, contents={})]).result()
    assert not holds(tmp_path, b"half of a pair")
    store.close()
