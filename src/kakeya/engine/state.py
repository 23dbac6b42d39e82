"""A session's full state as a file: tokens, keys, values, positions, and the names of what made them.

The file is safetensors. Its metadata carries the format, the model's fingerprint and the slab's
geometry; a file that does not fit is refused before anything changes.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kakeya.engine.device import DeviceEvent, deliver, fetch, receive
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.slab import SlabGeometry
from kakeya.errors import KakeyaError, StateMismatch

FORMAT = "kakeya-session"
VERSION = "1"
DRAFT_PREFIX = "draft."


@dataclass(frozen=True)
class SequenceState:
    """Everything a sequence is, for other threads to read. `storage` may lie on a device."""

    fingerprint: str
    geometry: str
    sink: int
    committed: int
    eos_token_ids: tuple[int, ...]
    tokens: Tensor
    storage: Tensor
    positions: Tensor
    draft: Mapping[str, Tensor]
    notes: str = ""
    """The caller's own text, kept with the state."""
    ready: DeviceEvent | None = None
    """When the device has written the storage; None if it has."""


def snapshot(sequence: TokenSequence, fingerprint: str, notes: str) -> SequenceState:
    """Copy a resting sequence's state where it lies. Call on the engine thread; nothing is waited for."""
    slab = sequence.slab
    positions = slab.slot_positions()
    held = slab.indices(np.flatnonzero(positions >= 0))
    storage = torch.zeros_like(slab.storage)
    parts = slab.geometry.by_slot(slab.storage)
    for copy, part in zip(slab.geometry.by_slot(storage), parts, strict=True):
        copy.index_copy_(3, held, part.index_select(3, held))
    return SequenceState(
        fingerprint,
        geometry_name(slab.geometry),
        slab.sink,
        slab.committed,
        tuple(sorted(sequence.eos_token_ids)),
        torch.tensor(sequence.tokens, dtype=torch.int32),
        storage,
        torch.from_numpy(positions),
        dict(sequence.draft.export()) if sequence.draft is not None else {},
        notes,
        DeviceEvent(slab.pool.device).record(),
    )


def restore(sequence: TokenSequence, state: SequenceState) -> None:
    """Fill a fresh sequence from a checked state. Call on the engine thread."""
    slab = sequence.slab
    slab.storage.copy_(receive(state.storage, state.ready))
    slab.written = slab.committed = state.committed
    sequence.restore(state.tokens.tolist())


def geometry_name(geometry: SlabGeometry) -> str:
    """The geometry in a form that two files can be compared by."""
    facts = asdict(geometry)
    if not geometry.layer_heads:
        del facts["layer_heads"]  # as files from before there were such layers have it
    return json.dumps(facts, sort_keys=True)


def on_device(state: SequenceState, device: torch.device) -> SequenceState:
    """The same with its storage on `device`. Not for the engine thread, which must not wait."""
    storage, ready = deliver(state.storage, device)
    return replace(state, storage=storage, ready=ready)


def on_host(state: SequenceState) -> SequenceState:
    """The same with nothing left on a device. Not for the engine thread, which must not wait."""
    draft = {name: fetch(tensor, state.ready) for name, tensor in state.draft.items()}
    return replace(state, storage=fetch(state.storage, state.ready), draft=draft, ready=None)


def write_state(path: Path, state: SequenceState) -> None:
    """Write atomically: the old file stays until the new one is whole. Fetches what lies on a device."""
    state = on_host(state)
    tensors = {
        "tokens": state.tokens,
        "keys": state.storage[:, 0].contiguous(),
        "values": state.storage[:, 1].contiguous(),
        "positions": state.positions,
        **{DRAFT_PREFIX + name: tensor for name, tensor in state.draft.items()},
    }
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "model": state.fingerprint,
        "geometry": state.geometry,
        "sink": str(state.sink),
        "committed": str(state.committed),
        "ring_index": str(_ring_index(state)),
        "eos_token_ids": json.dumps(state.eos_token_ids),
        "notes": state.notes,
    }
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        save_file(tensors, temporary, metadata)
        Path(temporary).replace(path)
    except (OSError, SafetensorError) as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise KakeyaError(f"cannot write session state to {path}: {error}") from error


def read_state(path: Path, fingerprint: str, geometry: SlabGeometry) -> SequenceState:
    """Read and check a state file. Raises StateMismatch when it is not one for this engine."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check_header(path, metadata, fingerprint, geometry)
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        return _parse(metadata, tensors, geometry)
    except (OSError, SafetensorError) as error:
        raise StateMismatch(f"{path} cannot be read as session state: {error}") from error
    except (KeyError, ValueError, TypeError) as error:
        raise StateMismatch(f"{path} is a damaged session state: {error!r}") from error


def _check_header(path: Path, metadata: Mapping[str, str], fingerprint: str, geometry: SlabGeometry) -> None:
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        raise StateMismatch(f"{path} is not a {FORMAT} file of version {VERSION}")
    if metadata.get("model") != fingerprint:
        raise StateMismatch(
            f"{path} belongs to another model or weight format: {metadata.get('model')}, here {fingerprint}"
        )
    if metadata.get("geometry") != geometry_name(geometry):
        raise StateMismatch(
            f"{path} has another cache geometry: {metadata.get('geometry')}, here {geometry_name(geometry)}"
        )


def _parse(
    metadata: Mapping[str, str], tensors: Mapping[str, Tensor], geometry: SlabGeometry
) -> SequenceState:
    storage = torch.stack([tensors["keys"], tensors["values"]], dim=1)
    if tuple(storage.shape) != geometry.shape:
        raise ValueError(f"keys and values have shape {tuple(storage.shape)}, expected {geometry.shape}")
    state = SequenceState(
        metadata["model"],
        metadata["geometry"],
        int(metadata["sink"]),
        int(metadata["committed"]),
        tuple(json.loads(metadata["eos_token_ids"])),
        tensors["tokens"],
        storage,
        tensors["positions"],
        {name.removeprefix(DRAFT_PREFIX): t for name, t in tensors.items() if name.startswith(DRAFT_PREFIX)},
        metadata["notes"],
    )
    if not 0 <= state.committed <= max(0, len(state.tokens) - 1):
        raise ValueError(f"{state.committed} tokens computed of a history of {len(state.tokens)}")
    return state


def _ring_index(state: SequenceState) -> int:
    ring = state.storage.shape[3] - state.sink
    return (
        state.sink + (state.committed - state.sink) % ring
        if state.committed >= state.sink
        else state.committed
    )
