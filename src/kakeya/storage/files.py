"""The file layer of a state directory. Every write goes through here, so that tests can make each fail.

A file is replaced as a whole: its readers see the old contents or the new ones, never a part.
"""

import errno
import fcntl
import mmap
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from kakeya.errors import ConfigError, StorageFailed

_TEMPORARY = ".partial"
_PIECE = 2**20


class Files:
    """The primitives that can fail. With `sync` what was written survives a loss of power."""

    def __init__(self, *, sync: bool = False) -> None:
        self._sync = sync

    def make_directory(self, path: Path) -> None:
        """A directory that nobody else may look into. Raises ConfigError when that cannot be."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"the state directory {path} cannot be made: {error}") from error

    def replace(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        """Write a file atomically. Raises StorageFailed, and the old file is as it was."""
        temporary = path.with_name(path.name + _TEMPORARY)
        with told(f"cannot write {path.name}"):
            try:
                with self.create(temporary) as file:
                    for part in parts:
                        self.write(file, part)
                    self.flush(file)
                self.rename(temporary, path)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise

    def read(self, path: Path) -> memoryview:
        """The whole file, mapped. Raises StorageFailed; FileNotFoundError when there is none."""
        with told(f"cannot read {path.name}"), path.open("rb", buffering=0) as file:
            if self.fetch(file) == 0:
                return memoryview(b"")  # nothing can be mapped
            # Private, so whoever takes views of it may have writable ones, which torch wants.
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def remove(self, path: Path) -> None:
        """Delete a file, if it is there. Raises StorageFailed."""
        with told(f"cannot remove {path.name}"):
            self.unlink(path)

    # The primitives.

    def fetch(self, file: FileIO) -> int:
        """Have the system read a file; its size. Where the disk fails, this raises. Once the file is mapped,
        the same failure would end the process."""
        piece, size = bytearray(_PIECE), 0
        while count := file.readinto(piece):
            size += count
        return size

    def create(self, path: Path) -> BinaryIO:
        return path.open("wb")

    def write(self, file: BinaryIO, part: bytes | memoryview) -> None:
        file.write(part)

    def flush(self, file: BinaryIO) -> None:
        file.flush()
        if self._sync:
            os.fsync(file.fileno())

    def rename(self, temporary: Path, path: Path) -> None:
        temporary.replace(path)
        if self._sync:
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def commit(self, connection: sqlite3.Connection) -> None:
        """Make a transaction of the database permanent."""
        connection.execute("COMMIT")

    def scrub(self, connection: sqlite3.Connection) -> None:
        """Write the database's log into the database and cut it off. Fails while another program reads it."""
        (is_busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if is_busy:
            raise sqlite3.OperationalError("another program reads the database")


@contextmanager
def told(what: str) -> Iterator[None]:
    """Turns errors of the system and of SQLite into StorageFailed; a missing file stays what it is."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StorageFailed(f"{what}: {'the disk is full' if full else error}") from error
    except sqlite3.Error as error:
        raise StorageFailed(f"{what}: {error}") from error


class DirectoryLock:
    """Held by the one server that uses a state directory, for as long as its process lives."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError when another process has it, or when it cannot be written."""
        self._handle = -1
        try:
            self._handle = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._handle, 0)
            os.write(self._handle, f"{os.getpid()}\n".encode())
        except BlockingIOError:
            holder = os.read(self._handle, 32).decode(errors="replace").strip()
            self.release()
            raise ConfigError(
                f"the state directory {directory} is in use by process {holder or 'unknown'}: "
                "two servers cannot share one"
            ) from None
        except OSError as error:
            self.release()
            raise ConfigError(f"the state directory {directory} cannot be locked: {error}") from error

    def release(self) -> None:
        """Let others have it. Idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1
