"""The files with keys and values: one for each snapshot, safetensors in an envelope with a digest."""

import logging
import secrets
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from kakeya.errors import StateDamaged, StorageFailed
from kakeya.storage.envelope import contents_of, enveloped
from kakeya.storage.files import Files
from kakeya.storage.records import Snapshot
from kakeya.storage.sealing import Sealer

log = logging.getLogger(__name__)


class SnapshotFiles:
    """A directory of its own, whose files take `limit` bytes at most. Use it from any thread."""

    def __init__(
        self, directory: Path, files: Files, sealer: Sealer, limit: int, known: Iterable[Snapshot]
    ) -> None:
        """Those that are `known` are there. Others were left behind by a crash, and are removed."""
        self._directory, self._files, self._sealer, self._limit = directory, files, sealer, limit
        self._lock = threading.Lock()
        self._held = {each.file: each.bytes for each in known}
        self._unneeded = {path.name for path in directory.iterdir()} - self._held.keys()
        self.remove(None)

    @property
    def size(self) -> int:
        """What the files take in bytes, and those that are being written."""
        with self._lock:
            return sum(self._held.values())

    def write(self, contents: Sequence[bytes | memoryview], computed: int) -> Snapshot:
        """A new file with contents that are given in parts. Raises StorageFailed."""
        file = secrets.token_hex(16)
        parts = enveloped(*self._sealer.seal_parts(contents, _context(file)))
        snapshot = Snapshot(file, computed, sum(map(len, parts)))
        self._reserve(snapshot)
        try:
            self._files.replace(self._directory / file, parts)
        except BaseException:
            self.remove(file)
            raise
        return snapshot

    def load(self, snapshot: Snapshot) -> bytes | bytearray | memoryview:
        """The contents of a file. Raises StateDamaged unless they can be read and are what was stored."""
        try:
            file = self._files.read(self._directory / snapshot.file)
        except FileNotFoundError as error:
            raise StateDamaged(f"snapshot {snapshot.file} is gone") from error
        except StorageFailed as error:
            raise StateDamaged(
                f"snapshot {snapshot.file} is on a part of the disk that fails: {error}"
            ) from error
        return self._sealer.open(contents_of(file), _context(snapshot.file))

    def remove(self, file: str | None) -> None:
        """Delete a file that nobody needs, if one is named, and those that could not be deleted before."""
        with self._lock:
            self._unneeded |= set() if file is None else {file}
            unneeded = tuple(self._unneeded)
        for each in unneeded:
            try:
                self._files.remove(self._directory / each)
            except StorageFailed as error:  # it still takes its room
                log.error("a snapshot that is not needed stays for now: %s", error)
                continue
            with self._lock:
                self._unneeded.discard(each)
                self._held.pop(each, None)

    def _reserve(self, snapshot: Snapshot) -> None:
        with self._lock:
            used = sum(self._held.values())
            if used + snapshot.bytes > self._limit:
                raise StorageFailed(
                    f"the disk tier is full: {used:,} of {self._limit:,} bytes are used, "
                    f"{snapshot.bytes:,} are needed"
                )
            self._held[snapshot.file] = snapshot.bytes


def _context(file: str) -> str:
    return f"snapshot {file}"
