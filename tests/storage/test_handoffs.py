"""A session on its way between two directories: one has it, whatever gets lost on the way."""

import sqlite3
from collections.abc import Iterator

import pytest

from kakeya.errors import Conflict
from kakeya.storage import handoffs
from kakeya.storage.handoffs import Leaving
from kakeya.storage.schema import migrate


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    migrate(connection)
    yield connection
    connection.close()


def test_a_session_leaves_and_comes_back(db: sqlite3.Connection) -> None:
    assert handoffs.leave(db, "s", "b") == 1
    assert handoffs.leaving(db) == [Leaving("s", 1, "b")]
    handoffs.gone(db, "s")
    assert handoffs.leaving(db) == []
    handoffs.take(db, "s", 2)
    assert handoffs.was_taken(db, "s", 2)
    assert handoffs.leave(db, "s", "b") == 3


def test_what_was_taken_is_known_after_the_session(db: sqlite3.Connection) -> None:
    handoffs.take(db, "s", 1)
    with pytest.raises(Conflict, match="epoch 1 was here before"):
        handoffs.take(db, "s", 1)
    assert handoffs.was_taken(db, "s", 1)


def test_what_was_taken_is_known_after_the_session_has_moved_on(db: sqlite3.Connection) -> None:
    """Else its first sender, which never got a reply, would believe to have it still."""
    handoffs.take(db, "s", 1)
    assert handoffs.leave(db, "s", "c") == 2
    handoffs.gone(db, "s")
    assert handoffs.was_taken(db, "s", 1)
    assert handoffs.leaving(db) == []


def test_who_says_that_it_was_not_taken_never_takes_it(db: sqlite3.Connection) -> None:
    assert not handoffs.was_taken(db, "s", 1)
    with pytest.raises(Conflict):
        handoffs.take(db, "s", 1)
    assert not handoffs.was_taken(db, "s", 1)
    handoffs.take(db, "s", 2)


def test_a_session_that_was_refused_stays_and_may_leave_again(db: sqlite3.Connection) -> None:
    handoffs.leave(db, "s", "b")
    handoffs.stay(db, "s")
    assert handoffs.leaving(db) == []
    assert handoffs.leave(db, "s", "b") == 2
