"""The cache directory: where fetched models live, and how a file gets there whole or not at all.

Everything is first made in a workspace, a temporary folder inside the cache (so on the same disk), checked
there, and then renamed into place. Whatever goes wrong, the workspace is removed and the cache is as it was.
"""

import errno
import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

from kakeya.errors import DownloadFailed

CACHE_VARIABLE = "KAKEYA_CACHE_DIR"
WORKSPACE_PREFIX = ".fetch-"
STALE_SECONDS = 24 * 3600.0
POLL_SECONDS = 0.1
COPY_BYTES = 1 << 20


class Progress(Protocol):
    """Told how far a step has come; `total` is None when nobody knows. May be called from another thread."""

    def __call__(self, step: str, done: int, total: int | None) -> None: ...


def silent(step: str, done: int, total: int | None) -> None:
    """The progress of someone who does not look."""


def cache_dir() -> Path:
    """The folder for everything this package keeps: $KAKEYA_CACHE_DIR, or the user's cache directory."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs  # here, for who names a folder needs nobody to find one

    return Path(platformdirs.user_cache_dir("kakeya"))


def models_dir() -> Path:
    """The folder that fetched models are renamed into."""
    return cache_dir() / "models"


@contextmanager
def workspace(needed_bytes: int = 0) -> Iterator[Path]:
    """A temporary folder in the cache, removed on the way out whatever happened.

    Raises DownloadFailed when the cache cannot be written or has less than `needed_bytes` free, and turns
    every OSError of the body (a full disk, a folder that vanished) into one too.
    """
    try:
        folder = _open_workspace(needed_bytes)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise DownloadFailed(_explain(error)) from error


def _open_workspace(needed_bytes: int) -> Path:
    root = cache_dir()
    root.mkdir(parents=True, exist_ok=True)
    _sweep_stale(root)
    free = shutil.disk_usage(root).free
    if free < needed_bytes:
        raise OSError(errno.ENOSPC, f"{needed_bytes:,} bytes are needed and {free:,} are free")
    return Path(tempfile.mkdtemp(prefix=WORKSPACE_PREFIX, dir=root))


def _sweep_stale(root: Path) -> None:
    """Remove workspaces that a killed process left behind. Young ones may belong to a running fetch."""
    for folder in root.glob(f"{WORKSPACE_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _explain(error: OSError) -> str:
    root = cache_dir()
    elsewhere = f"set {CACHE_VARIABLE} to another folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of the cache directory {root} is full ({error.strerror}); make room or {elsewhere}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return f"the cache directory {root} cannot be written ({error.strerror}); {elsewhere}"
    return f"writing to the cache directory {root} failed: {error}"


def place(finished: Path, target: Path) -> Path:
    """Rename a finished, checked file or folder to `target`, replacing what was there. Atomic for files."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        # A folder cannot be renamed over a full one: the old one goes to the workspace, to be swept away.
        target.rename(finished.parent / f"replaced-{target.name}")
    finished.replace(target)
    return target


def check_file(path: Path, size: int, sha256: str, progress: Progress = silent) -> None:
    """Raise DownloadFailed unless the file has exactly this size and digest."""
    found = path.stat().st_size
    if found != size:
        kind = "truncated" if found < size else "too long"
        raise DownloadFailed(
            f"{path.name} arrived {kind}: {found:,} bytes instead of {size:,}; fetch it again"
        )
    digest = digest_of(path, progress)
    if digest != sha256:
        raise DownloadFailed(
            f"{path.name} has SHA-256 {digest} instead of {sha256}; it is damaged or not the file we know"
        )


def digest_of(path: Path, progress: Progress = silent) -> str:
    """The SHA-256 of a file as hexadecimal text."""
    digest, total, done = hashlib.sha256(), path.stat().st_size, 0
    with path.open("rb") as stream:
        while block := stream.read(COPY_BYTES):
            digest.update(block)
            done += len(block)
            progress(f"checking {path.name}", done, total)
    return digest.hexdigest()


def copy_stream(source: IO[bytes], target: Path, total: int, progress: Progress) -> None:
    """Write all of `source` to `target` and onto the disk."""
    done = 0
    with target.open("wb") as out:
        while block := source.read(COPY_BYTES):
            out.write(block)
            done += len(block)
            progress(f"unpacking {target.name}", done, total)
        out.flush()
        os.fsync(out.fileno())


@contextmanager
def growth_reported(folder: Path, step: str, total: int | None, progress: Progress) -> Iterator[None]:
    """While the body fills `folder`, report how many bytes lie there. For fetchers that cannot be asked."""
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(POLL_SECONDS):
            size = bytes_under(folder)
            progress(step, size if total is None else min(size, total), total)

    watcher = threading.Thread(target=watch, name="kakeya-fetch-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


def bytes_under(root: Path) -> int:
    """How many bytes a file or the files of a folder have; those that vanish meanwhile count nothing."""
    size = 0
    for path in (root, *root.rglob("*")):
        with suppress(OSError):
            if path.is_file():
                size += path.stat().st_size
    return size
