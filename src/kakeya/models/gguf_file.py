"""The GGUF container, whole or split: typed metadata, a tensor directory and the mapped bytes behind it."""

import hashlib
import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from kakeya.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from kakeya.models.gguf_names import part_name

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# Value type -> struct format; all little-endian.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
# Metadata of a part of a split model: its number from 0, how many parts there are, and tensors in all.
_SPLIT_NUMBER, _SPLIT_COUNT, _SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the directory. `shape` has the row count first, as torch has it."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # from the start of the file
    row_bytes: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class GgufFile:
    """An opened GGUF model: one file, or all parts of a split one whichever of them is named.

    Nothing is copied: tensor bytes are views of the mapping, which they keep alive. The metadata is that of
    the first part. Raises ModelNotFound when a file cannot be opened, CorruptCheckpoint when it is truncated,
    malformed or not a part, UnsupportedModel for a version or a tensor type that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts = _open_parts(path)
        self.metadata = self._parts[0].metadata
        self._part_of: dict[str, _Part] = {}
        for part in self._parts:
            self._add(part)
        self.tensors = {name: part.tensors[name] for name, part in self._part_of.items()}

    def raw(self, name: str) -> Tensor:
        """The tensor's stored bytes, uint8 [rows, row_bytes]. A view of the file: do not write to it."""
        tensor, data = self.tensors[name], self._part_of[name].data
        flat = torch.frombuffer(data, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.offset)
        return flat.view(tensor.rows, tensor.row_bytes)

    def metadata_digest(self) -> str:
        """SHA-256 of the metadata as it lies in the file."""
        first = self._parts[0]
        return hashlib.sha256(first.data[: first.metadata_end]).hexdigest()

    @property
    def files(self) -> tuple[Path, ...]:
        """All parts, in order."""
        return tuple(part.path for part in self._parts)

    def release(self) -> None:
        """Give back the pages that were read. They can be read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for part in self._parts:
                part.data.madvise(mmap.MADV_DONTNEED)

    def _add(self, part: "_Part") -> None:
        for name in part.tensors:
            if (other := self._part_of.setdefault(name, part)) is not part:
                raise CorruptCheckpoint(f"tensor {name} is in {other.path} and again in {part.path}")


class _Part:
    """One file: its metadata, its directory and its mapped bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = _map(path)
        cursor = _Cursor(self.data, path)
        tensor_count, entry_count = _header(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        self.metadata_end = cursor.position
        directory = [_directory_entry(cursor) for _ in range(tensor_count)]
        self.tensors = self._located(directory, cursor.position)

    def _located(self, directory: list[GgufTensor], directory_end: int) -> dict[str, GgufTensor]:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise CorruptCheckpoint(
                f"{self.path}: general.alignment must be a multiple of 8, got {alignment!r}"
            )
        data_start = -(-directory_end // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for entry in directory:
            tensor = replace(entry, offset=data_start + entry.offset)
            if entry.offset % alignment:
                raise CorruptCheckpoint(
                    f"{self.path}: tensor {entry.name} is not aligned to {alignment} bytes"
                )
            if tensor.offset + tensor.nbytes > len(self.data):
                raise _truncated(self.path, f"tensor {entry.name}")
            if entry.name in tensors:
                raise CorruptCheckpoint(f"{self.path}: tensor {entry.name} is there twice")
            tensors[entry.name] = tensor
        return tensors


def _open_parts(path: Path) -> list[_Part]:
    named = _Part(path)
    count = named.metadata.get(_SPLIT_COUNT, 1)
    if count in (0, 1):
        return [named]
    name = part_name(path.name)
    if name is None:
        raise CorruptCheckpoint(
            f"{path} is one of {count} parts; the others cannot be found unless all are named "
            "like NAME-00001-of-00003.gguf"
        )
    if name.count != count:
        raise CorruptCheckpoint(f"{path} is one of {name.count} parts by its name, but of {count} by itself")
    paths = [path.with_name(sibling) for sibling in name.siblings]
    if missing := [each.name for each in paths if not each.is_file()]:
        raise CorruptCheckpoint(f"{path} is one of {count} parts, and some are missing: {', '.join(missing)}")
    parts = [named if each == path else _Part(each) for each in paths]
    _check_parts(parts)
    return parts


def _check_parts(parts: Sequence[_Part]) -> None:
    """Raises CorruptCheckpoint unless the metadata of each part says that it is this part."""
    held = sum(len(part.tensors) for part in parts)
    for index, part in enumerate(parts):
        expected = {_SPLIT_NUMBER: index, _SPLIT_COUNT: len(parts), _SPLIT_TENSORS: held}
        for key, value in expected.items():
            if (found := part.metadata.get(key)) != value:
                raise CorruptCheckpoint(
                    f"{part.path}: as part {index + 1} of {len(parts)} with {held:,} tensors in all "
                    f"{key} must be {value}, got {found!r}"
                )


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # Private mapping: torch insists on a writable buffer, and nothing written would reach the file.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError as error:  # what mmap says of an empty file
        raise _truncated(path, "the header") from error
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror or error}") from error


def _truncated(path: Path, what: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{path} is truncated or damaged: {what} runs past the end of the file")


def _header(cursor: "_Cursor") -> tuple[int, int]:
    """Checks magic and version; returns the tensor and metadata counts."""
    if cursor.take(4) != MAGIC:
        raise CorruptCheckpoint(f"{cursor.path} is not a GGUF file")
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise UnsupportedModel(
            f"{cursor.path}: GGUF version {version} is not supported; supported: 2, 3 (little-endian)"
        )
    return cursor.scalar("Q"), cursor.scalar("Q")


def _directory_entry(cursor: "_Cursor") -> GgufTensor:
    """Its offset still counts from the start of the data."""
    name = cursor.string()
    dimensions = cursor.scalar("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise CorruptCheckpoint(f"{cursor.path}: tensor {name} has {dimensions} dimensions")
    shape = tuple(reversed([cursor.scalar("Q") for _ in range(dimensions)]))
    if 0 in shape:
        raise CorruptCheckpoint(f"{cursor.path}: tensor {name} is empty: shape {shape}")
    kind, offset = cursor.scalar("I"), cursor.scalar("Q")
    try:
        kind = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"{cursor.path}: tensor {name} has the unknown type {kind}") from error
    if shape[-1] % block:
        raise CorruptCheckpoint(
            f"{cursor.path}: {name} has {shape[-1]} columns, not a multiple of {kind.name}'s {block}"
        )
    return GgufTensor(name, shape, kind, offset, shape[-1] // block * block_bytes)


class _Cursor:
    """A reading position in the header that never runs past the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._size = len(data)
        self.path = path
        self.position = 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > self._size:
            raise _truncated(self.path, "the header")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def scalar(self, form: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """`count` length-prefixed strings. Vocabularies come this way, so the loop is kept tight."""
        data, position, size = self._data, self.position, self._size
        length_of = struct.Struct("<Q").unpack_from
        found = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_of(data, position)[0]
                if position > size:
                    raise _truncated(self.path, "a string")
                found.append(data[start:position].decode())
        except struct.error as error:
            raise _truncated(self.path, "a string") from error
        except UnicodeDecodeError as error:
            raise CorruptCheckpoint(f"{self.path}: a string in the header is not UTF-8") from error
        self.position = position
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        raise CorruptCheckpoint(f"{self.path}: unknown metadata value type {kind}")

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return self.strings(count)
        if kind not in _SCALARS:
            raise CorruptCheckpoint(f"{self.path}: unknown metadata array type {kind}")
        form = np.dtype("<" + _SCALARS[kind] if kind != 7 else "?")
        array: list[Any] = np.frombuffer(self.take(count * form.itemsize), dtype=form).tolist()
        return array
