"""The bounded KV cache: one pool allocation, cut into slabs of one shape.

A slab keeps the first `sink` positions for ever and the rest in a ring:

    position p < S  lives in slot p
    position p >= S lives in slot S + (p - S) mod (slots - S)

The last `recall` of the S pinned slots may be written anew between turns, with other tokens of the history
(`recall`). Positions count from 0 and never stop. Tokens are *written* by the backend and *committed* by
the engine; a rollback forgets what was written but not committed, and cannot fail.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kakeya.config import CacheConfig, EngineConfig
from kakeya.engine.device import CPU, DeviceEvent, free_memory, use_huge_pages
from kakeya.errors import ConfigError, InvalidArgument, InvariantViolation, NoFreeSlab
from kakeya.models.config import ModelConfig
from kakeya.models.float_types import FLOAT_TYPES
from kakeya.types import DType, ShareBeginnings, TokenRange

# Sessions whose recalled slots can be put back at one moment. Others wait for a place.
_UNDO_PLACES = 4


@dataclass(frozen=True)
class SlabGeometry:
    """The shape of every slab of a pool."""

    layers: int
    kv_heads: int
    head_dim: int
    cache: CacheConfig
    dtype: DType
    layer_heads: tuple[tuple[int, int], ...] = ()
    """Key heads and their size for each layer, where layers differ; each layer fills the same space."""
    draft_layers: int = 0
    """How many of the layers, the last ones, are a drafter's."""

    @property
    def model_layers(self) -> int:
        """The layers that are the model's own."""
        return self.layers - self.draft_layers

    def plane(self, layer: int) -> tuple[int, int, int, int]:
        """The shape of one layer's keys and values."""
        kv_heads, head_dim = self.layer_heads[layer] if self.layer_heads else (self.kv_heads, self.head_dim)
        return (2, kv_heads, self.cache.slots, head_dim)

    def by_slot(self, storage: Tensor) -> list[Tensor]:
        """Views of a slab, or of some slots' copy, that are all of it and have slots as dimension 3."""
        if not self.layer_heads:
            return [storage]
        slots = storage.shape[3]
        return [
            storage[layer].view(1, 2, kv_heads, slots, head_dim)
            for layer, (kv_heads, head_dim) in enumerate(self.layer_heads)
        ]

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2, self.kv_heads, self.cache.slots, self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * FLOAT_TYPES[self.dtype].itemsize

    @property
    def slab_bytes(self) -> int:
        return self.bytes_per_token * self.cache.slots

    def slots_of(self, positions: npt.NDArray[np.int64], sink: int) -> npt.NDArray[np.int64]:
        """The slot of each position in a slab that keeps `sink` first tokens."""
        return _slots_of(positions, sink, self.cache.slots)


def _slots_of(positions: npt.NDArray[np.int64], sink: int, slots: int) -> npt.NDArray[np.int64]:
    return np.where(positions < sink, positions, sink + (positions - sink) % (slots - sink))


def held_positions(
    slots: int, sink: int, window: int, committed: int, recalled: Sequence[TokenRange] = (), recall: int = 0
) -> npt.NDArray[np.int64]:
    """The position that each slot of a slab holds, -1 where it holds none that a next token needs."""
    held = np.full(slots, -1, dtype=np.int64)
    first = max(sink, committed - window + 1)
    live = np.concatenate([np.arange(min(sink, committed)), np.arange(first, committed)])
    held[_slots_of(live, sink, slots)] = live
    if recalled:
        held[sink - recall : sink] = recalled_positions(recalled, sink - recall, recall)
    return held


def slab_geometry(model: ModelConfig, config: EngineConfig, draft_layers: int = 0) -> SlabGeometry:
    """The slabs that `model` needs, with a drafter on the device of so many layers."""
    layer_heads = tuple((each.kv_heads * model.kv_copies(each), each.head_dim) for each in model.layer_heads)
    return SlabGeometry(
        model.num_layers + draft_layers,
        model.num_kv_heads,
        model.head_dim,
        config.cache,
        config.dtype,
        layer_heads,
        draft_layers,
    )


def prefix_cache_bytes(config: EngineConfig, geometry: SlabGeometry) -> int:
    """What the prefix cache may take: an eighth of the slabs, unless told."""
    if config.share_beginnings is ShareBeginnings.OFF:
        return 0
    if config.prefix_cache_bytes is not None:
        return config.prefix_cache_bytes
    return config.capacity * geometry.slab_bytes // 8


def undo_places(config: EngineConfig) -> int:
    """How many sessions may be between recalling something and the first token of their answer."""
    return min(config.capacity, _UNDO_PLACES) if config.cache.recall else 0


def undo_bytes(config: EngineConfig, geometry: SlabGeometry) -> int:
    """What the copies of recall slots take that can be put back."""
    return undo_places(config) * config.cache.recall * geometry.bytes_per_token


class SlabPool:
    """One allocation of `count` slabs. Allocated and touched once, so resident memory never grows.

    Beside them lie `granules`: room for copies of some slots each, `granule` tokens of a prefix. And
    `undo`: room for copies of slots for recall, each as many as a session may have.

    `transfers` is held by whoever moves a slab's contents between host and device: one at a time, because
    each takes the memory of another slab.

    `allocate` and `release` are safe from any thread, so a session that wakes need not wait for the engine.
    """

    def __init__(
        self,
        geometry: SlabGeometry,
        count: int,
        device: torch.device = CPU,
        granule: int = 1,
        prefix_bytes: int = 0,
    ) -> None:
        self.geometry = geometry
        self.device = device
        self.granule = granule
        self.lap = (geometry.cache.capacity - 1) // granule * granule
        """Where the last granule ends that a session has while nothing of it can be overwritten."""
        self.transfers = threading.Lock()
        available = free_memory(device)
        places, recall = min(count, _UNDO_PLACES) if geometry.cache.recall else 0, geometry.cache.recall
        undo = places * recall * geometry.bytes_per_token
        if count * geometry.slab_bytes + prefix_bytes + undo > available:
            beside = f" and {prefix_bytes:,} bytes of prefixes" if prefix_bytes else ""
            beside += f" and {undo:,} bytes of copies of recall slots" if undo else ""
            raise ConfigError(
                f"the KV pool does not fit in memory: {count} slabs x {geometry.slab_bytes:,} bytes{beside}, "
                f"{available:,} bytes are available"
            )
        self.storage = self._slabs(count)
        self.granules = self._touched(prefix_bytes // (granule * geometry.bytes_per_token), granule)
        self.undo = self._touched(places, recall)
        self._lock = threading.Lock()
        self._free = list(range(count - 1, -1, -1))
        self._ready = [DeviceEvent(device).record() for _ in range(count)]

    def _slabs(self, count: int) -> Tensor:
        return self._touched(count, self.geometry.cache.slots)

    def _touched(self, count: int, slots: int) -> Tensor:
        layers, two, kv_heads, _, head_dim = self.geometry.shape
        shape, dtype = (count, layers, two, kv_heads, slots, head_dim), FLOAT_TYPES[self.geometry.dtype]
        storage = torch.empty(shape, dtype=dtype, device=self.device)
        use_huge_pages(storage)
        return storage.zero_()  # fresh pages stay unmapped until they are written: write them now

    @property
    def free_count(self) -> int:
        return len(self._free)

    def allocate(self, pinned: int | None = None, recall: int = 0, *, clean: bool = True) -> "KVSlab":
        """Hand out a slab that pins its first `pinned` tokens (default: the configured sink), and has
        `recall` slots behind them for what is brought back. Whoever does not want it `clean` overwrites all
        of it, once the device has got to the slab's `ready`."""
        cache = self.geometry.cache
        pinned = cache.sink if pinned is None else pinned
        if not 0 <= recall <= cache.recall:
            allowed = f"from 0 to {cache.recall}" if cache.recall else "0: there are no slots for recall"
            raise InvalidArgument(f"recall_tokens must be {allowed}, got {recall}")
        most = cache.capacity - recall - 1
        if not 0 <= pinned <= most:
            beside = f" + recall {cache.recall - recall}" if cache.recall else ""
            raise InvalidArgument(
                f"pinned prefix must be from 0 to {most} tokens "
                f"(sink {cache.sink} + window {cache.window}{beside} - 1), got {pinned}"
            )
        with self._lock:
            self.check_free()
            index = self._free.pop()
        slab = KVSlab(self, index, pinned + recall, recall)
        slab.ready = self._ready[index]
        # Nothing of the last session may be left, not even in slots that no mask lets through.
        if clean:
            slab.ready.block_stream()
            slab.storage.zero_()
        return slab

    def check_free(self) -> None:
        """Raises NoFreeSlab when all are in use."""
        if not self._free:
            raise NoFreeSlab(f"no free slab: all {self.storage.shape[0]} sessions are in use")

    def release(self, slab: "KVSlab", ready: DeviceEvent | None = None) -> None:
        """Take a slab back; its contents are dead from here on.

        `ready`: when the device is done with it. Else that is what the caller's thread has given it so far.
        """
        ready = ready or DeviceEvent(self.device).record()
        with self._lock:
            assert slab.index not in self._free, "slab released twice"
            self._ready[slab.index] = ready
            self._free.append(slab.index)


class KVSlab:
    """One session's KV storage: a view into the pool and the bookkeeping of what it holds.

    `sink` slots are pinned; the last `recall` of them can be written anew. `recalled` says with what: the
    tokens of these ranges, twice where there is room (`recalled_positions`).
    """

    def __init__(self, pool: SlabPool, index: int, sink: int, recall: int = 0) -> None:
        self.pool = pool
        self.index = index
        self.sink = sink
        self.recall = recall
        self.recalled: tuple[TokenRange, ...] = ()
        self.holds = recalled_positions((), self.pinned, recall)
        """The position whose token each of the slots for recall holds, noted as they are written."""
        self.untouched = sink
        """How many of the first slots have always held their own positions."""
        self.ready = DeviceEvent(pool.device)
        """When the device has done what it had to do to it for others."""
        self.written = 0
        self.committed = 0
        self._overwritten: tuple[Tensor, list[Tensor]] | None = None

    @property
    def geometry(self) -> SlabGeometry:
        return self.pool.geometry

    @property
    def pinned(self) -> int:
        """The first tokens, which stay for ever."""
        return self.sink - self.recall

    @property
    def window(self) -> int:
        """Pinning takes its slots from the window."""
        return self.geometry.cache.capacity - self.sink

    @property
    def storage(self) -> Tensor:
        """[layers, 2, kv_heads, slots, head_dim], keys first."""
        return self.pool.storage[self.index]

    @property
    def _parts(self) -> list[Tensor]:
        return self.geometry.by_slot(self.storage)

    def by_slot(self, start: int, stop: int) -> list[Tensor]:
        """Views of the slots from `start` to `stop`, with slots as dimension 3."""
        return [part[:, :, :, start:stop] for part in self._parts]

    def layer(self, index: int) -> Tensor:
        """[2, kv_heads, slots, head_dim] of that layer."""
        return self.storage[index].view(self.geometry.plane(index))

    @property
    def filled_slots(self) -> int:
        """Slots whose tokens a next token could still attend to."""
        return min(self.committed, self.geometry.cache.capacity)

    @property
    def live_bytes(self) -> int:
        storage = self.storage
        return self.filled_slots * (storage.nbytes // storage.shape[3])

    def ends_first_lap(self, rows: int) -> bool:
        """Whether the next `rows` tokens go beyond the last granule that nothing can overwrite yet."""
        return self.written <= self.pool.lap < self.written + rows

    def reserve(self, rows: int) -> int:
        """Announce that `rows` tokens are about to be written; returns the first one's position.

        Beyond what the spare slots protect, the slots that will be overwritten are saved first,
        so that a rollback can put them back.
        """
        start, end = self.written, self.written + rows
        cache = self.geometry.cache
        if end - self.committed > cache.spare + 1 and end > cache.slots:
            positions = np.arange(max(start, end - (cache.slots - self.sink)), end)
            slots = self.indices(self.geometry.slots_of(positions, self.sink))
            self._overwritten = slots, [part.index_select(3, slots) for part in self._parts]
        self.written = end
        return start

    def commit(self, length: int) -> None:
        """The first `length` tokens are history now (as far as they are written)."""
        if length < self.committed:
            raise InvariantViolation("INV-2", f"position would go back from {self.committed} to {length}")
        if length > self.written:
            raise InvariantViolation("INV-1", f"{length} tokens committed but only {self.written} written")
        self.committed = length
        self._overwritten = None

    def rollback(self) -> None:
        """Forget every token that is written but not committed."""
        if self._overwritten is not None:
            slots, saved = self._overwritten
            for part, kept in zip(self._parts, saved, strict=True):
                part.index_copy_(3, slots, kept)
            self._overwritten = None
        self.written = self.committed

    def indices(self, slots: npt.NDArray[np.int64]) -> Tensor:
        """Slot numbers, to index the storage with where it lies."""
        return torch.from_numpy(slots).to(self.pool.device, non_blocking=True)

    def slot_positions(self) -> npt.NDArray[np.int64]:
        """The committed position each slot holds, -1 where it holds none that a next token needs."""
        slots, recalled = self.geometry.cache.slots, self.recalled
        return held_positions(slots, self.sink, self.window, self.committed, recalled, self.recall)

    def repin(self, ranges: tuple[TokenRange, ...], computed: int) -> None:
        """The slots for recall hold these ranges now: the first `computed` slots were written for them."""
        if computed != self.sink:
            raise InvariantViolation("INV-4", f"slots up to {computed} of {self.sink} hold what was recalled")
        self.recalled = ranges

    def check_recalled(self) -> None:
        """Raises InvariantViolation unless the slots for recall hold what the session says."""
        said = recalled_positions(self.recalled, self.pinned, self.recall)
        if not np.array_equal(self.holds, said):
            raise InvariantViolation("INV-4", f"slots hold {self.holds} and {self.recalled} was recalled")

    def keep_copy(self, place: int) -> None:
        """Copy the slots for recall to a place in the pool, from where `put_back` takes them."""
        for copy, part in self._undo_pairs(place):
            copy.copy_(part)

    def put_back(self, place: int) -> None:
        for copy, part in self._undo_pairs(place):
            part.copy_(copy)

    def _undo_pairs(self, place: int) -> list[tuple[Tensor, Tensor]]:
        copies = self.geometry.by_slot(self.pool.undo[place])
        parts = self.by_slot(self.pinned, self.sink)
        return [(copy[:, :, :, : self.recall], part) for copy, part in zip(copies, parts, strict=True)]

    def copy_slots(self, other: "KVSlab", start: int, stop: int) -> None:
        """Take some slots over from another slab of the same pool."""
        for mine, theirs in zip(self.by_slot(start, stop), other.by_slot(start, stop), strict=True):
            mine.copy_(theirs)

    def copy_from(self, other: "KVSlab", length: int | None = None) -> None:
        """Become a copy of another slab of the same pool and sink: of its committed part, or, where that has
        overwritten no slot which these need, of its first `length` tokens."""
        self.storage.copy_(other.storage)
        self.written = self.committed = other.committed if length is None else length
        self.recalled, self.untouched, self.holds = other.recalled, other.untouched, other.holds.copy()


def recalled_positions(ranges: Sequence[TokenRange], pinned: int, recall: int) -> npt.NDArray[np.int64]:
    """The position whose token each of `recall` slots holds: those of the ranges in order of time, twice as
    far as there is room, the last time as a whole. Before them the earliest others behind the pinned ones.

    A text that comes more often than twice disturbs a model."""
    named = np.concatenate([np.arange(0), *(np.arange(each.start, each.end) for each in ranges)])
    held = np.concatenate([named, named])[-recall:]
    # The first `recall` positions always hold enough that are not named.
    others = np.setdiff1d(np.arange(pinned, pinned + recall), named, assume_unique=True)
    return np.concatenate([others[: recall - len(held)], held])
