"""A file layer whose writes fail when a test says so, as on a disk that is full or broken."""

import errno
import os
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from kakeya.storage.files import Files

# Everything in `Files` that changes a disk.
WRITES = ("create", "write", "flush", "rename", "unlink", "commit", "scrub")
# The error of the so manieth write; None lets it pass.
Fails = Callable[[int], int | None]


class Faulty(Files):
    """Counts writes from `begin` to `end`, and fails those that `fails` has an error for."""

    def __init__(self, fails: Fails) -> None:
        super().__init__(sync=True)
        self._fails = fails
        self._has_begun = False
        self.kinds: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    @property
    def count(self) -> int:
        return self.kinds.total()

    def begin(self) -> None:
        self._has_begun = True

    def end(self) -> None:
        self._has_begun = False

    def _step(self, kind: str) -> None:
        if not self._has_begun:
            return
        self.kinds[kind] += 1
        code = self._fails(self.count)
        if code is not None:
            self.failed[kind] += 1
            raise OSError(code, os.strerror(code))

    def create(self, path: Path) -> BinaryIO:
        self._step("create")
        return super().create(path)

    def write(self, file: BinaryIO, part: bytes | memoryview) -> None:
        try:
            self._step("write")
        except OSError:
            file.write(part[: len(part) // 2])  # torn
            raise
        super().write(file, part)

    def flush(self, file: BinaryIO) -> None:
        self._step("flush")
        super().flush(file)

    def rename(self, temporary: Path, path: Path) -> None:
        self._step("rename")
        super().rename(temporary, path)

    def unlink(self, path: Path) -> None:
        self._step("unlink")
        super().unlink(path)

    def commit(self, connection: sqlite3.Connection) -> None:
        self._step_of_database("commit")
        super().commit(connection)

    def scrub(self, connection: sqlite3.Connection) -> None:
        self._step_of_database("scrub")
        super().scrub(connection)

    def _step_of_database(self, kind: str) -> None:
        try:
            self._step(kind)
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from error


def every(period: int, offset: int) -> Fails:
    """Two in a row, again and again: the disk is full, then it is broken. Over all offsets each write has
    failed with either error."""
    codes = {offset % period: errno.ENOSPC, (offset + 1) % period: errno.EIO}
    return lambda number: codes.get(number % period)


def burst(first: int, length: int) -> Fails:
    """Some in a row, once."""
    return lambda number: errno.ENOSPC if first <= number < first + length else None


def dead(first: int) -> Fails:
    """All from this one on."""
    return lambda number: errno.EIO if number >= first else None
