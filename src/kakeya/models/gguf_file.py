"""The GGUF container: typed metadata, a tensor directory and the mapped bytes behind it."""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from kakeya.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# Value type -> struct format; all little-endian.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4


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
    """An opened GGUF file. Nothing is copied: tensor bytes are views of the mapping, which they keep alive.

    Raises ModelNotFound when the file cannot be opened, CorruptCheckpoint when it is truncated or malformed,
    UnsupportedModel for a version or a tensor type that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _map(path)
        cursor = _Cursor(self._bytes, path)
        tensor_count, entry_count = _header(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        directory = [_directory_entry(cursor) for _ in range(tensor_count)]
        self.tensors = self._located(directory, cursor.position)

    def raw(self, name: str) -> Tensor:
        """The tensor's stored bytes, uint8 [rows, row_bytes]. A view of the file: do not write to it."""
        tensor = self.tensors[name]
        flat = torch.frombuffer(self._bytes, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.offset)
        return flat.view(tensor.rows, tensor.row_bytes)

    def release(self) -> None:
        """Give back the pages that were read; whoever looks again reads them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._bytes.madvise(mmap.MADV_DONTNEED)

    def _located(self, directory: list[GgufTensor], directory_end: int) -> dict[str, GgufTensor]:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise CorruptCheckpoint(
                f"{self.path}: general.alignment must be a multiple of 8, got {alignment!r}"
            )
        data_start = -(-directory_end // alignment) * alignment
        tensors = {}
        for entry in directory:
            tensor = GgufTensor(
                entry.name, entry.shape, entry.kind, data_start + entry.offset, entry.row_bytes
            )
            if entry.offset % alignment:
                raise CorruptCheckpoint(
                    f"{self.path}: tensor {entry.name} is not aligned to {alignment} bytes"
                )
            if tensor.offset + tensor.nbytes > len(self._bytes):
                raise _truncated(self.path, f"tensor {entry.name}")
            tensors[entry.name] = tensor
        return tensors


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
    """One directory entry, its offset still counted from the start of the data."""
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
