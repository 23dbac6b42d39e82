"""Who may write to a state directory that several machines can reach: the last process that opened it.

Opening raises the directory's epoch, and every transaction compares it with its own. SQLite lets one
transaction write at a time, so no write of an earlier process can come after the first one of a later
process: a machine that was thought dead and comes back stores nothing, and so it answers nothing.
"""

import sqlite3

from kakeya.errors import Fenced
from kakeya.storage.database import Database

_EPOCH = "epoch"


class Fence:
    """The epoch under which this process has the directory."""

    def __init__(self, database: Database) -> None:
        """Take the directory over from whoever has it."""
        self.epoch = database.ask(_raise_epoch)
        database.guard(self.check)

    def check(self, db: sqlite3.Connection) -> None:
        """Raises Fenced when a later process has the directory. Call it within a transaction."""
        now = _epoch(db)
        if now != self.epoch:
            raise Fenced(f"the state directory was taken over: epoch {now} has followed {self.epoch}")


def _raise_epoch(db: sqlite3.Connection) -> int:
    epoch = _epoch(db) + 1
    db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (_EPOCH, str(epoch)))
    return epoch


def _epoch(db: sqlite3.Connection) -> int:
    row = db.execute("SELECT value FROM facts WHERE name = ?", (_EPOCH,)).fetchone()
    return 0 if row is None else int(row[0])
