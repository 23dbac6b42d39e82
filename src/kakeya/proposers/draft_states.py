"""What a drafter remembers of sessions: memory of fixed size, taken once, with a slab for each session.

A slab holds keys and values of the last positions that the drafter was shown, one behind the other: one that
it was not shown takes no slot, so nothing attends to it. Keys are rotated at their true positions. The spare
slots are for a draft's own tokens.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kakeya.config import CacheConfig, EngineConfig
from kakeya.engine.slab import KVSlab, SlabGeometry, SlabPool
from kakeya.models.drafter import DrafterConfig

WAITING = 16
"""Rows of hidden states that may wait until a guess needs them: many rows in one matmul cost little more than
one, and a stream that drafts nothing has a matmul now and then only."""

# Drafters are trained on texts of about this length, and a guess takes longer the more it looks back on.
_LONGEST_WINDOW = 1024


class DraftMemory:
    """One allocation of each kind for all sessions.

    `features` [slabs, hidden]: that of each session's newest position.
    `waiting` [slabs, WAITING, taps * hidden]: outputs of the verifier of which nothing was made yet.
    """

    def __init__(self, drafter: DrafterConfig, engine: EngineConfig) -> None:
        self.pool = SlabPool(_geometry(drafter, engine), engine.capacity)
        self.features = torch.empty(engine.capacity, drafter.hidden_size).zero_()
        self.waiting = torch.empty(engine.capacity, WAITING, len(drafter.taps) * drafter.hidden_size).zero_()

    @property
    def nbytes(self) -> int:
        return self.pool.storage.nbytes + self.features.nbytes + self.waiting.nbytes


class DrafterState:
    """One session's part of the memory. It takes a slab when it is first shown something.

    `newest`: the newest position that it was shown; all from `run_start` on were. Of the last `waiting` ones
    `settle` still has to make keys and values. `is_ready`: a draft may begin behind the newest.
    """

    def __init__(
        self, memory: DraftMemory, settle: "Callable[[Sequence[DrafterState]], None]", digest: Tensor
    ) -> None:
        self._memory, self._settle, self._digest = memory, settle, digest
        self._slab: KVSlab | None = None
        self._forget()

    def _forget(self) -> None:
        self.newest, self.run_start, self.waiting = -1, 0, 0
        self.is_ready = False
        if self._slab is not None:
            self._slab.written = self._slab.committed = 0

    @property
    def slab(self) -> KVSlab:
        if self._slab is None:
            self._slab = self._memory.pool.allocate()
        return self._slab

    @property
    def feature(self) -> Tensor:
        return self._memory.features[self.slab.index]

    @property
    def span(self) -> range:
        """The positions that wait."""
        return range(self.newest + 1 - self.waiting, self.newest + 1)

    def expect(self, start: int, rows: int) -> bool:
        """Positions from `start` on are shown now; whether there is room for them to wait."""
        if start != self.newest + 1 or self.waiting + rows > WAITING:
            self._settle([self])
        if start != self.newest + 1:
            if start - self.newest > self.slab.window:
                self._forget()
            self.run_start = start
        self.newest, self.is_ready = start + rows - 1, True
        return rows <= WAITING

    def wait(self, rows: int) -> Tensor:
        """Where the verifier's outputs for so many rows wait."""
        waiting = self._memory.waiting[self.slab.index, self.waiting : self.waiting + rows]
        self.waiting += rows
        return waiting

    def waited(self) -> Tensor:
        """What waits, no longer from here on."""
        waiting = self._memory.waiting[self.slab.index, : self.waiting]
        self.waiting = 0
        return waiting

    def write(self, history: Tensor, feature: Tensor) -> None:
        """Keep keys and values [layers, 2, rows, kv_heads, head_dim] of the next positions, and a feature."""
        slab, end = self.slab, self.slab.written + history.shape[2]
        kept = min(history.shape[2], slab.geometry.cache.slots)
        slots = slab.indices(slab.geometry.slots_of(np.arange(end - kept, end), slab.sink))
        newest = history[:, :, -kept:].transpose(2, 3)
        slab.storage.index_copy_(3, slots, newest.to(slab.storage.dtype))
        slab.written = slab.committed = end
        self.feature.copy_(feature)

    def fork(self) -> "DrafterState":
        twin = DrafterState(self._memory, self._settle, self._digest)
        if self._slab is not None:
            self._settle([self])
            twin.slab.copy_from(self._slab)
            twin.feature.copy_(self.feature)
            twin.newest, twin.run_start, twin.is_ready = self.newest, self.run_start, self.is_ready
        return twin

    def rollback(self, length: int) -> None:
        if self._slab is None or self.newest < length:
            return
        self._settle([self])
        gone = self.newest + 1 - length
        if length < self.run_start or gone > self._slab.geometry.cache.spare:
            self._forget()  # what it would go back to is overwritten, or lies behind a gap
            return
        self._slab.written = self._slab.committed = self._slab.written - gone
        self.newest, self.is_ready = length - 1, False  # the feature of an earlier position is gone

    def export(self) -> Mapping[str, Tensor]:
        if self._slab is None:
            return {}
        self._settle([self])
        return {name: part.clone() for name, part in self._parts().items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what was exported, unless by another drafter or with another window."""
        parts = self._parts()
        if not all(name in tensors and _alike(part, tensors[name]) for name, part in parts.items()):
            return
        if torch.equal(tensors["drafter"], self._digest):
            self.slab.storage.copy_(tensors["history"])
            self.feature.copy_(tensors["feature"])
            self.slab.written, self.newest, self.run_start, ready = tensors["counts"].tolist()
            self.slab.committed, self.is_ready = self.slab.written, bool(ready)

    def _parts(self) -> dict[str, Tensor]:
        return {
            "drafter": self._digest,
            "history": self.slab.storage,
            "feature": self.feature,
            "counts": torch.tensor([self.slab.written, self.newest, self.run_start, self.is_ready]),
        }

    def close(self) -> None:
        if self._slab is not None:
            self._memory.pool.release(self._slab)
            self._slab = None


def _alike(mine: Tensor, other: Tensor) -> bool:
    return mine.shape == other.shape and mine.dtype is other.dtype


def _geometry(drafter: DrafterConfig, engine: EngineConfig) -> SlabGeometry:
    """No more positions than the verifier keeps, none of them for ever, and room for a draft."""
    cache = CacheConfig(sink=0, window=min(engine.cache.window, _LONGEST_WINDOW), spare=drafter.block)
    return SlabGeometry(drafter.layers, drafter.num_kv_heads, drafter.head_dim, cache, engine.dtype)


def state_bytes(drafter: DrafterConfig, engine: EngineConfig) -> int:
    """What one session takes of a DraftMemory."""
    rows = (1 + WAITING * len(drafter.taps)) * drafter.hidden_size * torch.float32.itemsize
    return _geometry(drafter, engine).slab_bytes + rows
