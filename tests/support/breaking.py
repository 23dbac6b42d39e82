"""A backend whose device can be made to fail for good, the way CUDA does."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from kakeya import loading
from kakeya.config import EngineConfig
from kakeya.engine.backend import Backend, LaunchedStep, Reduction, StepResult
from kakeya.engine.backends import OpenedBackend, open_backend
from kakeya.engine.batch import Segment
from kakeya.engine.sampler import SampleRequest
from kakeya.models.checkpoint import Checkpoint
from kakeya.runtime import Runtime
from support.ahead import RunsAhead

T = TypeVar("T")

FAULT = "CUDA error: an illegal memory access was encountered"
REASON = f"the engine died: the device failed: {FAULT}"


def fault() -> Exception:
    """What torch raises, advice and all."""
    return torch.AcceleratorError(f"{FAULT}\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n")


class Breakable(RunsAhead):
    """Breaks at the work that `breaks_at` names; then whatever it is given raises, as CUDA's calls do."""

    def __init__(self, source: Backend) -> None:
        super().__init__(source)
        self.breaks_at = ""
        self.sound_launches: int | None = None
        """After so many it breaks at the next."""
        self.broken = False
        self.works = 0
        self.works_when_broken = 0

    def is_lost(self) -> bool:
        return self.broken

    def work(self, name: str) -> None:
        """Some work on the device; of what is not named here, only to find it broken."""
        self.works += 1
        self.works_when_broken += self.broken
        if self.broken or name == self.breaks_at:
            self.broken = True
            raise fault()

    def launch(
        self,
        segments: Sequence[Segment],
        requests: Sequence[SampleRequest],
        hidden_layers: Sequence[int] = (),
    ) -> LaunchedStep:
        if self.sound_launches == 0:
            self.breaks_at = "launch"
        elif self.sound_launches is not None:
            self.sound_launches -= 1
        self.work("launch")
        return super().launch(segments, requests, hidden_layers)

    def follow(self, step: LaunchedStep) -> LaunchedStep:
        self.work("follow")
        return super().follow(step)

    def score(self, segment: Segment, reduce: Reduction[T]) -> list[T]:
        self.work("score")
        return super().score(segment, reduce)

    def _run(
        self, segments: Sequence[Segment], requests: Sequence[SampleRequest], hidden_layers: Sequence[int]
    ) -> LaunchedStep:
        return _Fragile(self, super()._run(segments, requests, hidden_layers))


@dataclass(frozen=True)
class _Fragile:
    device: Breakable
    launched: LaunchedStep

    def result(self) -> StepResult:
        self.device.work("result")
        return self.launched.result()


def open_breakable(checkpoint: Checkpoint, config: EngineConfig, observed_layers: int = 0) -> OpenedBackend:
    """In place of `open_backend`."""
    opened = open_backend(checkpoint, config, observed_layers)
    return replace(opened, backend=Breakable(opened.backend))


def break_after(launches: int) -> None:
    """Every runtime of this process from here on has a device that breaks after so many."""

    def opened(checkpoint: Checkpoint, config: EngineConfig, observed_layers: int = 0) -> OpenedBackend:
        breakable = open_breakable(checkpoint, config, observed_layers)
        assert isinstance(breakable.backend, Breakable)
        breakable.backend.sound_launches = launches
        return breakable

    loading.open_backend = opened


def device_of(broken: Runtime) -> Breakable:
    """The device under a runtime that was opened with `open_breakable`."""
    backend = broken._engine._backend
    assert isinstance(backend, Breakable)
    return backend
