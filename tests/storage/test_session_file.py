"""A session's file: whole, or refused."""

from array import array

import pytest

from kakeya.errors import StateDamaged
from kakeya.storage.envelope import enveloped
from kakeya.storage.records import Details, Snapshot, StoredAnswer, StoredSession
from kakeya.storage.session_file import SessionFile, unpacked

SESSION = StoredSession("s", "me", 1, 3, 4, 4, Details("label", (1, 2)), 5.0, False, Snapshot("f", 2, 9))


@pytest.mark.parametrize("snapshot", [b"", b"keys and values"])
def test_what_is_packed_is_unpacked(snapshot: bytes) -> None:
    answers = [StoredAnswer("me", "append", "s", "r", 4)]
    moved = SessionFile(SESSION, 2, {"model": "m"}, array("i", [7, 8, 9, 10]), answers, snapshot)
    assert unpacked(b"".join(moved.packed())) == moved


@pytest.mark.parametrize("contents", [b"", b"\x02\0\0\0{}", b"\xff\0\0\0{}", b"\x02\0\0\0[]"])
def test_other_files_are_refused(contents: bytes) -> None:
    with pytest.raises(StateDamaged, match="does not hold a stored session"):
        unpacked(b"".join(enveloped(contents)))
