"""Slabs leave the pool and come back while the engine runs.

The engine thread only does the bookkeeping: it lends a resting sequence's slab, or prepares an empty one.
The keys and values are copied by the thread that asked, on the side stream of a device. Nobody else uses the
slab in between.
"""

import math
import mmap
import threading
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from kakeya.engine.device import DeviceEvent, copy_beside, on_side_stream
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.slab import KVSlab, SlabGeometry
from kakeya.engine.state import DRAFT_LAYERS, SequenceState, geometry_name, recall_of
from kakeya.engine.state_bytes import NO_TOKENS

# Buffers that wait to be used again: fresh memory is zeroed by the system, which takes longer than the copy.
_SPARE_BUFFERS = 2


class HostBuffers:
    """Memory on the host for slabs that are away. What is given back is used again. Safe from any thread."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._lock = threading.Lock()
        self._spare: list[Tensor] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory with anything in it."""
        with self._lock:
            for place, spare in enumerate(self._spare):
                if spare.shape == shape and spare.dtype == dtype:
                    return self._spare.pop(place)
        return self._fresh(shape, dtype)

    def taken_by(self, size: int) -> int:
        """The bytes of memory that a buffer of so many takes: torch pins memory in powers of two."""
        return 1 << (size - 1).bit_length() if self._pinned and size else size

    def provide(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Have such memory at hand, which the system has zeroed already: for a thread that must not wait."""
        with self._lock:
            if any(spare.shape == shape and spare.dtype == dtype for spare in self._spare):
                return
        self.give_back(self._fresh(shape, dtype).zero_())

    def give_back(self, buffer: Tensor) -> None:
        """Nobody reads it any more."""
        with self._lock:
            self._spare = [*self._spare[-(_SPARE_BUFFERS - 1) :], buffer]

    def _fresh(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if self._pinned or size == 0:
            return torch.empty(shape, dtype=dtype, pin_memory=self._pinned)
        # Straight from the system, and back to it. The allocator keeps a heap for each thread, and what one
        # thread takes and another frees stays with the process: nearly twice what the host tier may hold.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages takes longer for the first copy
                memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=dtype).view(shape)


def lent_state(sequence: TokenSequence, fingerprint: str) -> SequenceState:
    """A sequence's state in place: its storage is the slab's own. Call on the engine thread.

    It is whole as long as nothing is computed. The tokens stay with the sequence. While a generate runs, its
    proposers' part is ahead of what is committed, and is left out.
    """
    slab, layers = sequence.slab, sequence.slab.geometry.model_layers
    draft: dict[str, Tensor] = {}
    if sequence.request is None:
        draft |= sequence.draft.export() if sequence.draft is not None else {}
        if slab.geometry.draft_layers:
            draft[DRAFT_LAYERS] = slab.storage[layers:]
    return SequenceState(
        fingerprint=fingerprint,
        geometry=geometry_name(slab.geometry),
        sink=slab.sink,
        committed=slab.committed,
        eos_token_ids=tuple(sorted(sequence.eos_token_ids)),
        tokens=NO_TOKENS,
        storage=slab.storage[:layers],
        positions=torch.from_numpy(slab.slot_positions()),
        draft=draft,
        ready=DeviceEvent(slab.pool.device).record(),
        recall=recall_of(sequence),
    )


def lifted(
    state: SequenceState, geometry: SlabGeometry, device: torch.device, buffers: HostBuffers
) -> SequenceState:
    """A copy on the host of what lies in a lent slab, without slots that were never used."""
    used = used_slots(state.committed, state.sink, geometry)
    # The engine's tensors are such, and so are buffers that it has filled.
    with torch.inference_mode(), on_side_stream(device):
        if state.ready is not None:
            state.ready.block_stream()
        storage = buffers.take(copy_shape(used, geometry), state.storage.dtype)
        for copy, part in zip(geometry.by_slot(storage), geometry.by_slot(state.storage), strict=True):
            copy_beside(copy, part[:, :, :, :used])
        draft = {name: tensor.to("cpu", copy=True) for name, tensor in state.draft.items()}
        DeviceEvent(device).record().wait()
    return replace(state, storage=storage, positions=state.positions[:used], draft=draft, ready=None)


def lay(slab: KVSlab, state: SequenceState) -> None:
    """Fill a slab with the keys and values of a state, and the rest of it with zeros. It is whole when the
    device has got to its `ready`. Not for the engine thread.
    """
    geometry, used = slab.geometry, state.storage.shape[3]
    with torch.inference_mode(), on_side_stream(slab.pool.device):
        slab.ready.block_stream()
        model_layers = slab.storage[: geometry.model_layers]
        pairs = zip(geometry.by_slot(model_layers), geometry.by_slot(state.storage), strict=True)
        for part, kept in pairs:
            copy_beside(part[:, :, :, :used], kept)
            part[:, :, :, used:].zero_()
        drafts, kept_drafts = slab.storage[geometry.model_layers :], state.draft.get(DRAFT_LAYERS)
        if kept_drafts is not None and kept_drafts.shape == drafts.shape:
            drafts.copy_(kept_drafts)
        else:
            drafts.zero_()
        slab.ready = DeviceEvent(slab.pool.device).record()


def clear(slab: KVSlab) -> None:
    """Fill a slab with zeros, like `lay`."""
    with torch.inference_mode(), on_side_stream(slab.pool.device):
        slab.ready.block_stream()
        slab.storage.zero_()
        slab.ready = DeviceEvent(slab.pool.device).record()


def rebuild_start(length: int, sink: int, geometry: SlabGeometry, block: int) -> int:
    """Where to begin to compute a history of `length` tokens again, behind its sinks, for an exact end.

    What a layer keeps of a token depends on a window of the layer below. So it depends on nothing that is
    further back than as many windows as there are layers. The place is a block's border; 0 is the beginning.
    No other place lies in the first lap, whose slots others copy: those before it are never computed.
    """
    capacity = geometry.cache.capacity
    start = (length - geometry.model_layers * (capacity - sink)) // block * block
    return start if start >= capacity else 0


def used_slots(committed: int, sink: int, geometry: SlabGeometry) -> int:
    """In the first lap of the ring, position p lies in slot p."""
    slots = geometry.cache.slots
    return max(committed, sink + 1) if committed <= slots else slots


def copy_shape(used: int, geometry: SlabGeometry) -> tuple[int, int, int, int, int]:
    """The shape of a copy of the first `used` slots."""
    return (geometry.model_layers, 2, geometry.kv_heads, used, geometry.head_dim)
