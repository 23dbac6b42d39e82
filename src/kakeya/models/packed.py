"""Weights packed for the native kernels and kept on disk: packed once for a file, then mapped.

A pack is a safetensors file in the cache directory, named by the digest of the model's files and the layout
of the kernels. Processes that open the same model share its pages. The digest of a large file takes a second
to compute, so it is remembered until the file's size, inode or time of change differs.
"""

import fcntl
import hashlib
import json
import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from kakeya.errors import CorruptCheckpoint
from kakeya.kernels import LAYOUT, Kernels, PackedPart
from kakeya.models import store
from kakeya.models.blocks import BlockTensor

log = logging.getLogger(__name__)

_PAGE = 4096
_METADATA, _SOURCE = "__metadata__", "source"
_DIGEST_LENGTH = 64
_MADV_POPULATE_READ = 22  # Python has no name for it yet
_UNLOCKED_SECONDS = 60.0  # a file is made a moment before it is locked


Matrices = Mapping[str, BlockTensor]


def packed_parts(kernels: Kernels, sources: Sequence[Path], matrices: Matrices) -> dict[str, PackedPart]:
    """Every matrix in the kernels' order, mapped from the pack of the model files `sources` by its name.

    Makes the pack where there is none; where the cache cannot be written, packs into memory and says so.
    Raises CorruptCheckpoint for weights that are not finite.
    """
    sizes = {
        name: kernels.packed_bytes(blocks.format.name, *blocks.shape) for name, blocks in matrices.items()
    }
    if not sources or not matrices:
        data = _in_memory(kernels, matrices, sizes)
    else:
        data = _from_disk(kernels, sources, matrices, sizes)
    return {
        name: kernels.part(blocks.format.name, blocks.shape[0], data[name])
        for name, blocks in matrices.items()
    }


def _from_disk(
    kernels: Kernels, sources: Sequence[Path], matrices: Matrices, sizes: Mapping[str, int]
) -> dict[str, Tensor]:
    folder = store.cache_dir() / "packed"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{_digest(folder, sources)}-{LAYOUT}.safetensors"
        return _open_pack(target, sizes) or _make_pack(target, sources, kernels, matrices, sizes)
    except OSError as error:
        log.warning(
            "packed weights cannot be kept in %s (%s): they are packed into memory at every start",
            folder,
            error.strerror or error,
        )
        return _in_memory(kernels, matrices, sizes)


def _in_memory(kernels: Kernels, matrices: Matrices, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    data = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
    _pack(kernels, matrices, data)
    return data


def _pack(kernels: Kernels, matrices: Matrices, data: Mapping[str, Tensor]) -> None:
    for name, blocks in matrices.items():
        try:
            kernels.pack_blocks(blocks.format.name, blocks.raw, blocks.shape[1], data[name])
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(f"tensor {blocks.name} holds {error}") from None


def _open_pack(path: Path, sizes: Mapping[str, int]) -> dict[str, Tensor] | None:
    """The parts of a pack, or None where there is none that has exactly these."""
    try:
        with path.open("rb") as file:
            first, header = _read_header(file)
            mapping = _mapped(file.fileno())
    except (FileNotFoundError, ValueError):
        return None
    held = {name: entry for name, entry in header.items() if name != _METADATA}
    whole = len(mapping) == first + sum(sizes.values())
    return _views(mapping, first, sizes) if whole and held == _entries(sizes) else None


def _read_header(file: BinaryIO) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and what the JSON says. Raises ValueError for a file that is no pack."""
    length = int.from_bytes(file.read(8), "little")
    if length > os.fstat(file.fileno()).st_size:
        raise ValueError("the header runs past the end of the file")
    header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    return 8 + length, header


def _make_pack(
    target: Path,
    sources: Sequence[Path],
    kernels: Kernels,
    matrices: Matrices,
    sizes: Mapping[str, int],
) -> dict[str, Tensor]:
    """Pack into a new file, and map it. It gets the name `target` once it is safely on the disk."""
    _sweep(target.parent)
    header = _header(sources, sizes)
    handle, made = tempfile.mkstemp(prefix=store.WORKSPACE_PREFIX, dir=target.parent)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # so that a sweep sees that it is in use
        _reserve(handle, len(header) + sum(sizes.values()))
        os.pwrite(handle, header, 0)
        with mmap.mmap(handle, 0) as mapping:
            parts = _views(mapping, len(header), sizes)
            _pack(kernels, matrices, parts)
            parts.clear()
        opened = _views(_mapped(handle), len(header), sizes)
    except BaseException:
        os.close(handle)
        with suppress(OSError):
            Path(made).unlink()
        raise
    # Only the end of the process waits for the disk: a short process would otherwise pack at every start.
    threading.Thread(target=_keep, args=(handle, Path(made), target), name="kakeya-pack").start()
    return opened


def _reserve(handle: int, size: int) -> None:
    """Give the file its size. Raises OSError now; without this, a full disk would kill the process later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        os.ftruncate(handle, size)


def _keep(handle: int, made: Path, target: Path) -> None:
    try:
        os.fsync(handle)
        made.replace(target)
    except OSError as error:
        log.warning("packed weights could not be kept as %s: %s", target, error.strerror or error)
        with suppress(OSError):
            made.unlink()
    finally:
        os.close(handle)


def _mapped(handle: int) -> mmap.mmap:
    # Private: torch insists on a writable buffer. Nobody writes, so every process shares the pages.
    mapping = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
    # All of it now, so that a process does not grow with every token whose embedding it has not read before.
    with suppress(OSError):  # only newer Linux kernels can
        mapping.madvise(_MADV_POPULATE_READ)
    return mapping


def _views(mapping: mmap.mmap, first: int, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    return {
        name: torch.frombuffer(mapping, dtype=torch.uint8, count=sizes[name], offset=start)
        for name, start in _starts(first, sizes).items()
    }


def _header(sources: Sequence[Path], sizes: Mapping[str, int]) -> bytes:
    """The length and the JSON of a safetensors file whose data begins on a page."""
    metadata = {_METADATA: {_SOURCE: str(sources[0].resolve())}}
    text = json.dumps(metadata | _entries(sizes)).encode()
    length = -(-(8 + len(text)) // _PAGE) * _PAGE - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def _entries(sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        name: {"dtype": "U8", "shape": [sizes[name]], "data_offsets": [start, start + sizes[name]]}
        for name, start in _starts(0, sizes).items()
    }


def _starts(first: int, sizes: Mapping[str, int]) -> dict[str, int]:
    starts = {}
    for name, size in sizes.items():
        starts[name] = first
        first += size
    return starts


def _digest(folder: Path, sources: Sequence[Path]) -> str:
    """The digest of the files' contents, remembered under what tells that the files are unchanged."""
    states = [source.stat() for source in sources]
    known = json.dumps([(at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns) for at in states])
    note = folder / f"{hashlib.sha256(known.encode()).hexdigest()[:32]}.digest"
    # A note that a full disk or a crash cut short would give the same pack to different models.
    with suppress(FileNotFoundError):
        if len(noted := note.read_text()) == _DIGEST_LENGTH:
            return noted
    digest = hashlib.sha256("".join(store.digest_of(source) for source in sources).encode()).hexdigest()
    note.write_text(digest)
    return digest


def _sweep(folder: Path) -> None:
    """Remove packs of another layout, those whose model is no longer where it was, unfinished ones and old
    notes of digests."""
    for path in folder.glob("*.safetensors"):
        with suppress(OSError):
            if not path.stem.endswith(f"-{LAYOUT}") or not _has_source(path):
                path.unlink()
    store.sweep(filter(Path.is_file, folder.glob("*.digest")), store.ABANDONED_SECONDS)
    unfinished = filter(Path.is_file, folder.glob(f"{store.WORKSPACE_PREFIX}*"))
    store.sweep(filter(_is_unlocked, unfinished), _UNLOCKED_SECONDS)


def _is_unlocked(path: Path) -> bool:
    """Whether no process is making this pack: whoever began it was killed."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _has_source(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return Path(_read_header(file)[1][_METADATA][_SOURCE]).exists()
    except (ValueError, KeyError, TypeError):
        return False
