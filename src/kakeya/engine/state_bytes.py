"""A session's state as bytes, and a suspicious reader for them.

The bytes are those of a state file (`state.py`): safetensors. The writer makes no copies, because copies take
memory bandwidth from the steps that run. The reader takes views. Each length, offset and type is checked
before it is used, so bytes from anywhere may be read.
"""

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kakeya.engine.slab import SlabGeometry, held_positions
from kakeya.engine.state import (
    SequenceState,
    check_header,
    checked_recall,
    parse_state,
    state_contents,
)
from kakeya.errors import InvalidArgument, StateMismatch
from kakeya.models.float_types import FLOAT_TYPES

_LONGEST_HEADER = 2**20
_MOST_TENSORS = 256
_ALIGNMENT = 8  # of the largest type
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
NO_TOKENS = torch.empty(0, dtype=torch.int32)


def encode_state(state: SequenceState) -> list[bytes | memoryview]:
    """The bytes of a state that is on the host, in parts. Some are views of its storage."""
    tensors, metadata = state_contents(state)
    # Larger elements first, so that each lies on a multiple of its size.
    ordered = sorted(tensors.items(), key=lambda each: -each[1].itemsize)
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        dtype, shape = _DTYPE_NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return [len(text).to_bytes(8, "little") + text, *(part for _, each in ordered for part in _parts(each))]


def _parts(tensor: Tensor) -> Iterator[memoryview]:
    """Its bytes. Keys and values lie apart from layer to layer."""
    for piece in [tensor] if tensor.is_contiguous() else tensor:
        yield piece.contiguous().reshape(-1).view(torch.uint8).numpy().data


def decode_state(
    contents: bytes | bytearray | memoryview,
    source: str,
    fingerprint: str,
    geometry: SlabGeometry,
    tokens: "array[int] | None" = None,
) -> SequenceState:
    """The state in these bytes. `tokens`: its history, where that was stored elsewhere; such a state is to be
    laid into a slab, and may lack the last slots, where nothing was written.

    Raises StateMismatch when they are not the state of a session of this engine, whatever they are.
    """
    try:
        metadata, tensors = _read(contents)
        check_header(source, metadata, fingerprint, geometry)
        if tokens is not None:
            tensors["tokens"] = tokens_tensor(tokens)
        _check_tensors(metadata, tensors, geometry)
        return parse_state(metadata, tensors, geometry, partial=tokens is not None)
    except (KeyError, ValueError, TypeError, RuntimeError, RecursionError, InvalidArgument) as error:
        raise StateMismatch(f"{source} is a damaged session state: {error!r}") from error


def check_values(state: SequenceState, source: str) -> None:
    """Raises StateMismatch for keys and values that no model computes: infinite ones, or none at all."""
    if not bool(torch.isfinite(state.storage).all()):
        raise StateMismatch(f"{source} has keys or values that are not numbers")


def tokens_tensor(tokens: "array[int]") -> Tensor:
    """A history as a tensor of its own."""
    return torch.from_numpy(np.array(tokens, dtype=np.int32))


def _read(contents: bytes | bytearray | memoryview) -> tuple[dict[str, str], dict[str, Tensor]]:
    view = memoryview(contents)
    size = int.from_bytes(view[:8], "little") if len(view) >= 8 else _LONGEST_HEADER + 1
    if size > min(_LONGEST_HEADER, len(view) - 8):
        raise ValueError("its header is cut or too long")
    header = json.loads(bytes(view[8 : 8 + size]))
    if not isinstance(header, dict) or len(header) > _MOST_TENSORS:
        raise ValueError("its header is not a table of tensors")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is not text")
    raw = np.frombuffer(view[8 + size :], dtype=np.uint8)
    if not raw.flags.writeable or raw.ctypes.data % _ALIGNMENT:
        raw = raw.copy()  # torch wants memory that it could write, and whole elements
    data = torch.from_numpy(raw)
    return metadata, {name: _tensor(name, entry, data) for name, entry in header.items()}


def _tensor(name: str, entry: Mapping[str, Any], data: Tensor) -> Tensor:
    dtype, shape, (start, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not all(type(each) is int and 0 <= each < 2**48 for each in (*shape, start, end)) or len(shape) > 8:
        raise ValueError(f"{name} has no sound shape")
    if not start <= end <= len(data) or math.prod(shape) * dtype.itemsize != end - start:
        raise ValueError(f"{name} does not lie where the header says")
    if start == end:
        return torch.empty(shape, dtype=dtype)
    part = data[start:end] if start % dtype.itemsize == 0 else data[start:end].clone()
    return part.view(dtype).reshape(shape)


def _check_tensors(
    metadata: Mapping[str, str], tensors: Mapping[str, Tensor], geometry: SlabGeometry
) -> None:
    """What a state file says must agree with itself."""
    kinds = {name: (tensors[name].dtype, tensors[name].dim()) for name in ("tokens", "positions")}
    if kinds != {"tokens": (torch.int32, 1), "positions": (torch.int64, 1)}:
        raise ValueError("tokens or positions have another type")
    if any(tensors[name].dtype is not FLOAT_TYPES[geometry.dtype] for name in ("keys", "values")):
        raise ValueError("keys or values have another type")
    sink, committed, slots = int(metadata["sink"]), int(metadata["committed"]), len(tensors["positions"])
    if not 0 <= sink < geometry.cache.capacity or not 0 <= committed < 2**48:
        raise ValueError(f"it pins {sink} tokens and has computed {committed}")
    if slots <= sink or slots < min(committed, geometry.cache.capacity):
        raise ValueError(f"{slots} slots are too few")
    # Before anything is made of its ranges.
    recall = checked_recall(metadata, len(tensors["tokens"]), geometry)
    recalled, recall_slots = ((), 0) if recall is None else (recall.recalled, recall.slots)
    window = geometry.cache.capacity - sink
    expected = held_positions(slots, sink, window, committed, recalled, recall_slots)
    if not np.array_equal(tensors["positions"].numpy(), expected):
        raise ValueError("its positions do not follow from its length")
    eos = json.loads(metadata["eos_token_ids"])
    if not isinstance(eos, list) or not all(type(each) is int for each in eos):
        raise ValueError("its EOS tokens are not token ids")
