"""Engines: short ways to talk to one, proposers, a scheduler, and backends that run ahead or break."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kakeya import loading
from kakeya.config import EngineConfig
from kakeya.engine.backend import Backend, Failed, LaunchedStep, Reduction, StepOutput, StepResult
from kakeya.engine.backends import OpenedBackend, open_backend
from kakeya.engine.batch import PENDING, PlannedSegment, Segment
from kakeya.engine.engine import Engine
from kakeya.engine.proposer import DraftRequest
from kakeya.engine.request import Request
from kakeya.engine.sampler import SampleRequest
from kakeya.engine.scheduler import Scheduler
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.shared_prefixes import SharedPrefixes
from kakeya.engine.slab import SlabGeometry, SlabPool
from kakeya.engine.stream import EventStream
from kakeya.models.checkpoint import Checkpoint
from kakeya.runtime import Runtime
from kakeya.types import DoneEvent, DType, SamplingParams, ShareBeginnings, TokenEvent

T = TypeVar("T")

GREEDY = SamplingParams()


def tokens_of(stream: EventStream) -> list[int]:
    return [event.token_id for event in stream if isinstance(event, TokenEvent)]


def say(
    engine: Engine,
    sequence: TokenSequence,
    tokens: Sequence[int],
    count: int,
    sampling: SamplingParams = GREEDY,
) -> list[int]:
    """One turn: append, generate, read to the end."""
    engine.append(sequence, list(tokens))
    return tokens_of(engine.generate(sequence, count, sampling))


def done_of(stream: EventStream) -> DoneEvent:
    last = list(stream)[-1]
    assert isinstance(last, DoneEvent)
    return last


class NothingKept:
    """A draft state with nothing in it."""

    def fork(self) -> "NothingKept":
        return self

    def rollback(self, length: int) -> None:
        pass

    def export(self) -> Mapping[str, Tensor]:
        return {}

    def close(self) -> None:
        pass


class FunctionProposer:
    """Guesses what `guess(tokens so far)` says, up to three tokens."""

    name = "function"
    is_free = False
    max_draft = 3
    hidden_layers = ()

    def __init__(self, guess: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self.guess = guess

    def new_state(self) -> NothingKept:
        return NothingKept()

    def restore(self, tensors: Mapping[str, Tensor]) -> NothingKept:
        return NothingKept()

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        return [list(self.guess(request.tokens))[: request.limit] for request in requests]

    def observe(self, state: NothingKept, start: int, hidden: Mapping[int, Tensor]) -> None:
        pass


class Room:
    """A scheduler with real sequences that nothing computes, unless a backend is given."""

    def __init__(
        self, config: EngineConfig, backend: Backend | None = None, *, any_cut: bool = False
    ) -> None:
        self.served: Counter[str] = Counter()
        self._backend = backend
        geometry = SlabGeometry(1, 1, 2, config.cache, DType.FLOAT32)
        self._pool = SlabPool(geometry, config.capacity) if backend is None else backend.pool
        prefixes = SharedPrefixes(ShareBeginnings.OFF, self._pool, any_cut=any_cut)
        self.scheduler = Scheduler(config, prefixes, any_cut=any_cut)

    def start(self, owner: str, prompt: int, emitted: int = 0, *, appends: int = 1) -> Request:
        """Queue a prompt of so many tokens, which came in so many appends of one length."""
        sequence = TokenSequence(self._pool.allocate(), owner, (), None)
        for _ in range(appends):
            sequence.append([3] * (prompt // appends))
        if emitted:
            sequence.slab.written = prompt - 1
        request = Request(sequence, EventStream(lambda: None), 10**6, SamplingParams(), emitted=emitted)
        self.scheduler.add(request)
        return request

    def step(self, drafts: dict[Request, list[int]] | None = None) -> list[tuple[str, int]]:
        """The owner and the rows of each segment of the next step."""
        segments = self.scheduler.plan(self.scheduler.ready(), drafts or {})
        for segment in segments:
            self.served[segment.sequence.owner] += segment.rows
            segment.sequence.slab.written += segment.rows
        self._compute(segments)
        for segment in segments:
            if segment.logit_rows:
                segment.sequence.tokens.append(3)
                segment.request.emitted += 1
        return [(segment.sequence.owner, segment.rows) for segment in segments]

    def check_prompt_beside_streams(self) -> None:
        """A prompt of three blocks of 2,048 takes the next three steps, and nobody else waits for it."""
        streams = len(self.scheduler.active)
        self.start("reader", 3 * 2048)
        for _ in range(3):
            step = self.step()
            assert len(step) == streams + 1
            assert ("reader", 2048) in step
        assert ("reader", 1) in self.step()

    def _compute(self, segments: list[PlannedSegment]) -> None:
        if self._backend is not None:
            requests = [request for segment in segments for request in segment.sample_requests(0)]
            assert len(self._backend.launch(segments, requests).result().sampled) == len(requests)


class Extended:
    """Extends the class of whatever backend it is made from, and takes its place."""

    def __new__(cls, source: Backend, *rest: object) -> "Extended":
        return object.__new__(type(cls.__name__, (cls, type(source)), {}))

    def __init__(self, source: Backend) -> None:
        self.__dict__ |= source.__dict__


class Hooked(Extended):
    """A real backend with something that happens before each run."""

    def __init__(self, source: Backend, before: Callable[[Sequence[Segment]], None]) -> None:
        super().__init__(source)
        self.before = before
        self.batches: list[list[tuple[str, int]]] = []

    def run(self, segments: Sequence[Segment], hidden_layers: Sequence[int] = ()) -> StepOutput:
        self.batches.append([(s.sequence.owner, s.rows) for s in segments])
        self.before(segments)
        return super().run(segments, hidden_layers)


class RunsAhead:
    """Keeps the contract of a device that runs ahead, on the CPU.

    It takes PENDING tokens, since it alone knows what it chose last. Errors show when results are read.
    """

    runs_ahead = True
    draft_counts = ()
    most_drafting = 0

    def __init__(self, source: Backend) -> None:
        self._source = source
        self._newest: dict[int, int] = {}
        self._last: tuple[LaunchedStep, Sequence[Segment], Sequence[SampleRequest]] | None = None
        self.pending_rows = 0
        self.repeated_steps = 0

    @property
    def pool(self) -> SlabPool:
        return self._source.pool

    @property
    def vocab_size(self) -> int:
        return self._source.vocab_size

    @property
    def fingerprint(self) -> str:
        return self._source.fingerprint

    @property
    def any_cut(self) -> bool:
        return self._source.any_cut

    def is_lost(self) -> bool:
        return self._source.is_lost()

    def launch_drafting(
        self, segments: Sequence[Segment], requests: Sequence[SampleRequest], count: int
    ) -> LaunchedStep:
        raise AssertionError("it has no drafter")

    def score(self, segment: Segment, reduce: Reduction[T]) -> list[T]:
        return self._source.score(segment, reduce)

    def launch(
        self,
        segments: Sequence[Segment],
        requests: Sequence[SampleRequest],
        hidden_layers: Sequence[int] = (),
    ) -> LaunchedStep:
        step = self._run(segments, requests, hidden_layers)
        self._last = step, segments, requests
        return step

    def follow(self, step: LaunchedStep) -> LaunchedStep:
        assert self._last is not None
        last, segments, requests = self._last
        assert step is last, "only the last step can be followed"
        self.repeated_steps += 1
        further = [replace(s, start=s.start + 1, tokens=[PENDING]) for s in segments]
        return self.launch(further, [request._replace(position=request.position + 1) for request in requests])

    def _run(
        self, segments: Sequence[Segment], requests: Sequence[SampleRequest], hidden_layers: Sequence[int]
    ) -> LaunchedStep:
        try:
            step = self._source.launch([self._known(s) for s in segments], requests, hidden_layers)
        except Exception as error:
            return Failed(error)
        chosen = iter(step.result().sampled)
        for segment in segments:
            for _ in range(segment.logit_rows):
                self._newest[segment.sequence.slab.index] = next(chosen).token_id
        return step

    def _known(self, segment: Segment) -> Segment:
        if segment.tokens[0] != PENDING:
            return segment
        self.pending_rows += 1
        return replace(segment, tokens=[self._newest[segment.sequence.slab.index]])


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


def open_breakable(checkpoint: Checkpoint, config: EngineConfig, *rest: Any) -> OpenedBackend:
    """In place of `open_backend`."""
    opened = open_backend(checkpoint, config, *rest)
    return replace(opened, backend=Breakable(opened.backend))


def break_after(launches: int) -> None:
    """Every runtime of this process from here on has a device that breaks after so many."""

    def opened(checkpoint: Checkpoint, config: EngineConfig, *rest: Any) -> OpenedBackend:
        breakable = open_breakable(checkpoint, config, *rest)
        assert isinstance(breakable.backend, Breakable)
        breakable.backend.sound_launches = launches
        return breakable

    loading.open_backend = opened


def device_of(broken: Runtime) -> Breakable:
    """The device under a runtime that was opened with `open_breakable`."""
    backend = broken._engine._backend
    assert isinstance(backend, Breakable)
    return backend
