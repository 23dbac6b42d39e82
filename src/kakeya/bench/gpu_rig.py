"""Shapes opened on the device: a runtime with random weights, and its backend for bare steps."""

import gc
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch

from kakeya.bench.gpu_memory import MemoryMeter, free_bytes, gone_since
from kakeya.bench.gpu_plan import GpuPlan
from kakeya.bench.gpu_shapes import SHAPES, Shape
from kakeya.bench.random_checkpoint import RandomCheckpoint
from kakeya.config import EngineConfig
from kakeya.engine.cuda.backend import CudaBackend
from kakeya.engine.cuda.memory import device_memory
from kakeya.engine.opening import open_device
from kakeya.runtime import Runtime
from kakeya.text import Tokenizer
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

    def random_tokens(self, count: int, seed: int) -> list[int]:
        """The same for the same seed."""
        return random_tokens(self.shape, count, seed)


def random_tokens(shape: Shape, count: int, seed: int) -> list[int]:
    """Of its vocabulary, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(shape.model.vocab_size, (count,), generator=generator).tolist()
    return drawn


class Workshop:
    """Keeps the rigs that the work at hand needs, and closes the others first: weights are large.

    A context manager; leaving it closes all.
    """

    def __init__(self, device: torch.device, plan: GpuPlan) -> None:
        self.device, self.plan = device, plan
        self._rigs: dict[RigKey, Rig] = {}
        self._meters: dict[RigKey, MemoryMeter] = {}
        self._free_at_first = free_bytes(device)

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

    def memory(self) -> list[dict[str, Any]]:
        """What each rig that was ever opened took, and was planned to take."""
        return [{**asdict(key), **meter.figures()} for key, meter in self._meters.items()]

    def _open(self, key: RigKey) -> Rig:
        config = self._config(key)
        meter = self._meters[key] = self._meter(key, config)
        rig = self._opened(SHAPES[key.shape], config)
        meter.note_opened()
        return rig

    def _config(self, key: RigKey) -> EngineConfig:
        plan = self.plan
        return EngineConfig(
            backend=BackendChoice.CUDA,
            cache=plan.cache,
            capacity=key.sessions,
            numerics=key.numerics,
            prefill_block=plan.prefill_block,
            max_batch_tokens=plan.max_batch_tokens,
        )

    def _meter(self, key: RigKey, config: EngineConfig) -> MemoryMeter:
        shape = SHAPES[key.shape]
        return MemoryMeter(
            self.device,
            earlier=None if self._rigs else gone_since(self._free_at_first, self.device),
            planned=asdict(device_memory(shape.model, config)),
            pool_bytes=key.sessions * config.cache.slots * shape.kv_bytes_per_token,
        )

    def _opened(self, shape: Shape, config: EngineConfig) -> Rig:
        checkpoint = RandomCheckpoint(shape, self.device)
        runtime = self._runtime(checkpoint, config, shape.name)
        if self.device.type == "cuda":
            backend = runtime._engine._backend
        else:  # a CPU's runtime computes in another way; the backend of a device runs there as its own double
            backend = open_device(checkpoint, config, self.device).backend
        assert isinstance(backend, CudaBackend)
        return Rig(shape, runtime, backend)

    def _runtime(self, checkpoint: RandomCheckpoint, config: EngineConfig, name: str) -> Runtime:
        if self.device.type != "cuda":
            config = replace(config, backend=BackendChoice.CPU, kernels=KernelChoice.TORCH, threads=1)
        return Runtime(checkpoint, Tokenizer(checkpoint.tokenizer_files()), config, model=name)

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
