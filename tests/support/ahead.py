"""A backend that keeps the contract of a device that runs ahead, on the CPU."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from kakeya.engine.backend import Backend, Failed, LaunchedStep, Reduction
from kakeya.engine.batch import PENDING, Segment
from kakeya.engine.sampler import SampleRequest
from kakeya.engine.slab import SlabPool

T = TypeVar("T")


class RunsAhead:
    """Takes PENDING tokens: it alone knows what it chose last. Errors show when results are read."""

    runs_ahead = True

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

    def is_lost(self) -> bool:
        return self._source.is_lost()

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
