"""The database: waiting work shares a transaction, and only what cannot be stored fails."""

import sqlite3
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from kakeya.errors import ConfigError, InvalidArgument, StorageFailed, Unavailable
from kakeya.storage.database import Database
from kakeya.storage.files import Files
from kakeya.storage.schema import MIGRATIONS


class Counting(Files):
    """Counts commits, and fails those that it was told to."""

    def __init__(self) -> None:
        super().__init__()
        self.commits = 0
        self.failing = 0

    def commit(self, connection: sqlite3.Connection) -> None:
        self.commits += 1
        if self.failing:
            self.failing -= 1
            raise sqlite3.OperationalError("disk I/O error")
        super().commit(connection)


def note(name: str) -> "object":
    return lambda db: db.execute("INSERT INTO facts VALUES (?, 'x')", (name,)).lastrowid


def busy(database: Database) -> "tuple[Future[bool], threading.Event]":
    """Work that is being done until the event is set."""
    began, go = threading.Event(), threading.Event()

    def wait(db: sqlite3.Connection) -> bool:
        began.set()
        return go.wait(10)

    work = database.submit(wait)
    assert began.wait(10)
    return work, go


def names(database: Database) -> set[str]:
    return {name for (name,) in database.ask(lambda db: db.execute("SELECT name FROM facts").fetchall())}


def test_work_that_waits_shares_a_commit(tmp_path: Path) -> None:
    files = Counting()
    database = Database(tmp_path / "db", files, sync=True)
    first, go = busy(database)
    rest = [database.submit(note(f"n{place}")) for place in range(20)]
    go.set()
    assert first.result()
    for each in rest:
        each.result()
    assert files.commits == 2
    database.close()
    database.close()
    with pytest.raises(Unavailable):
        database.submit(note("late"))
    again = Database(tmp_path / "db", Files(), sync=False)
    assert len(names(again)) == 20
    again.close()


def test_only_what_cannot_be_stored_fails(tmp_path: Path) -> None:
    files = Counting()
    database = Database(tmp_path / "db", files, sync=False)

    def refuse(db: sqlite3.Connection) -> None:
        raise InvalidArgument("no")

    def break_down(db: sqlite3.Connection) -> None:
        raise ZeroDivisionError

    first, go = busy(database)
    works = [database.submit(each) for each in (note("a"), refuse, break_down, note("b"), note("c"))]
    go.set()
    first.result()
    assert isinstance(works[1].exception(), InvalidArgument)
    assert isinstance(works[2].exception(), ZeroDivisionError)
    assert names(database) == {"a", "b", "c"}
    with pytest.raises(StorageFailed, match="UNIQUE"):
        database.ask(note("a"))
    first, go = busy(database)
    works = [database.submit(note(name)) for name in ("d", "e")]
    first.add_done_callback(lambda _: setattr(files, "failing", 2))  # the group, and then d alone
    go.set()
    assert isinstance(works[0].exception(), StorageFailed)
    works[1].result()
    assert names(database) == {"a", "b", "c", "e"}
    database.close()


def test_a_full_disk_refuses_and_recovers(tmp_path: Path) -> None:
    database = Database(tmp_path / "db", Files(), sync=False)
    database.ask(lambda db: db.execute("PRAGMA max_page_count = 1"))
    with pytest.raises(StorageFailed, match="full"):
        database.ask(lambda db: db.execute("INSERT INTO facts VALUES ('a', ?)", ("x" * 100_000,)))
    database.ask(lambda db: db.execute("PRAGMA max_page_count = 100000"))
    database.ask(note("a"))
    assert names(database) == {"a"}
    database.close()


def test_what_is_deleted_leaves_the_log_when_nobody_reads_it_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(tmp_path / "db", Files(), sync=False)
    database.ask(lambda db: db.execute("PRAGMA busy_timeout = 10").fetchone())
    database.ask(note("XYZZYPLUGH"))
    reader = sqlite3.connect(tmp_path / "db")
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM facts").fetchone() == (1,)
    database.submit(lambda db: db.execute("DELETE FROM facts").rowcount, scrub=True).result()
    assert "another program reads the database" in caplog.text
    assert b"XYZZYPLUGH" in (tmp_path / "db-wal").read_bytes()
    reader.close()
    database.ask(note("b"))
    for path in tmp_path.iterdir():
        assert b"XYZZYPLUGH" not in path.read_bytes()
    database.close()


def test_a_transaction_that_could_not_be_ended_is_ended_by_the_next(tmp_path: Path) -> None:
    database = Database(tmp_path / "db", Files(), sync=False)
    database._connection.execute("BEGIN")
    with pytest.raises(StorageFailed, match="within a transaction"):
        database.ask(note("a"))
    database.ask(note("b"))
    assert names(database) == {"b"}
    database.close()


def test_databases_of_the_future_and_of_others_are_refused(tmp_path: Path) -> None:
    Database(tmp_path / "db", Files(), sync=False).close()
    connection = sqlite3.connect(tmp_path / "db")
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    with pytest.raises(ConfigError, match="newer program"):
        Database(tmp_path / "db", Files(), sync=False)
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(ConfigError, match="cannot be opened"):
        Database(tmp_path / "text", Files(), sync=False)
