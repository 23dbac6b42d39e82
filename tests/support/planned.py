"""A scheduler with real sequences, and a device that computes what it plans: make-believe, or real."""

from collections import Counter

from kakeya.config import EngineConfig
from kakeya.engine.backend import Backend
from kakeya.engine.batch import PlannedSegment
from kakeya.engine.request import Request
from kakeya.engine.scheduler import Scheduler
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.slab import SlabGeometry, SlabPool
from kakeya.engine.stream import EventStream
from kakeya.types import DType, SamplingParams


class Room:
    """Sessions of a scheduler that nothing computes, unless a backend is given."""

    def __init__(self, config: EngineConfig, backend: Backend | None = None) -> None:
        self.scheduler = Scheduler(config)
        self.served: Counter[str] = Counter()
        self._backend = backend
        geometry = SlabGeometry(1, 1, 2, config.cache, DType.FLOAT32)
        self._pool = SlabPool(geometry, config.capacity) if backend is None else backend.pool

    def start(self, owner: str, prompt: int, emitted: int = 0) -> Request:
        sequence = TokenSequence(self._pool.allocate(), owner, (), None)
        sequence.append([3] * prompt)
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
