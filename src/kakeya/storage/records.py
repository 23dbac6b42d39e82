"""Rows of the database: sessions, their snapshots, and answers to request ids."""

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kakeya.storage.sealing import Sealer


@dataclass(frozen=True)
class Details:
    """What is kept of a session beside its tokens, its keys and its values."""

    client_label: str
    eos_token_ids: tuple[int, ...]
    turns: int = 0
    generated_tokens: int = 0
    recall: str | None = None
    """What it has of recall beside its slab, as the engine writes it."""
    holder: str = ""
    """The front end that keeps it for its own clients."""
    created_at: float = 0.0
    """Seconds since 1970; 0 for one from before that was stored."""


@dataclass(frozen=True)
class Snapshot:
    """A file with the keys and values of the first `computed` tokens."""

    file: str
    computed: int
    bytes: int


@dataclass(frozen=True)
class StoredSession:
    """A session as it is stored. `is_open`: it may have gone on since, which nobody stored."""

    session_id: str
    owner: str
    number: int
    history: int
    length: int
    sink: int
    details: Details
    used_at: float
    is_open: bool
    snapshot: Snapshot | None = None


@dataclass(frozen=True)
class StoredAnswer:
    """What a call with a request id was answered with, as JSON knows it."""

    owner: str
    call: str
    session_id: str
    request_id: str
    answer: Any


class Records:
    """All within a transaction of the caller's."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer

    # Sessions.

    def add_session(self, db: sqlite3.Connection, session: StoredSession) -> None:
        details = self._sealed(asdict(session.details), f"session {session.session_id}")
        file = None if session.snapshot is None else session.snapshot.file
        db.execute(
            "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                session.session_id,
                session.owner,
                session.number,
                session.history,
                session.sink,
                details,
                session.used_at,
                session.is_open,
                file,
            ),
        )

    def sessions(self, db: sqlite3.Connection) -> Iterator[StoredSession]:
        """All of them, in the order of their creation."""
        query = (
            "SELECT s.id, s.owner, s.number, s.history, h.length, s.sink, s.details, s.used_at, s.is_open, "
            "s.snapshot, p.computed, p.bytes FROM sessions s JOIN histories h ON h.id = s.history "
            "LEFT JOIN snapshots p ON p.file = s.snapshot ORDER BY s.number"
        )
        for row in db.execute(query):
            details = self._opened(row[6], f"session {row[0]}")
            details["eos_token_ids"] = tuple(details["eos_token_ids"])
            snapshot = None if row[9] is None else Snapshot(*row[9:])
            session_id, owner, number, history, length, sink = row[:6]
            yield StoredSession(
                session_id,
                owner,
                number,
                history,
                length,
                sink,
                Details(**details),
                row[7],
                bool(row[8]),
                snapshot,
            )

    def update_session(
        self, db: sqlite3.Connection, session_id: str, details: Details, used_at: float, *, is_open: bool
    ) -> None:
        sealed = self._sealed(asdict(details), f"session {session_id}")
        db.execute(
            "UPDATE sessions SET details = ?, used_at = ?, is_open = ? WHERE id = ?",
            (sealed, used_at, is_open, session_id),
        )

    def has_session(self, db: sqlite3.Connection, session_id: str) -> bool:
        query = "SELECT 1 FROM sessions WHERE id = ?"
        return db.execute(query, (session_id,)).fetchone() is not None

    def delete_session(self, db: sqlite3.Connection, session_id: str) -> tuple[int, str | None] | None:
        """Its history and its snapshot's file; None when there is no such session."""
        query = "SELECT history, snapshot FROM sessions WHERE id = ?"
        row: tuple[int, str | None] | None = db.execute(query, (session_id,)).fetchone()
        if row is not None:
            db.execute("DELETE FROM sessions WHERE id = ?", (session_id,))
            calls = ("append", "generate", "recall")  # who created it may still ask what came of that
            db.execute("DELETE FROM answers WHERE session = ? AND call IN (?, ?, ?)", (session_id, *calls))
        return row

    # Snapshots.

    def snapshot_of(self, db: sqlite3.Connection, session_id: str) -> Snapshot | None:
        query = "SELECT p.* FROM snapshots p JOIN sessions s ON s.snapshot = p.file WHERE s.id = ?"
        row = db.execute(query, (session_id,)).fetchone()
        return None if row is None else Snapshot(*row)

    def add_snapshot(self, db: sqlite3.Connection, new: Snapshot) -> None:
        db.execute("INSERT INTO snapshots VALUES (?, ?, ?)", (new.file, new.computed, new.bytes))

    def replace_snapshot(self, db: sqlite3.Connection, session_id: str, new: Snapshot) -> str | None:
        """The session has this snapshot from now on; the file of the last one, if nobody needs it."""
        query = "SELECT snapshot FROM sessions WHERE id = ?"
        row = db.execute(query, (session_id,)).fetchone()
        if row is None:
            return new.file  # the session was deleted in the meantime
        self.add_snapshot(db, new)
        db.execute("UPDATE sessions SET snapshot = ? WHERE id = ?", (new.file, session_id))
        return self.drop_snapshot(db, row[0])

    def drop_snapshot(self, db: sqlite3.Connection, file: str | None) -> str | None:
        """Forget a snapshot that no session has any more; its file, which can then be removed."""
        used = db.execute("SELECT 1 FROM sessions WHERE snapshot = ?", (file,)).fetchone()
        if file is None or used is not None:
            return None
        db.execute("DELETE FROM snapshots WHERE file = ?", (file,))
        return file

    # Answers.

    def answer(self, db: sqlite3.Connection, answer: StoredAnswer) -> None:
        """Remember it, in the place of an earlier one for the same call."""
        key = (answer.owner, answer.call, answer.session_id, answer.request_id)
        sealed = self._sealed(answer.answer, f"answer {answer.request_id}")
        db.execute(
            "INSERT INTO answers (owner, call, session, request, answer) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET answer = excluded.answer",
            (*key, sealed),
        )

    def replace_answer(self, db: sqlite3.Connection, answer: StoredAnswer) -> None:
        """Put it in the place of an earlier one for the same call, if that is kept."""
        sealed = self._sealed(answer.answer, f"answer {answer.request_id}")
        key = (answer.owner, answer.call, answer.session_id, answer.request_id)
        db.execute(
            "UPDATE answers SET answer = ? WHERE owner = ? AND call = ? AND session = ? AND request = ?",
            (sealed, *key),
        )

    def answers(self, db: sqlite3.Connection) -> Iterator[StoredAnswer]:
        """All of them, oldest first."""
        query = "SELECT owner, call, session, request, answer FROM answers ORDER BY id"
        for owner, call, session_id, request_id, sealed in db.execute(query):
            answer = self._opened(sealed, f"answer {request_id}")
            yield StoredAnswer(owner, call, session_id, request_id, answer)

    def forget_answers(self, db: sqlite3.Connection, most: int) -> None:
        """Keep the newest of each owner."""
        owners = db.execute(
            "SELECT owner FROM answers GROUP BY owner HAVING count(*) > ?", (most,)
        ).fetchall()
        for (owner,) in owners:
            db.execute(
                "DELETE FROM answers WHERE owner = ?1 AND id <= "
                "(SELECT id FROM answers WHERE owner = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)",
                (owner, most),
            )

    def _sealed(self, contents: Any, context: str) -> bytes | memoryview:
        return self._sealer.seal(json.dumps(contents, separators=(",", ":")).encode(), context)

    def _opened(self, sealed: bytes, context: str) -> Any:
        return json.loads(bytes(self._sealer.open(sealed, context)))
