"""The cache directory: where fetched models live, and how a file gets there whole or not at all.

Everything is first made in a workspace, a temporary folder inside the cache (so on the same disk), checked
there, and then renamed into place. Whatever goes wrong, the workspace is removed and the models are as they
were. A long download gathers in a partial file that has the name of its digest: there the next fetch goes on.
"""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO, Protocol

from kakeya.errors import DownloadFailed

log = logging.getLogger(__name__)

CACHE_VARIABLE = "KAKEYA_CACHE_DIR"
WORKSPACE_PREFIX = ".fetch-"
STALE_SECONDS = 24 * 3600.0
ABANDONED_SECONDS = 14 * STALE_SECONDS
POLL_SECONDS = 0.1
COPY_BYTES = 1 << 20


class Progress(Protocol):
    """Is called with how far a step has come; `total` may be unknown. May be called from another thread."""

    def __call__(self, step: str, done: int, total: int | None) -> None: ...


def silent(step: str, done: int, total: int | None) -> None:
    """Reports nothing."""


def cache_dir() -> Path:
    """The folder for everything this package keeps: $KAKEYA_CACHE_DIR, or the user's cache directory."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs  # here, because a folder that is named needs no search

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
    with _disk_errors_explained():
        root = cache_dir()
        root.mkdir(parents=True, exist_ok=True)
        sweep(root.glob(f"{WORKSPACE_PREFIX}*"), STALE_SECONDS)
        _check_room(root, needed_bytes)
        folder = Path(tempfile.mkdtemp(prefix=WORKSPACE_PREFIX, dir=root))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def partial(sha256: str, size: int) -> Iterator[BinaryIO]:
    """The open end of the file in which these bytes gather; what an earlier fetch left is in it already.

    It stays, whatever happens in the body: the caller checks the whole file and renames it. Raises
    DownloadFailed when another process uses it, and for the disk as `workspace` does.
    """
    with _disk_errors_explained():
        path = partial_path(sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent.iterdir(), ABANDONED_SECONDS)
        with path.open("ab") as file:
            _lock(file)
            if file.tell() > size:
                file.seek(0)
                file.truncate()
            _check_room(path.parent, size - file.tell())
            yield file


def partial_path(sha256: str) -> Path:
    """Where the bytes of that digest gather."""
    return cache_dir() / "partial" / sha256


@contextmanager
def _disk_errors_explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DownloadFailed(_explain(error)) from error


def _check_room(root: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(root).free
    if free < needed_bytes:
        raise OSError(errno.ENOSPC, f"{needed_bytes:,} bytes are needed and {free:,} are free")


def _lock(file: IO[bytes]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DownloadFailed("another process is fetching the same file; wait for it to end") from error


def sweep(entries: Iterable[Path], seconds: float) -> None:
    """Remove entries unchanged for `seconds`: a killed process left them. Younger ones may be in use."""
    for entry in entries:
        with suppress(OSError):
            if time.time() - entry.stat().st_mtime > seconds:
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink()


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


def check_file(path: Path, size: int, sha256: str, progress: Progress = silent, name: str = "") -> None:
    """Raise DownloadFailed, naming the file as people know it, unless it has exactly this size and digest."""
    name, found = name or path.name, path.stat().st_size
    if found != size:
        kind = "truncated" if found < size else "too long"
        raise DownloadFailed(f"{name} arrived {kind}: {found:,} bytes instead of {size:,}; fetch it again")
    digest = digest_of(path, progress, name)
    if digest != sha256:
        raise DownloadFailed(
            f"{name} has SHA-256 {digest} instead of {sha256}; it is damaged or not the file we know"
        )


def digest_of(path: Path, progress: Progress = silent, name: str = "") -> str:
    """The SHA-256 of a file as hexadecimal text."""
    digest, total, done = hashlib.sha256(), path.stat().st_size, 0
    with path.open("rb") as stream:
        while block := stream.read(COPY_BYTES):
            digest.update(block)
            done += len(block)
            progress(f"checking {name or path.name}", done, total)
    return digest.hexdigest()


def still_has(path: Path, sha256: str, progress: Progress = silent) -> bool:
    """Whether a file that was fetched before still has its digest. If not, the log says so."""
    digest = digest_of(path, progress)
    if digest != sha256:
        log.warning(
            "%s is damaged: it has SHA-256 %s instead of %s; it is fetched again", path, digest, sha256
        )
    return digest == sha256


def copy_stream(source: IO[bytes], target: Path, total: int, progress: Progress) -> None:
    """Write all of `source` to `target` and onto the disk."""
    done = 0
    with target.open("wb") as out:
        while block := source.read(COPY_BYTES):
            out.write(block)
            done += len(block)
            progress(f"unpacking {target.name}", done, total)
        settle(out)


def settle(file: IO[bytes]) -> None:
    """Sync the file to the disk, so that a renamed file is never an empty one."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def growth_reported(folder: Path, step: str, total: int | None, progress: Progress) -> Iterator[None]:
    """While the body fills `folder`, report its size. For fetchers that do not report progress."""
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
    """The size of a file or of all files of a folder. Files that vanish during the count are left out."""
    size = 0
    with suppress(FileNotFoundError):  # a folder that vanishes ends the walk
        for path in (root, *root.rglob("*")):
            with suppress(OSError):
                if path.is_file():
                    size += path.stat().st_size
    return size
