"""The door of a state directory: sessions, their token histories, snapshots of their keys and values, and
the documents of front ends.

lock            held by the one server that uses it
sessions.db     SQLite in WAL mode: sessions, histories, answers to request ids, documents
snapshots/      one file for each snapshot: safetensors in an envelope with a digest
"""

import logging
import secrets
import sqlite3
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kakeya.config import StateConfig
from kakeya.errors import ConfigError, StateDamaged, StorageFailed
from kakeya.storage.database import Database
from kakeya.storage.documents import Documents
from kakeya.storage.envelope import contents_of, enveloped
from kakeya.storage.files import DirectoryLock, Files
from kakeya.storage.histories import Histories
from kakeya.storage.records import Details, Records, Snapshot, StoredAnswer, StoredSession
from kakeya.storage.sealing import open_sealer
from kakeya.types import Document, Durability

log = logging.getLogger(__name__)
T = TypeVar("T")
_PRUNE_EVERY = 64


class StateStore:
    """Use it from any thread. Calls that return a Future do not wait; its result says that it is stored.

    Raises StorageFailed when the directory cannot be written or read; nothing has changed then.
    """

    def __init__(self, config: StateConfig, most_answers: int, files: Files | None = None) -> None:
        """Open the directory, or make it. Raises ConfigError: in use, from another version or key."""
        sync = config.durability is Durability.POWER
        self.config = config
        self._files = files or Files(sync=sync)
        self._snapshots = config.directory / "snapshots"
        self._most_answers, self._answered = most_answers, 0
        for directory in (config.directory, self._snapshots):
            self._files.make_directory(directory)
        self._lock = DirectoryLock(config.directory)
        self._database: Database | None = None
        try:
            self._sealer = open_sealer(config.key_file)
            self.histories, self.records = Histories(self._sealer), Records(self._sealer)
            self._documents = Documents(self._sealer)
            self._database = Database(config.directory / "sessions.db", self._files, sync=sync)
            self._claim("sealing", self._sealer.name, "was written with another key, or with none")
            self._held = {each.file: each.bytes for each in self._ask(_snapshots)}
            self._counting = threading.Lock()
            self._remove_strays()
        except BaseException:
            self.close()
            raise

    def check_model(self, fingerprint: str, geometry: str) -> None:
        """Raises ConfigError when the directory holds sessions of another model or cache geometry."""
        self._claim("model", fingerprint, "belongs to another model or weight format")
        self._claim("geometry", geometry, "has sessions of another cache geometry")

    @property
    def is_durable(self) -> bool:
        """Whether what is acknowledged must be stored first."""
        return self.config.durability is not Durability.NONE

    @property
    def disk_bytes(self) -> int:
        """What the snapshots take, and those that are being written."""
        with self._counting:
            return sum(self._held.values())

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

    def write_rest(self, history: int, tokens: Sequence[int]) -> "Future[None]":
        """The history has these tokens: store those that are not stored yet."""

        def write(db: sqlite3.Connection) -> None:
            length = self.histories.length(db, history) or 0
            self.histories.write(db, history, length, tokens[length:])

        return self._submit(write)

    def submit(self, work: "Callable[[sqlite3.Connection], T]") -> "Future[T]":
        """Work of the caller's own on `histories` and `records`, in a transaction."""
        return self._submit(work)

    def remember(self, db: sqlite3.Connection, answer: StoredAnswer) -> None:
        """Keep an answer, within a transaction of the caller's."""
        self._remember(db, answer)

    def update(self, session_id: str, details: Details, used_at: float, *, is_open: bool) -> "Future[None]":
        return self._submit(
            lambda db: self.records.update_session(db, session_id, details, used_at, is_open=is_open)
        )

    def delete(self, session_id: str) -> None:
        """Delete a session, and what nobody else needs of its history and its snapshot."""

        def delete(db: sqlite3.Connection) -> str | None:
            row = self.records.delete_session(db, session_id)
            if row is None:
                return None
            self.histories.delete(db, row[0])
            return self.records.drop_snapshot(db, row[1])

        self._remove(self._submit(delete, scrub=True).result())

    def tokens(self, history: int) -> "array[int]":
        """A session's whole history. Raises StateDamaged when some of it is gone."""
        return self._ask(lambda db: self.histories.read(db, history))

    # Snapshots.

    def save(
        self, session_id: str, history: int, contents: Sequence[bytes | memoryview], computed: int
    ) -> Snapshot:
        """Store keys and values, given in parts, in the place of those stored before. Waits for the disk.

        Raises StorageFailed, when the disk tier has no room for example.
        """
        file = secrets.token_hex(16)
        parts = enveloped(*self._sealer.seal_parts(contents, f"snapshot {file}"))
        snapshot = Snapshot(file, computed, sum(map(len, parts)))
        self._reserve(snapshot)
        try:
            self._files.replace(self._path(file), parts)
            old = self._ask(lambda db: self._replace_snapshot(db, session_id, history, snapshot))
        except BaseException:
            self._remove(file)
            raise
        self._remove(old)
        return snapshot

    def load(self, snapshot: Snapshot) -> bytes | bytearray | memoryview:
        """The contents of a snapshot. Raises StateDamaged unless they are what was stored."""
        try:
            file = self._files.read(self._path(snapshot.file))
        except FileNotFoundError as error:
            raise StateDamaged(f"snapshot {snapshot.file} is gone") from error
        return self._sealer.open(contents_of(file), f"snapshot {snapshot.file}")

    # Answers.

    def answers(self) -> list[StoredAnswer]:
        return self._ask(lambda db: list(self.records.answers(db)))

    # Documents.

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
        self._lock.release()

    # Behind the door.

    def _submit(self, work: "Callable[[sqlite3.Connection], T]", *, scrub: bool = False) -> "Future[T]":
        assert self._database is not None
        return self._database.submit(work, scrub=scrub)

    def _ask(self, work: "Callable[[sqlite3.Connection], T]") -> T:
        return self._submit(work).result()

    def _claim(self, name: str, value: str, otherwise: str) -> None:
        """The directory's own value, which stays what it was first."""

        def claim(db: sqlite3.Connection) -> str:
            db.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, value))
            (kept,) = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
            return str(kept)

        kept = self._ask(claim)
        if kept != value:
            raise ConfigError(
                f"the state directory {self.config.directory} {otherwise}: {kept}, here {value}"
            )

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

    def _reserve(self, snapshot: Snapshot) -> None:
        limit = self.config.disk_tier_bytes
        with self._counting:
            used = sum(self._held.values())
            if used + snapshot.bytes > limit:
                raise StorageFailed(
                    f"the disk tier is full: {used:,} of {limit:,} bytes are used, "
                    f"{snapshot.bytes:,} are needed"
                )
            self._held[snapshot.file] = snapshot.bytes

    def _remove(self, file: str | None) -> None:
        if file is None:
            return
        try:
            self._files.remove(self._path(file))
        except StorageFailed as error:
            log.error("a snapshot that is not needed stays: %s", error)
        with self._counting:
            self._held.pop(file, None)

    def _remove_strays(self) -> None:
        """Files of snapshots that a crash left without a session."""
        for path in self._snapshots.iterdir():
            if path.name not in self._held:
                self._files.remove(path)

    def _path(self, file: str) -> Path:
        return self._snapshots / file


def _snapshots(db: sqlite3.Connection) -> list[Snapshot]:
    return [Snapshot(*row) for row in db.execute("SELECT file, computed, bytes FROM snapshots")]
