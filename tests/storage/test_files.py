"""The file layer: a file is replaced as a whole or not at all, whatever fails."""

import errno
import os
import sqlite3
from pathlib import Path
from typing import BinaryIO

import pytest

from kakeya.errors import ConfigError, StorageFailed
from kakeya.storage.files import DirectoryLock, Files, told


class Broken(Files):
    """Fails at one primitive; a write may get half of its bytes out first."""

    def __init__(self, at: str, error: int) -> None:
        super().__init__(sync=True)
        self._at, self._error = at, error

    def _maybe(self, name: str) -> None:
        if name == self._at:
            raise OSError(self._error, os.strerror(self._error))

    def write(self, file: BinaryIO, part: bytes | memoryview) -> None:
        if self._at == "write":
            file.write(part[: len(part) // 2])
        self._maybe("write")
        super().write(file, part)

    def flush(self, file: BinaryIO) -> None:
        self._maybe("flush")
        super().flush(file)

    def rename(self, temporary: Path, path: Path) -> None:
        self._maybe("rename")
        super().rename(temporary, path)


@pytest.mark.parametrize("at", ["write", "flush", "rename"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, at: str, error: int) -> None:
    path = tmp_path / "f"
    Files(sync=True).replace(path, [b"old"])
    with pytest.raises(StorageFailed, match="the disk is full" if error == errno.ENOSPC else "Input/output"):
        Broken(at, error).replace(path, [b"new ", b"contents"])
    assert [each.name for each in tmp_path.iterdir()] == ["f"]
    assert Files().read(path) == b"old"


def test_a_disk_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"x" * (2**20 + 1))
    assert len(Files().read(tmp_path / "f")) == 2**20 + 1

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Files, "fetch", fails)
    with pytest.raises(StorageFailed, match="cannot read f: .*Input/output"):
        Files().read(tmp_path / "f")


def test_a_missing_file_is_no_failure_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Files().read(tmp_path / "f")
    Files().remove(tmp_path / "f")
    (tmp_path / "empty").touch()
    assert Files().read(tmp_path / "empty") == b""
    with pytest.raises(StorageFailed):
        Files().remove(tmp_path)


def test_errors_of_the_database_are_ours() -> None:
    with pytest.raises(StorageFailed, match="cannot count: no"), told("cannot count"):
        raise sqlite3.OperationalError("no")


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        Files().make_directory(tmp_path / "f" / "g")


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


def test_a_lock_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(ConfigError, match="cannot be locked.*No space left"):
            DirectoryLock(tmp_path)
    DirectoryLock(tmp_path).release()
    with pytest.raises(ConfigError, match="cannot be locked"):
        DirectoryLock(tmp_path / "nowhere")
