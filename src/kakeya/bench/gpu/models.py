"""Models with random weights, open on the device: a runtime, and its backend for bare steps."""

import gc
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from kakeya.bench.gpu.device import free_bytes, timed
from kakeya.bench.gpu.plan import GpuPlan
from kakeya.bench.gpu.results import Memory
from kakeya.bench.gpu.shapes import SHAPES, RandomCheckpoint, Shape
from kakeya.bench.report import as_json
from kakeya.config import EngineConfig
from kakeya.engine.backends import open_device
from kakeya.engine.batch import Segment
from kakeya.engine.cuda.backend import CudaBackend
from kakeya.engine.cuda.memory import device_memory
from kakeya.engine.sampler import SampleRequest
from kakeya.engine.sequence import TokenSequence
from kakeya.runtime import Runtime
from kakeya.types import BackendChoice, KernelChoice, Numerics, SamplingParams

Replay = Callable[[], None]
# prepare(position): a step of sessions that have so many tokens already.
Prepare = Callable[[int], Replay]

# Steps of one kind before it is another's turn.
_IN_A_ROW = 5


@dataclass(frozen=True)
class Setup:
    """Which shape, for how many sessions, in which numerics."""

    shape: str
    sessions: int
    numerics: Numerics = Numerics.FAST


@dataclass(frozen=True)
class OpenModel:
    """`backend` may run bare steps while no session of `runtime` generates."""

    shape: Shape
    runtime: Runtime
    backend: CudaBackend

    @contextmanager
    def bare_steps(self, sessions: int, tokens: int = 1) -> Iterator[Prepare]:
        """Steps in which each session reads so many tokens: captured graphs, without the engine around them.

        A step is prepared as a launch prepares it, and then replayed on the same tables. Slabs are filled
        with noise, because zeros are cheaper to compute with, and given back.
        """
        slabs = [self.backend.pool.allocate() for _ in range(sessions)]
        sequences = [TokenSequence(slab, "bench", (), None) for slab in slabs]
        numbers, vocabulary = random.Random(0), range(self.backend.vocab_size)

        def prepare(position: int) -> Replay:
            segments = [
                Segment(sequence, position, numbers.choices(vocabulary, k=tokens), 0, 1)
                for sequence in sequences
            ]
            requests = [SampleRequest(SamplingParams(), segment.end) for segment in segments]
            return self.backend.prepare(segments, requests)

        try:
            for slab in slabs:
                slab.storage.normal_()
            yield prepare
        finally:
            for slab in slabs:
                self.backend.pool.release(slab)

    def step_seconds(self, sessions: int, position: int, repeats: int, tokens: int = 1) -> list[float]:
        """Of bare steps, one after the other."""
        with self.bare_steps(sessions, tokens) as prepare:
            return timed(self.backend.pool.device, prepare(position), repeats)


def seconds_in_turns(
    device: torch.device, prepares: Sequence[Callable[[], Replay]], repeats: int
) -> list[list[float]]:
    """Steps of several kinds, in turns: for each repetition the median of a few."""
    taken: list[list[float]] = [[] for _ in prepares]
    for repetition in range(repeats):
        places = range(len(prepares))
        for place in places if repetition % 2 else reversed(places):
            taken[place].append(statistics.median(timed(device, prepares[place](), _IN_A_ROW)))
    return taken


class OpenModels:
    """Keeps the models that a job needs, and closes the others first: weights are large."""

    def __init__(self, device: torch.device, plan: GpuPlan) -> None:
        self.device, self.plan = device, plan
        self.memory: dict[Setup, Memory] = {}
        """Of every model that was ever opened."""
        self._open: dict[Setup, OpenModel] = {}
        self._free = free_bytes(device)
        self._free_before: dict[Setup, int | None] = {}

    def get(self, *setups: Setup) -> list[OpenModel]:
        """These, in this order. Only these stay open."""
        self._close([setup for setup in self._open if setup not in setups])
        for setup in setups:
            if setup not in self._open:
                self._open[setup] = self._opened(setup)
        return [self._open[setup] for setup in setups]

    def close(self) -> None:
        """Close all: the run is over, something broke, or other work needs the memory."""
        self._close(list(self._open))

    def note_steps(self) -> None:
        """Note the memory of the newest model after steps. That of the others cannot be told from it."""
        for newest in list(self._open)[-1:]:
            row = self.memory[newest]
            before, now = row.used["stepped"], self._used(newest)
            most = now if before is None or now is None else max(before, now)
            self.memory[newest] = replace(row, used=row.used | {"stepped": most})

    def _opened(self, setup: Setup) -> OpenModel:
        plan, shape = self.plan, SHAPES[setup.shape]
        config = plan.engine_config(setup.sessions, backend=BackendChoice.CUDA, numerics=setup.numerics)
        planned: dict[str, int] = as_json(device_memory(shape.model, config))
        pool = setup.sessions * config.cache.slots * shape.kv_bytes_per_token
        before = self._free_before[setup] = free_bytes(self.device)
        # What the run had lost: libraries. With another model open it cannot be told.
        earlier = None if self._open or before is None or self._free is None else self._free - before
        used = {"earlier": earlier, "opened": None, "stepped": None}
        self.memory[setup] = Memory(setup.shape, setup.sessions, setup.numerics, planned, pool, used)
        opened = self._load(shape, config)
        # Random weights are made on the device. A server does not need that memory.
        torch.cuda.empty_cache()  # does nothing without CUDA
        self.memory[setup] = replace(self.memory[setup], used=used | {"opened": self._used(setup)})
        return opened

    def _load(self, shape: Shape, config: EngineConfig) -> OpenModel:
        checkpoint = RandomCheckpoint(shape, self.device)
        if self.device.type == "cuda":
            runtime = Runtime.open(checkpoint, config, name=shape.name)
            backend = runtime.backend
        else:  # a CPU's runtime has another backend: the CUDA backend runs beside it, with torch kernels
            on_cpu = replace(config, backend=BackendChoice.CPU, kernels=KernelChoice.TORCH, threads=1)
            runtime = Runtime.open(checkpoint, on_cpu, name=shape.name)
            backend = open_device(checkpoint, config, self.device).backend
        assert isinstance(backend, CudaBackend)
        return OpenModel(shape, runtime, backend)

    def _used(self, setup: Setup) -> int | None:
        """Bytes that the device lost since before the model was opened, without its slabs."""
        before, now = self._free_before[setup], free_bytes(self.device)
        return None if before is None or now is None else before - now - self.memory[setup].pool

    def _close(self, setups: Sequence[Setup]) -> None:
        for setup in setups:
            self._open.pop(setup).runtime.close()
        gc.collect()  # backends refer to themselves through their graphs
        torch.cuda.empty_cache()  # does nothing without CUDA
