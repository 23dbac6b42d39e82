"""The database: one thread owns its connection, and all work that waits shares one transaction.

So a token that many streams store at the same moment costs one commit, and nobody but that thread waits for
the disk.
"""

import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kakeya.errors import ConfigError, KakeyaError, StorageFailed, Unavailable
from kakeya.storage.files import Files, told
from kakeya.storage.schema import migrate

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class _Work:
    """What is to be done in a transaction. It may be done again if the transaction fails."""

    run: Callable[[sqlite3.Connection], Any]
    reply: "Future[Any]"
    scrub: bool


class Database:
    """Work may be submitted from any thread. Its reply comes when the transaction is committed."""

    def __init__(self, path: Path, files: Files, *, sync: bool, shared: bool = False) -> None:
        """Open or make it, and bring its tables up to date. Raises ConfigError.

        Processes on other machines may have it open as well if it is `shared`.
        """
        self._files = files
        self._guard: Callable[[sqlite3.Connection], None] | None = None
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._door = threading.Lock()
        self._closed = False
        self._is_scrubbed = True
        try:
            self._connection = _connect(path, sync=sync, shared=shared)
            migrate(self._connection)
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"the database {path} cannot be opened: {error}") from error
        self._thread = threading.Thread(target=self._live, name="kakeya-storage", daemon=True)
        self._thread.start()

    def submit(self, run: "Callable[[sqlite3.Connection], T]", *, scrub: bool = False) -> "Future[T]":
        """Do it in a transaction; the reply is its result once that is stored, or StorageFailed.

        What `run` raises is the reply, and the transaction goes on: it must raise before it writes. With
        `scrub` the reply comes when what it deletes is not in the files any more.
        """
        reply: Future[T] = Future()
        with self._door:
            if self._closed:
                raise Unavailable("the state directory is closed")
            self._queue.put(_Work(run, reply, scrub))
        return reply

    def ask(self, run: "Callable[[sqlite3.Connection], T]") -> T:
        """Do it, and wait until it is stored."""
        return self.submit(run).result()

    def guard(self, check: Callable[[sqlite3.Connection], None]) -> None:
        """Every transaction from now on begins with `check`, alone on the database. What it raises, a
        StorageFailed, is the reply to all work of the transaction, and nothing is stored."""
        self._guard = check

    def close(self) -> None:
        """Do what waits, and end. Idempotent."""
        with self._door:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        with told("cannot close the database"):
            self._connection.close()

    def _live(self) -> None:
        while True:
            group = self._next_group()
            works = [work for work in group if work is not None]
            if works:
                self._do_all(works)
            if len(works) < len(group):
                return

    def _next_group(self) -> list[_Work | None]:
        group = [self._queue.get()]
        while True:
            try:
                group.append(self._queue.get_nowait())
            except queue.Empty:
                return group

    def _do_all(self, works: Sequence[_Work]) -> None:
        """All in one transaction. If that cannot be stored, each in its own, so that only some fail."""
        try:
            replies = self._transact(works)
        except StorageFailed as error:
            if len(works) == 1:
                log.error("the state directory failed: %s", error)
                works[0].reply.set_exception(error)
                return
            for work in works:
                self._do_all([work])
            return
        self._is_scrubbed = self._is_scrubbed and not any(work.scrub for work in works)
        if not self._is_scrubbed:
            self._scrub()
        for work, (result, refusal) in zip(works, replies, strict=True):
            if refusal is None:
                work.reply.set_result(result)
            else:
                work.reply.set_exception(refusal)

    def _transact(self, works: Sequence[_Work]) -> list[tuple[Any, Exception | None]]:
        with told("cannot store"):
            try:
                self._connection.execute("BEGIN" if self._guard is None else "BEGIN IMMEDIATE")
                if self._guard is not None:
                    self._guard(self._connection)
                replies = [self._attempt(work) for work in works]
                self._files.commit(self._connection)
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        return replies

    def _scrub(self) -> None:
        """Empty the log of the database, which has pages as they were before something was deleted.

        What cannot be done now, on a full disk for example, is done with the next transaction.
        """
        try:
            with told("cannot empty the log"):
                self._files.scrub(self._connection)
            self._is_scrubbed = True
        except StorageFailed as error:
            log.warning("what was deleted is still in the log of the database: %s", error)

    def _attempt(self, work: _Work) -> tuple[Any, Exception | None]:
        """Its result, or what it refuses with; errors of the database are the transaction's."""
        try:
            return work.run(self._connection), None
        except sqlite3.Error:
            raise
        except Exception as error:
            if not isinstance(error, KakeyaError):
                log.exception("work on the database failed")
            return None, error


def _connect(path: Path, *, sync: bool, shared: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    path.chmod(0o600)
    _choose_journal(connection, "truncate" if shared else "wal")
    # Without `sync` the system has what was committed, which outlives this process but not a loss of power.
    connection.execute(f"PRAGMA synchronous = {'FULL' if sync else 'OFF'}")
    connection.execute("PRAGMA secure_delete = ON")  # what is deleted is overwritten
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _choose_journal(connection: sqlite3.Connection, wanted: str) -> None:
    """WAL is the fastest, and its users share memory: it is wrong where they are on several machines."""
    (mode,) = connection.execute(f"PRAGMA journal_mode = {wanted}").fetchone()
    if mode != wanted:
        raise sqlite3.OperationalError(f"its journal stays {mode} while another process has it open")
