"""The door of a state directory: sessions, their token histories, snapshots of their keys and values, and
the documents of front ends.

lock            held by the one server that uses it, unless an epoch in the database fences it
sessions.db     SQLite (WAL unless it is fenced): sessions, histories, answers to request ids, documents
snapshots/      one file for each snapshot: safetensors in an envelope with a digest
"""

import sqlite3
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

from kakeya.config import StateConfig
from kakeya.errors import ConfigError, StateMismatch
from kakeya.storage import handoffs
from kakeya.storage.database import Database
from kakeya.storage.documents import Documents
from kakeya.storage.fence import Fence
from kakeya.storage.files import DirectoryLock, Files
from kakeya.storage.handoffs import Leaving
from kakeya.storage.histories import Histories
from kakeya.storage.records import Details, Records, Snapshot, StoredAnswer, StoredSession
from kakeya.storage.sealing import open_sealer
from kakeya.storage.session_file import SessionFile
from kakeya.storage.snapshots import SnapshotFiles
from kakeya.storage.turns import StoredTurn, Turns
from kakeya.types import Document, Durability

T = TypeVar("T")
_PRUNE_EVERY = 64
_DURABILITY = "durability"


class StateStore:
    """Use it from any thread. Calls that return a Future do not wait; its result says that it is stored.

    Raises StorageFailed when the directory cannot be written or read; nothing has changed then.
    """

    def __init__(self, config: StateConfig, most_answers: int, files: Files | None = None) -> None:
        """Open the directory, or make it. Raises ConfigError: in use, from another version or key."""
        sync = config.durability is Durability.POWER
        self.config = config
        self._files = files or Files(sync=sync)
        snapshots = config.directory / "snapshots"
        self._most_answers, self._answered = most_answers, 0
        for directory in (config.directory, snapshots):
            self._files.make_directory(directory)
        self._lock = None if config.fenced else DirectoryLock(config.directory)
        self._database: Database | None = None
        try:
            self._sealer = open_sealer(config.key_file)
            self.histories, self.records = Histories(self._sealer), Records(self._sealer)
            self.turns = Turns(self._sealer)
            self._documents = Documents(self._sealer)
            self._database = Database(
                config.directory / "sessions.db", self._files, sync=sync, shared=config.fenced
            )
            self._fence = Fence(self._database) if config.fenced else None
            self._claim("sealing", self._sealer.name, "was written with another key, or with none")
            last = self._ask(partial(_kept_fact, name=_DURABILITY, value=config.durability.value))
            self._last_durability = Durability(last)
            known, limit = self._ask(_known_snapshots), config.disk_tier_bytes
            self._snapshots = SnapshotFiles(snapshots, self._files, self._sealer, limit, known)
        except BaseException:
            self.close()
            raise

    def check_model(self, fingerprint: str, geometry: str) -> None:
        """Raises ConfigError when the directory holds sessions of another model or cache geometry."""
        self._claim("model", fingerprint, "belongs to another model or weight format")
        self._claim("geometry", geometry, "has sessions of another cache geometry")

    @property
    def epoch(self) -> int:
        """How often the directory was taken over; 0 for one that is locked instead."""
        return 0 if self._fence is None else self._fence.epoch

    def check_home(self) -> None:
        """Raises Fenced when another process has taken the directory over."""
        self._ask(lambda db: None)

    @property
    def is_durable(self) -> bool:
        """Whether what is acknowledged must be stored first."""
        return self.config.durability is not Durability.NONE

    @property
    def was_durable(self) -> bool:
        """The same of the last process: what it left open in a crash is whole."""
        return self._last_durability is not Durability.NONE

    def take_over(self) -> None:
        """All that is here is whole. From now on our own durability says what a crash costs."""
        durability = self.config.durability

        def close_all(db: sqlite3.Connection) -> None:
            db.execute("UPDATE sessions SET is_open = 0 WHERE is_open")
            db.execute("UPDATE facts SET value = ? WHERE name = ?", (durability.value, _DURABILITY))

        if self._last_durability is not durability:
            self._ask(close_all)
            self._last_durability = durability

    @property
    def disk_bytes(self) -> int:
        """What the snapshots take, and those that are being written."""
        return self._snapshots.size

    # Sessions.

    def sessions(self) -> list[StoredSession]:
        return self._ask(lambda db: list(self.records.sessions(db)))

    def add(
        self,
        session: StoredSession,
        tokens: Sequence[int] = (),
        answer: StoredAnswer | None = None,
    ) -> "Future[int]":
        """A new session with these tokens; the number of its history."""

        def add(db: sqlite3.Connection) -> int:
            history = self.histories.create(db)
            self.histories.write(db, history, 0, tokens)
            self.records.add_session(db, replace(session, history=history))
            self._remember(db, answer)
            return history

        return self._submit(add)

    def fork(
        self, session: StoredSession, parent: int, original: str, answer: StoredAnswer | None = None
    ) -> "Future[tuple[int, Snapshot | None]]":
        """A new session that shares the first `length` tokens of its parent's history, and the snapshot of
        the original session; the number of its own history, and that snapshot."""

        def add(db: sqlite3.Connection) -> tuple[int, Snapshot | None]:
            history = self.histories.create(db, parent, session.length)
            self.turns.copy(db, parent, history)
            snapshot = self.records.snapshot_of(db, original)
            self.records.add_session(db, replace(session, history=history, snapshot=snapshot))
            self._remember(db, answer)
            return history, snapshot

        return self._submit(add)

    def write(
        self, history: int, start: int, tokens: Sequence[int], answer: StoredAnswer | None = None
    ) -> "Future[None]":
        """The history has these tokens from `start` on, and ends with them."""

        def write(db: sqlite3.Connection) -> None:
            self.histories.write(db, history, start, tokens)
            self._remember(db, answer)

        return self._submit(write)

    def write_rest(self, session_id: str, history: int, tokens: Sequence[int]) -> "Future[None]":
        """The session's history has these tokens: store those that are not stored yet."""

        def write(db: sqlite3.Connection) -> None:
            length = self.histories.length(db, history) or 0
            if self.records.has_session(db, session_id):
                self.histories.write(db, history, length, tokens[length:])

        return self._submit(write)

    def submit(self, work: "Callable[[sqlite3.Connection], T]") -> "Future[T]":
        """Work of the caller's own on `histories`, `turns` and `records`, in a transaction."""
        return self._submit(work)

    def remember(self, db: sqlite3.Connection, answer: StoredAnswer) -> None:
        """Keep an answer, within a transaction of the caller's."""
        self._remember(db, answer)

    def update(
        self,
        session_id: str,
        details: Details,
        used_at: float,
        answer: StoredAnswer | None = None,
        *,
        is_open: bool,
    ) -> "Future[None]":
        def update(db: sqlite3.Connection) -> None:
            self.records.update_session(db, session_id, details, used_at, is_open=is_open)
            self._remember(db, answer)

        return self._submit(update)

    def delete(self, session_id: str) -> None:
        """Delete a session, and what nobody else needs of its history and its snapshot."""
        self._snapshots.remove(self._submit(lambda db: self._forget(db, session_id), scrub=True).result())

    # Sessions that move to another directory.

    def leave(self, session_id: str, peer: str) -> int:
        """Mark a session as leaving, before it is sent; the epoch of its next home."""
        return self._ask(lambda db: handoffs.leave(db, session_id, peer))

    def pack(self, session_id: str, epoch: int) -> list[bytes | memoryview]:
        """All that is stored of a session that sleeps on the disk, as the parts of a file."""

        def read(db: sqlite3.Connection) -> SessionFile:
            (stored,) = (each for each in self.records.sessions(db) if each.session_id == session_id)
            answers = [each for each in self.records.answers(db) if each.session_id == session_id]
            turns, tokens = self.turns.of(db, stored.history), self.histories.read(db, stored.history)
            return SessionFile(stored, epoch, self._model(db), tokens, answers, b"", tuple(turns))

        moved = self._ask(read)
        snapshot = moved.session.snapshot
        return replace(moved, snapshot=b"" if snapshot is None else self.load(snapshot)).packed()

    def take_in(self, moved: SessionFile, number: int) -> StoredSession:
        """Store a session that comes from elsewhere, the owner's `number`-th here. Waits for the disk.

        Raises StateMismatch for one of another model, Conflict for one that was here or was refused before.
        """
        model = self._ask(self._model)
        if moved.model != model:
            raise StateMismatch(f"the session is of {moved.model}, and sessions here are of {model}")
        snapshot = self._write_snapshot(moved.snapshot, moved.session)

        def add(db: sqlite3.Connection) -> StoredSession:
            handoffs.take(db, moved.session.session_id, moved.epoch)
            history = self.histories.create(db)
            self.histories.write(db, history, 0, moved.tokens)
            for turn in moved.turns:
                self.turns.put(db, history, turn)
            if snapshot is not None:
                self.records.add_snapshot(db, snapshot)
            stored = replace(moved.session, number=number, history=history, snapshot=snapshot)
            self.records.add_session(db, stored)
            for answer in moved.answers:
                self._remember(db, answer)
            return replace(stored, length=len(moved.tokens))

        try:
            return self._ask(add)
        except BaseException:
            self._snapshots.remove(None if snapshot is None else snapshot.file)
            raise

    def was_taken(self, session_id: str, epoch: int) -> bool:
        """Whether a session was taken in here under this epoch. If not, it never will be."""
        return self._ask(lambda db: handoffs.was_taken(db, session_id, epoch))

    def stay(self, session_id: str) -> None:
        """A session that was leaving was not taken, and this is its home again."""
        self._ask(lambda db: handoffs.stay(db, session_id))

    def left(self, session_id: str) -> None:
        """A session that was leaving was taken: forget it, and that it was leaving, at once."""

        def forget(db: sqlite3.Connection) -> str | None:
            handoffs.gone(db, session_id)
            return self._forget(db, session_id)

        self._snapshots.remove(self._submit(forget, scrub=True).result())

    def leaving(self) -> list[Leaving]:
        """Sessions of which nobody knows yet whether they were taken."""
        return self._ask(handoffs.leaving)

    def tokens(self, history: int) -> "array[int]":
        """A session's whole history. Raises StateDamaged when some of it is gone."""
        return self._ask(lambda db: self.histories.read(db, history))

    def turns_of(self, history: int) -> list[StoredTurn]:
        """What its turns brought back, as far as that is needed to compute it again."""
        return self._ask(lambda db: self.turns.of(db, history))

    def newest_turns(self) -> dict[int, StoredTurn]:
        """The last turn of each history that has any."""
        return self._ask(self.turns.newest)

    # Snapshots.

    def save(
        self,
        session_id: str,
        history: int,
        contents: Sequence[bytes | memoryview],
        computed: int,
        needed_from: int = 0,
    ) -> Snapshot:
        """Store keys and values, given in parts, in the place of those stored before. Waits for the disk.

        If they should be damaged, tokens from `needed_from` on are computed again.
        Raises StorageFailed, when the disk tier has no room for example.
        """
        snapshot = self._snapshots.write(contents, computed)

        def put(db: sqlite3.Connection) -> str | None:
            self.turns.forget_before(db, history, needed_from)
            return self._replace_snapshot(db, session_id, history, snapshot)

        try:
            old = self._ask(put)
        except BaseException:
            self._snapshots.remove(snapshot.file)
            raise
        self._snapshots.remove(old)
        return snapshot

    def load(self, snapshot: Snapshot) -> bytes | bytearray | memoryview:
        """The contents of a snapshot. Raises StateDamaged unless they are what was stored."""
        return self._snapshots.load(snapshot)

    # Answers and documents.

    def put_answers(self, answers: Sequence[StoredAnswer]) -> None:
        """Store answers in the place of earlier ones for the same calls, where these are still kept. Waits
        for the disk."""

        def put(db: sqlite3.Connection) -> None:
            for each in answers:
                self.records.replace_answer(db, each)

        self._ask(put)

    def answers(self) -> list[StoredAnswer]:
        return self._ask(lambda db: list(self.records.answers(db)))

    def documents(self, kind: str) -> list[Document]:
        """All of a kind, least recently used first. Raises StateDamaged."""
        return self._ask(lambda db: list(self._documents.of(db, kind)))

    def change_documents(
        self, put: Sequence[Document], delete: Sequence[tuple[str, str]] = ()
    ) -> "Future[None]":
        """Store documents and delete others, by kind and name, at once."""

        def change(db: sqlite3.Connection) -> None:
            self._documents.put(db, put)
            self._documents.delete(db, delete)

        return self._submit(change, scrub=bool(delete))

    def close(self) -> None:
        """Store what waits, and let others have the directory. Idempotent."""
        if self._database is not None:
            self._database.close()
        if self._lock is not None:
            self._lock.release()

    # Behind the door.

    def _submit(self, work: "Callable[[sqlite3.Connection], T]", *, scrub: bool = False) -> "Future[T]":
        assert self._database is not None
        return self._database.submit(work, scrub=scrub)

    def _ask(self, work: "Callable[[sqlite3.Connection], T]") -> T:
        return self._submit(work).result()

    def _model(self, db: sqlite3.Connection) -> dict[str, str]:
        """The model and the geometry of all sessions here."""
        return dict(db.execute("SELECT name, value FROM facts WHERE name IN ('model', 'geometry')"))

    def _claim(self, name: str, value: str, otherwise: str) -> None:
        """The directory's own value, which stays what it was first."""

        kept = self._ask(partial(_kept_fact, name=name, value=value))
        if kept != value:
            raise ConfigError(
                f"the state directory {self.config.directory} {otherwise}: {kept}, here {value}"
            )

    def _forget(self, db: sqlite3.Connection, session_id: str) -> str | None:
        """Delete a session's rows; the file of its snapshot, if nobody needs that any more."""
        row = self.records.delete_session(db, session_id)
        if row is None:
            return None
        self.turns.delete(db, row[0])
        self.histories.delete(db, row[0])
        return self.records.drop_snapshot(db, row[1])

    def _remember(self, db: sqlite3.Connection, answer: StoredAnswer | None) -> None:
        if answer is None:
            return
        self.records.answer(db, answer)
        self._answered += 1
        if self._answered % _PRUNE_EVERY == 0:
            self.records.forget_answers(db, self._most_answers)

    def _replace_snapshot(
        self, db: sqlite3.Connection, session_id: str, history: int, new: Snapshot
    ) -> str | None:
        """The file that is not needed any more. Tokens stored since it was written become one row."""
        before = self.records.snapshot_of(db, session_id)
        unneeded = self.records.replace_snapshot(db, session_id, new)
        self.histories.merge(db, history, 0 if before is None else before.computed)
        return unneeded

    def _write_snapshot(
        self, contents: bytes | bytearray | memoryview, session: StoredSession
    ) -> Snapshot | None:
        """The file of a snapshot that no session has yet; None where there are no contents."""
        if not contents:
            return None
        assert session.snapshot is not None, "who sends contents says what they are"
        return self._snapshots.write([memoryview(contents)], session.snapshot.computed)


def _kept_fact(db: sqlite3.Connection, name: str, value: str) -> str:
    """What the directory has under this name, from now on `value` if it had nothing."""
    db.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, value))
    (kept,) = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return str(kept)


def _known_snapshots(db: sqlite3.Connection) -> list[Snapshot]:
    return [Snapshot(*row) for row in db.execute("SELECT file, computed, bytes FROM snapshots")]
