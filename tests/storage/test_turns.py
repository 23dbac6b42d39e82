"""What turns brought back: stored by history, copied for forks, and kept as long as it may be needed."""

import sqlite3
from pathlib import Path

import pytest

from kakeya.storage.schema import migrate
from kakeya.storage.sealing import open_sealer
from kakeya.storage.turns import StoredTurn, Turns
from kakeya.types import TokenRange

FIRST = StoredTurn(100, 110, (TokenRange(3, 5), TokenRange(20, 30)))
SECOND = StoredTurn(150, 151, ())
THIRD = StoredTurn(190, 200, (TokenRange(7, 9),))


@pytest.fixture
def db() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection)
    for _ in range(2):
        connection.execute("INSERT INTO histories (length, parent_length) VALUES (0, 0)")
    return connection


@pytest.fixture(params=[False, True])
def turns(request: pytest.FixtureRequest, tmp_path: Path) -> Turns:
    key = tmp_path / "key"
    key.write_text("a key of some length")
    return Turns(open_sealer(key if request.param else None))


def test_a_turn_is_stored_as_its_answer_grows(db: sqlite3.Connection, turns: Turns) -> None:
    turns.put(db, 1, FIRST)
    turns.put(db, 1, SECOND)
    turns.put(db, 2, THIRD)
    longer = StoredTurn(150, 160, ())
    turns.put(db, 1, longer)
    assert turns.of(db, 1) == [FIRST, longer]
    assert turns.newest(db) == {1: longer, 2: THIRD}
    turns.delete(db, 1)
    assert turns.newest(db) == {2: THIRD}


def test_a_turn_of_which_nothing_was_taken_is_forgotten(db: sqlite3.Connection, turns: Turns) -> None:
    turns.put(db, 1, FIRST)
    turns.take_back(db, 1, StoredTurn(100, 110, ()))  # another one, that ended before
    assert turns.of(db, 1) == [FIRST]
    turns.take_back(db, 1, StoredTurn(100, 109, ()))
    assert turns.of(db, 1) == []


def test_a_fork_has_had_the_same_turns(db: sqlite3.Connection, turns: Turns) -> None:
    turns.put(db, 1, FIRST)
    turns.copy(db, 1, 2)
    turns.put(db, 2, THIRD)
    assert (turns.of(db, 1), turns.of(db, 2)) == ([FIRST], [FIRST, THIRD])


@pytest.mark.parametrize(
    ("start", "kept"), [(0, 3), (99, 3), (100, 3), (149, 3), (150, 2), (189, 2), (190, 1), (500, 1)]
)
def test_what_tokens_saw_that_may_be_computed_again_is_kept(
    db: sqlite3.Connection, turns: Turns, start: int, kept: int
) -> None:
    for turn in (FIRST, SECOND, THIRD):
        turns.put(db, 1, turn)
    turns.forget_before(db, 1, start)
    assert turns.of(db, 1) == [FIRST, SECOND, THIRD][-kept:]
