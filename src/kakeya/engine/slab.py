"""The bounded KV cache: one pool allocation, cut into slabs of one shape.

A slab keeps the first `sink` positions for ever and the rest in a ring:

    position p < S  lives in slot p
    position p >= S lives in slot S + (p - S) mod (slots - S)

Positions count from 0 and never stop. Tokens are *written* by the backend and *committed* by
the engine; a rollback forgets what was written but not committed, and cannot fail.
"""

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kakeya.config import CacheConfig, EngineConfig
from kakeya.engine.device import CPU, free_memory, use_huge_pages
from kakeya.errors import ConfigError, InvalidArgument, InvariantViolation, ResourceExhausted
from kakeya.models.config import ModelConfig
from kakeya.models.float_types import FLOAT_TYPES
from kakeya.types import DType, ShareBeginnings


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
        ring = self.cache.slots - sink
        return np.where(positions < sink, positions, sink + (positions - sink) % ring)


def slab_geometry(model: ModelConfig, config: EngineConfig) -> SlabGeometry:
    """The slabs that `model` needs."""
    layer_heads = tuple((each.kv_heads * model.kv_copies(each), each.head_dim) for each in model.layer_heads)
    return SlabGeometry(
        model.num_layers, model.num_kv_heads, model.head_dim, config.cache, config.dtype, layer_heads
    )


def prefix_cache_bytes(config: EngineConfig, geometry: SlabGeometry) -> int:
    """What the cache of beginnings may take: an eighth of the slabs, unless told."""
    if config.share_beginnings is ShareBeginnings.OFF:
        return 0
    if config.prefix_cache_bytes is not None:
        return config.prefix_cache_bytes
    return config.capacity * geometry.slab_bytes // 8


class SlabPool:
    """One allocation of `count` slabs. Allocated and touched once, so resident memory never grows.

    Beside them lie `granules`: room for copies of some slots each, `granule` tokens of a beginning.

    `transfers` is held by whoever moves a slab's contents between host and device: one at a time, because
    each takes the memory of another slab.
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
        self.transfers = threading.Lock()
        available = free_memory(device)
        if count * geometry.slab_bytes + prefix_bytes > available:
            beside = f" and {prefix_bytes:,} bytes of beginnings" if prefix_bytes else ""
            raise ConfigError(
                f"the KV pool does not fit in memory: {count} slabs x {geometry.slab_bytes:,} bytes{beside}, "
                f"{available:,} bytes are available"
            )
        self.storage = self._touched(count, geometry.cache.slots)
        self.granules = self._touched(prefix_bytes // (granule * geometry.bytes_per_token), granule)
        self._free = list(range(count - 1, -1, -1))

    def _touched(self, count: int, slots: int) -> Tensor:
        layers, two, kv_heads, _, head_dim = self.geometry.shape
        shape, dtype = (count, layers, two, kv_heads, slots, head_dim), FLOAT_TYPES[self.geometry.dtype]
        storage = torch.empty(shape, dtype=dtype, device=self.device)
        use_huge_pages(storage)
        return storage.zero_()  # fresh pages stay unmapped until they are written: write them now

    def of_layer(self, layer: int) -> Tensor:
        """All slabs [count, layers, 2, kv_heads, slots, head_dim] in the shape of that layer; of other layers
        only the addresses are right."""
        if not self.geometry.layer_heads:
            return self.storage
        return self.storage.view(*self.storage.shape[:2], *self.geometry.plane(layer))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def allocate(self, sink: int | None = None) -> "KVSlab":
        """Hand out a slab that pins its first `sink` tokens (default: the configured sink)."""
        cache = self.geometry.cache
        sink = cache.sink if sink is None else sink
        if not 0 <= sink < cache.capacity:
            raise InvalidArgument(
                f"pinned prefix must be from 0 to {cache.capacity - 1} tokens "
                f"(sink {cache.sink} + window {cache.window} - 1), got {sink}"
            )
        if not self._free:
            raise ResourceExhausted(f"no free slab: all {self.storage.shape[0]} sessions are in use")
        slab = KVSlab(self, self._free[-1], sink)
        # Nothing of the last session may be left, not even in slots that no mask lets through.
        slab.storage.zero_()
        self._free.pop()
        return slab

    def release(self, slab: "KVSlab") -> None:
        """Take a slab back; its contents are dead from here on."""
        assert slab.index not in self._free, "slab released twice"
        self._free.append(slab.index)


class KVSlab:
    """One session's KV storage: a view into the pool and the bookkeeping of what it holds."""

    def __init__(self, pool: SlabPool, index: int, sink: int) -> None:
        self.pool = pool
        self.index = index
        self.sink = sink
        self.written = 0
        self.committed = 0
        self._overwritten: tuple[Tensor, list[Tensor]] | None = None

    @property
    def geometry(self) -> SlabGeometry:
        return self.pool.geometry

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
        held = np.full(self.geometry.cache.slots, -1, dtype=np.int64)
        first = max(self.sink, self.committed - self.window + 1)
        live = np.concatenate([np.arange(min(self.sink, self.committed)), np.arange(first, self.committed)])
        held[self.geometry.slots_of(live, self.sink)] = live
        return held

    def copy_slots(self, other: "KVSlab", start: int, stop: int) -> None:
        """Take some slots over from another slab of the same pool."""
        for mine, theirs in zip(self.by_slot(start, stop), other.by_slot(start, stop), strict=True):
            mine.copy_(theirs)

    def copy_from(self, other: "KVSlab") -> None:
        """Become a copy of another slab of the same pool and sink (its committed part)."""
        self.storage.copy_(other.storage)
        self.written = self.committed = other.committed
