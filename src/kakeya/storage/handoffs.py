"""Sessions that move from one state directory to another: exactly one of them has the session at any time.

The sender marks the session as leaving before it sends anything. The receiver stores it under the next epoch.
A sender that never learns what came of it asks: the receiver then has it, or will never take that epoch.
"""

import sqlite3
from dataclasses import dataclass

from kakeya.errors import Conflict

LEAVING, TAKEN, REFUSED, GONE = "leaving", "taken", "refused", "gone"


@dataclass(frozen=True)
class Leaving:
    """A session that was being sent. `epoch` is the one under which `peer` may have taken it."""

    session_id: str
    epoch: int
    peer: str


def leave(db: sqlite3.Connection, session_id: str, peer: str) -> int:
    """Mark it as leaving; the epoch that its next home has."""
    epoch = _epoch(db, session_id) + 1
    _put(db, session_id, epoch, LEAVING, peer)
    return epoch


def stay(db: sqlite3.Connection, session_id: str) -> None:
    """It was not taken, and never will be under that epoch: this is its home again."""
    epoch = _epoch(db, session_id)
    _put(db, session_id, epoch, TAKEN, "")


def gone(db: sqlite3.Connection, session_id: str) -> None:
    """It was taken elsewhere. That it was here stays known: who sent it here may still ask."""
    _put(db, session_id, _epoch(db, session_id), GONE, "")


def take(db: sqlite3.Connection, session_id: str, epoch: int) -> None:
    """This is its home from now on. Raises Conflict when the sender was told otherwise before."""
    known = _epoch(db, session_id)
    if known >= epoch:
        raise Conflict(f"session {session_id!r} comes with epoch {epoch}, and epoch {known} was here before")
    _put(db, session_id, epoch, TAKEN, "")


def was_taken(db: sqlite3.Connection, session_id: str, epoch: int) -> bool:
    """Whether it was taken under this epoch or a later one. If not, it never will be."""
    row = db.execute("SELECT epoch, state FROM handoffs WHERE session = ?", (session_id,)).fetchone()
    if row is not None and row[0] >= epoch:
        return bool(row[1] != REFUSED)
    _put(db, session_id, epoch, REFUSED, "")
    return False


def leaving(db: sqlite3.Connection) -> list[Leaving]:
    """Those of which nobody knows yet whether they were taken."""
    query = "SELECT session, epoch, peer FROM handoffs WHERE state = ?"
    return [Leaving(*row) for row in db.execute(query, (LEAVING,))]


def _epoch(db: sqlite3.Connection, session_id: str) -> int:
    row = db.execute("SELECT epoch FROM handoffs WHERE session = ?", (session_id,)).fetchone()
    return 0 if row is None else int(row[0])


def _put(db: sqlite3.Connection, session_id: str, epoch: int, state: str, peer: str) -> None:
    db.execute("INSERT OR REPLACE INTO handoffs VALUES (?, ?, ?, ?)", (session_id, epoch, state, peer))
