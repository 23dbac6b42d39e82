"""A scheduler with real sequences, and a device that computes what it plans: make-believe, or real."""

from collections import Counter

from kakeya.config import EngineConfig
from kakeya.engine.batch import Segment
from kakeya.engine.drafting import sample_requests
from kakeya.engine.request import Request
from kakeya.engine.runner import Backend
from kakeya.engine.scheduler import Scheduler
from kakeya.engine.sequence import Sequence
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

    def start(self, owner: str, prompt: int, emitted: int = 0) -> Sequence:
        sequence = Sequence(self._pool.allocate(), owner, (), None)
        sequence.append([3] * prompt)
        stream = EventStream(lambda: None)
        sequence.request = Request(stream, 10**6, SamplingParams(), prompt_length=prompt, emitted=emitted)
        if emitted:
            sequence.slab.written = prompt - 1
        self.scheduler.add(sequence)
        return sequence

    def step(self, drafts: dict[int, list[int]] | None = None) -> list[tuple[str, int]]:
        """The owner and the rows of each segment of the next step."""
        segments = self.scheduler.plan(self.scheduler.ready(), drafts or {})
        for segment in segments:
            self.served[segment.sequence.owner] += segment.rows
            segment.sequence.slab.written += segment.rows
        self._compute(segments)
        for segment in segments:
            if segment.logit_rows:
                segment.sequence.tokens.append(3)
                segment.sequence.request.emitted += 1
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

    def _compute(self, segments: list[Segment]) -> None:
        if self._backend is not None:
            requests = [request for segment in segments for request in sample_requests(segment, 0)]
            assert len(self._backend.launch(segments, requests).result().sampled) == len(requests)
