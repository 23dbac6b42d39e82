"""What turns brought back, in the database: without it, a session with recall cannot be computed again."""

import json
import sqlite3
from dataclasses import dataclass

from kakeya.storage.sealing import Sealer
from kakeya.types import TokenRange

_COLUMNS = "position, end, recalled"


@dataclass(frozen=True)
class StoredTurn:
    """From `position` on, tokens of a history saw these ranges. Its answer goes to `end` so far."""

    position: int
    end: int
    recalled: tuple[TokenRange, ...]


class Turns:
    """By history, in order. All within a transaction of the caller's."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer

    def put(self, db: sqlite3.Connection, history: int, turn: StoredTurn) -> None:
        """Store a turn, or how far its answer goes by now."""
        pairs = json.dumps([(each.start, each.end) for each in turn.recalled]).encode()
        sealed = self._sealer.seal(pairs, _context(turn.position))
        row = (history, turn.position, turn.end, sealed)
        db.execute("INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?)", row)

    def take_back(self, db: sqlite3.Connection, history: int, turn: StoredTurn) -> None:
        """Forget a turn of which nothing was taken behind its `end`."""
        where = (history, turn.position, turn.end)
        db.execute("DELETE FROM turns WHERE history = ? AND position = ? AND end > ?", where)

    def of(self, db: sqlite3.Connection, history: int) -> list[StoredTurn]:
        query = f"SELECT {_COLUMNS} FROM turns WHERE history = ? ORDER BY position"
        return [self._turn(row) for row in db.execute(query, (history,))]

    def newest(self, db: sqlite3.Connection) -> dict[int, StoredTurn]:
        """The last turn of each history that has any."""
        query = f"SELECT history, {_COLUMNS}, max(position) FROM turns GROUP BY history"
        return {row[0]: self._turn(row[1:4]) for row in db.execute(query)}

    def copy(self, db: sqlite3.Connection, history: int, fork: int) -> None:
        """A fork has had the same turns."""
        query = f"INSERT INTO turns SELECT ?, {_COLUMNS} FROM turns WHERE history = ?"
        db.execute(query, (fork, history))

    def forget_before(self, db: sqlite3.Connection, history: int, start: int) -> None:
        """Tokens before `start` are never computed again: keep what those from there on saw."""
        query = "SELECT max(position) FROM turns WHERE history = ? AND position <= ?"
        (seen,) = db.execute(query, (history, start)).fetchone()
        db.execute("DELETE FROM turns WHERE history = ? AND position < ?", (history, seen or 0))

    def delete(self, db: sqlite3.Connection, history: int) -> None:
        db.execute("DELETE FROM turns WHERE history = ?", (history,))

    def _turn(self, row: tuple[int, int, bytes]) -> StoredTurn:
        position, end, sealed = row
        pairs = json.loads(bytes(self._sealer.open(sealed, _context(position))))
        return StoredTurn(position, end, tuple(TokenRange(*pair) for pair in pairs))


def _context(position: int) -> str:
    return f"turn {position}"
