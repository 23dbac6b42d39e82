"""Shapes opened on the device: a runtime with random weights, and its backend for bare steps."""

import gc
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Self

import torch

from kakeya.bench.gpu.device import free_bytes
from kakeya.bench.gpu.plan import GpuPlan
from kakeya.bench.gpu.results import Memory, PlannedMemory, UsedMemory
from kakeya.bench.gpu.shapes import SHAPES, RandomCheckpoint, Shape
from kakeya.config import EngineConfig
from kakeya.engine.backends import open_device
from kakeya.engine.cuda.backend import CudaBackend
from kakeya.engine.cuda.memory import device_memory
from kakeya.runtime import Runtime
from kakeya.types import BackendChoice, KernelChoice, Numerics


@dataclass(frozen=True)
class RigKey:
    """Which shape, for how many sessions, in which numerics."""

    shape: str
    sessions: int
    numerics: Numerics = Numerics.FAST


@dataclass(frozen=True)
class Rig:
    """One shape, open. `backend` may be stepped while no session of `runtime` generates."""

    shape: Shape
    runtime: Runtime
    backend: CudaBackend


@dataclass
class MemoryMeter:
    """What one shape takes of its device besides its slabs, counted from before it is opened.

    `earlier` is what the run had lost by then: libraries that other work brought along, and no other shape.
    """

    device: torch.device
    planned: PlannedMemory
    pool_bytes: int
    used: UsedMemory

    def __post_init__(self) -> None:
        self._before = free_bytes(self.device)

    def note_opened(self) -> None:
        """It is open: weights, buffers and graphs are there, and nothing has run."""
        # Random weights are made on the device. What making them took would not be taken in a server.
        torch.cuda.empty_cache()  # nothing where there is no CUDA
        self.used = replace(self.used, opened=self._taken())

    def note_stepped(self) -> None:
        """Steps have run; the most that such a look has found counts."""
        taken, before = self._taken(), self.used.stepped
        most = taken if taken is None or before is None else max(taken, before)
        self.used = replace(self.used, stepped=most)

    def _taken(self) -> int | None:
        gone = lost(self._before, self.device)
        return None if gone is None else gone - self.pool_bytes


def lost(before: int | None, device: torch.device) -> int | None:
    """Bytes of the device that are not free any more; None for one that does not tell."""
    free = free_bytes(device)
    return None if free is None or before is None else before - free


class Workshop:
    """Keeps the rigs that the work at hand needs, and closes the others first: weights are large.

    A context manager; leaving it closes all.
    """

    def __init__(self, device: torch.device, plan: GpuPlan) -> None:
        self.device, self.plan = device, plan
        self._rigs: dict[RigKey, Rig] = {}
        self._meters: dict[RigKey, MemoryMeter] = {}
        self._free_at_first = free_bytes(device)

    def rig(self, key: RigKey) -> Rig:
        """This one alone stays open."""
        return self.rigs([key])[0]

    def rigs(self, keys: Iterable[RigKey]) -> list[Rig]:
        """Those asked for, in that order, opened unless they are; no others stay."""
        wanted = list(keys)
        self._close([key for key in self._rigs if key not in wanted])
        for key in wanted:
            if key not in self._rigs:
                self._rigs[key] = self._open(key)
        return [self._rigs[key] for key in wanted]

    def clear(self) -> None:
        """Close all of them: something broke, or other work needs the memory."""
        self._close(list(self._rigs))

    def note_memory(self) -> None:
        """The rigs have run, and nothing else has since they were opened."""
        # What those below the newest have taken since cannot be told from what that one has.
        for newest in list(self._rigs)[-1:]:
            self._meters[newest].note_stepped()

    def memory(self) -> list[Memory]:
        """What each rig that was ever opened took, and was planned to take."""
        return [
            Memory(key.shape, key.sessions, key.numerics, meter.planned, meter.pool_bytes, meter.used)
            for key, meter in self._meters.items()
        ]

    def _open(self, key: RigKey) -> Rig:
        plan, shape = self.plan, SHAPES[key.shape]
        config = EngineConfig(
            backend=BackendChoice.CUDA,
            cache=plan.cache,
            capacity=key.sessions,
            numerics=key.numerics,
            prefill_block=plan.prefill_block,
            max_batch_tokens=plan.max_batch_tokens,
        )
        meter = self._meters[key] = MemoryMeter(
            self.device,
            PlannedMemory(**asdict(device_memory(shape.model, config))),
            pool_bytes=key.sessions * config.cache.slots * shape.kv_bytes_per_token,
            used=UsedMemory(earlier=None if self._rigs else lost(self._free_at_first, self.device)),
        )
        rig = self._opened(shape, config)
        meter.note_opened()
        return rig

    def _opened(self, shape: Shape, config: EngineConfig) -> Rig:
        checkpoint = RandomCheckpoint(shape, self.device)
        if self.device.type == "cuda":
            runtime = Runtime.open(checkpoint, config, name=shape.name)
            backend = runtime.backend
        else:  # a CPU's runtime computes in another way; the backend of a device runs there as its own double
            on_cpu = replace(config, backend=BackendChoice.CPU, kernels=KernelChoice.TORCH, threads=1)
            runtime = Runtime.open(checkpoint, on_cpu, name=shape.name)
            backend = open_device(checkpoint, config, self.device).backend
        assert isinstance(backend, CudaBackend)
        return Rig(shape, runtime, backend)

    def _close(self, keys: Iterable[RigKey]) -> None:
        for key in keys:
            self._rigs.pop(key).runtime.close()
        # Backends refer to themselves through their graphs, so counting references does not free them.
        gc.collect()
        torch.cuda.empty_cache()  # nothing where there is no CUDA

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
