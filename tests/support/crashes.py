"""A crash at one moment, without a process that dies."""

import shutil
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import pytest

from kakeya.storage.files import Files

# What other writes and other processes see only once it has happened.
_MOMENTS = ("rename", "commit", "scrub", "remove")
Crashed = Callable[..., Path]


def crash_copies(monkeypatch: pytest.MonkeyPatch) -> Crashed:
    """Copies a state directory as a process that dies now would leave it, whatever else is writing there.

    A copy takes time, so snapshots and transactions that would finish meanwhile wait for its end.
    """
    writing = threading.Lock()

    def alone(write: Callable[..., None]) -> Callable[..., None]:
        @wraps(write)
        def locked(*args: object) -> None:
            with writing:
                write(*args)

        return locked

    for name in _MOMENTS:
        monkeypatch.setattr(Files, name, alone(getattr(Files, name)))

    def copy(directory: Path, to: Path, *without: str) -> Path:
        with writing:
            return Path(
                shutil.copytree(directory, to, ignore=shutil.ignore_patterns("lock", "*.partial", *without))
            )

    return copy
