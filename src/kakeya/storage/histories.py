"""Token histories in the database. They only grow, but for tokens of a cancelled generate that nobody took.

A fork's history names its parent's and how much of it it shares. So what two sessions have in common is
stored once, and stays until the last of them is deleted.
"""

import sqlite3
from array import array
from collections.abc import Sequence

from kakeya.errors import StateDamaged
from kakeya.storage.sealing import Sealer


class Histories:
    """All within a transaction of the caller's.

    No number is given twice. SQLite would give that of a deleted history to the next one, and what is still
    to be written of the deleted one would get there: the end of its stream, or what a snapshot goes with.
    """

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer
        self._newest = 0

    def create(self, db: sqlite3.Connection, parent: int | None = None, parent_length: int = 0) -> int:
        """A new history, empty or with the first tokens of another; its number."""
        (newest,) = db.execute("SELECT coalesce(max(id), 0) FROM histories").fetchone()
        self._newest = max(self._newest, newest) + 1
        row = (self._newest, parent_length, parent, parent_length)
        db.execute("INSERT INTO histories (id, length, parent, parent_length) VALUES (?, ?, ?, ?)", row)
        return self._newest

    def length(self, db: sqlite3.Connection, history: int) -> int | None:
        """How many tokens are stored; None when the history was deleted."""
        row = db.execute("SELECT length FROM histories WHERE id = ?", (history,)).fetchone()
        return None if row is None else int(row[0])

    def write(self, db: sqlite3.Connection, history: int, start: int, tokens: Sequence[int]) -> None:
        """The history has these tokens from `start` on, and ends with them. A deleted one stays deleted."""
        length = self.length(db, history)
        if length is None:
            return
        assert start <= length, f"tokens from {start} would leave a gap behind {length}"
        if start < length:
            self._cut(db, history, start)
        if tokens:
            self._insert(db, history, start, array("i", tokens))
        if start + len(tokens) != length:
            new = (start + len(tokens), history)
            db.execute("UPDATE histories SET length = ? WHERE id = ?", new)

    def read(self, db: sqlite3.Connection, history: int) -> "array[int]":
        """All tokens. Raises StateDamaged when some are missing."""
        parts: list[array[int]] = []
        number: int | None = history
        end = self.length(db, history) or 0
        while number is not None and end > 0:
            row = db.execute("SELECT parent, parent_length FROM histories WHERE id = ?", (number,)).fetchone()
            if row is None:
                raise StateDamaged(f"history {history} goes on from one that is gone")
            parts.append(self._own(db, number, row[1], end))
            number, end = row[0], min(end, row[1])
        tokens = array("i")
        for part in reversed(parts):
            tokens.extend(part)
        return tokens

    def merge(self, db: sqlite3.Connection, history: int, start: int) -> None:
        """Make one row of those from `start` on: a stream stores a row for every few tokens."""
        length = self.length(db, history)
        query = "SELECT min(start), count(*) FROM segments WHERE history = ? AND start >= ?"
        first, rows = db.execute(query, (history, start)).fetchone()
        if length is None or rows < 2:
            return
        tokens = self._own(db, history, first, length)
        db.execute("DELETE FROM segments WHERE history = ? AND start >= ?", (history, first))
        self._insert(db, history, first, tokens)

    def delete(self, db: sqlite3.Connection, history: int) -> None:
        """Delete what no fork goes on from, and parents that were only kept for this one."""
        number: int | None = history
        while number is not None:
            query = "SELECT max(parent_length) FROM histories WHERE parent = ?"
            (needed,) = db.execute(query, (number,)).fetchone()
            if needed is not None:
                self.write(db, number, min(needed, self.length(db, number) or 0), ())
                return
            (parent,) = db.execute("SELECT parent FROM histories WHERE id = ?", (number,)).fetchone()
            db.execute("DELETE FROM segments WHERE history = ?", (number,))
            db.execute("DELETE FROM histories WHERE id = ?", (number,))
            number = None if parent is None or self._has_session(db, parent) else parent

    def _has_session(self, db: sqlite3.Connection, history: int) -> bool:
        query = "SELECT 1 FROM sessions WHERE history = ?"
        return db.execute(query, (history,)).fetchone() is not None

    def _own(self, db: sqlite3.Connection, history: int, first: int, end: int) -> "array[int]":
        """The tokens from `first` to `end` that are stored with the history itself."""
        tokens = array("i")
        query = (
            "SELECT start, tokens FROM segments WHERE history = ? AND start >= ? AND start < ? ORDER BY start"
        )
        for start, sealed in db.execute(query, (history, first, end)):
            if start != first + len(tokens):
                break
            tokens.frombytes(self._sealer.open(sealed, _context(history, start)))
        if len(tokens) < end - first:
            raise StateDamaged(f"history {history} has lost tokens behind {first + len(tokens)}")
        return tokens[: end - first]

    def _insert(self, db: sqlite3.Connection, history: int, start: int, tokens: "array[int]") -> None:
        sealed = self._sealer.seal(tokens.tobytes(), _context(history, start))
        row = (history, start, len(tokens), sealed)
        db.execute("INSERT INTO segments (history, start, count, tokens) VALUES (?, ?, ?, ?)", row)

    def _cut(self, db: sqlite3.Connection, history: int, end: int) -> None:
        """Forget the tokens from `end` on."""
        query = "SELECT start, tokens FROM segments WHERE history = ? AND start < ? AND start + count > ?"
        across = db.execute(query, (history, end, end)).fetchone()
        first = end if across is None else across[0]
        db.execute("DELETE FROM segments WHERE history = ? AND start >= ?", (history, first))
        if across is not None:
            kept = array("i", self._sealer.open(across[1], _context(history, first)))
            self._insert(db, history, first, kept[: end - first])


def _context(history: int, start: int) -> str:
    return f"history {history} from {start}"
