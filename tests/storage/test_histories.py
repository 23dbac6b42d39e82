"""Histories: they grow, are cut, share their beginnings, and are deleted when nobody needs them."""

import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya.errors import StateDamaged
from kakeya.storage.histories import Histories
from kakeya.storage.schema import migrate
from kakeya.storage.sealing import AesSealer, Sealer


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(tmp_path / "db", isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    migrate(connection)
    yield connection
    connection.close()


def rows(db: sqlite3.Connection) -> int:
    return db.execute("SELECT count(*) FROM segments").fetchone()[0]


@pytest.mark.parametrize("sealer", [Sealer(), AesSealer(b"a secret of some length")])
def test_histories_are_what_was_written(db: sqlite3.Connection, sealer: Sealer) -> None:
    """Random writes, cuts, forks, merges and deletions against lists."""
    histories, chance = Histories(sealer), random.Random(3)
    known: dict[int, list[int]] = {histories.create(db): []}
    shared: dict[int, int] = dict.fromkeys(known, 0)
    for _ in range(400):
        number = chance.choice(list(known))
        tokens = known[number]
        match chance.choice(["write", "write", "cut", "fork", "merge", "delete"]):
            case "write":
                new = [chance.randrange(50_000) for _ in range(chance.randrange(5))]
                histories.write(db, number, len(tokens), new)
                tokens += new
            case "cut":
                start = chance.randint(shared[number], len(tokens))
                histories.write(db, number, start, [1])
                known[number] = [*tokens[:start], 1]
            case "fork":
                fork = histories.create(db, number, len(tokens))
                known[fork], shared[fork], shared[number] = list(tokens), len(tokens), len(tokens)
            case "merge":
                histories.merge(db, number, chance.randrange(len(tokens) + 1))
            case "delete" if len(known) > 3:
                del known[number]
                db.execute("DELETE FROM sessions")
                for each in known:
                    row = (str(each), "", 1, each, 0, b"", 0.0, 0, None)
                    db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
                histories.delete(db, number)
        for each, expected in known.items():
            assert histories.read(db, each).tolist() == expected
    db.execute("DELETE FROM sessions")
    for number in known:
        histories.delete(db, number)
    assert rows(db) == 0
    assert db.execute("SELECT count(*) FROM histories").fetchone()[0] == 0


def test_rows_become_one(db: sqlite3.Connection) -> None:
    histories = Histories(Sealer())
    number = histories.create(db)
    for start in range(20):
        histories.write(db, number, start, [start])
    histories.merge(db, number, 5)
    assert rows(db) == 6
    assert histories.read(db, number).tolist() == list(range(20))


def test_a_deleted_history_stays_deleted(db: sqlite3.Connection) -> None:
    histories = Histories(Sealer())
    number = histories.create(db)
    histories.delete(db, number)
    histories.write(db, number, 0, [1])
    assert rows(db) == 0


def test_a_number_is_never_given_twice(db: sqlite3.Connection) -> None:
    histories = Histories(Sealer())
    first = histories.create(db)
    histories.delete(db, first)
    second = histories.create(db)
    assert second != first
    histories.write(db, second, 0, [1, 2, 3])
    histories.write(db, first, 1, [9])
    assert histories.read(db, second).tolist() == [1, 2, 3]
    assert Histories(Sealer()).create(db) == second + 1, "the next process begins behind those that are there"


def test_lost_tokens_are_told(db: sqlite3.Connection) -> None:
    histories = Histories(Sealer())
    number = histories.create(db)
    for start in range(3):
        histories.write(db, number, start, [start])
    db.execute("DELETE FROM segments WHERE start = 1")
    with pytest.raises(StateDamaged, match="lost tokens behind 1"):
        histories.read(db, number)
    fork = histories.create(db, number, 3)
    db.execute("DELETE FROM segments")
    db.execute("DELETE FROM histories WHERE id = ?", (number,))
    with pytest.raises(StateDamaged, match="is gone"):
        histories.read(db, fork)
