"""Chooses what the next step computes: fair by tokens across owners, under a token budget."""

import heapq
from collections.abc import Mapping, Sequence

from kakeya.config import EngineConfig
from kakeya.engine.batch import PlannedSegment, decode_segment, prefill_segment
from kakeya.engine.request import FINISHED, Request


class Scheduler:
    """The requests in flight and what each owner has been served.

    Owners take turns by tokens served, and so do the requests of one owner. A newcomer starts
    level with the least served, so it neither waits for the past nor makes up for it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._active: list[Request] = []
        self._served: dict[str, int] = {}
        self.changes = 0
        """Goes up with every request that comes or goes."""

    @property
    def active(self) -> Sequence[Request]:
        return self._active

    def add(self, request: Request) -> None:
        """Queue a request. It leaves by itself when it is over."""
        request.queue(self._remove)
        request.served = min((other.served for other in self._active), default=0)
        self._served.setdefault(request.sequence.owner, min(self._served.values(), default=0))
        self._active.append(request)
        self.changes += 1

    def settle(self) -> None:
        """End what its reader gave up or has read to the end; what was taken of the others is history."""
        for request in list(self._active):
            if request.stream.cancel_requested:
                request.cancel()
            elif request.state is FINISHED or request.taken_length != request.sequence.committed:
                request.sequence.settle()

    def has_work(self) -> bool:
        """Whether any request is ready."""
        return any(map(self._may_run, self._active))

    def ready(self) -> list[Request]:
        """The requests that may be computed now: work left, and a reader that keeps up."""
        return [request for request in self._active if self._may_run(request)]

    def draft_limit(self, request: Request, max_draft: int) -> int:
        """How many guesses the spare slots, the request and the budget leave room for."""
        spare = self._config.cache.spare - request.stream.unread
        return max(0, min(max_draft, spare, request.remaining - 1, self._config.step_tokens - 1))

    def plan(self, ready: Sequence[Request], drafts: Mapping[Request, Sequence[int]]) -> list[PlannedSegment]:
        """Fill one step; `drafts` are guesses by request. Charges owners and requests."""
        segments = [self._segment(request, drafts) for request in ready]
        if sum(segment.rows for segment in segments) > self._config.step_tokens:
            return self._fair_share(segments)
        for segment in segments:
            self._charge(segment)
        return segments

    def may_repeat(self, segments: Sequence[PlannedSegment]) -> bool:
        """Whether a plan would be these single tokens again: they are all there is, and all may go on."""
        return len(segments) == len(self._active) and all(map(self._may_run, self._active))

    def repeat(self, segments: Sequence[PlannedSegment]) -> None:
        """Charge for one more token of each."""
        for segment in segments:
            self._charge(segment)

    def _remove(self, request: Request) -> None:
        self._active.remove(request)
        self.changes += 1
        owner = request.sequence.owner
        if all(other.sequence.owner != owner for other in self._active):
            del self._served[owner]

    def _segment(self, request: Request, drafts: Mapping[Request, Sequence[int]]) -> PlannedSegment:
        if request.is_decoding:
            return decode_segment(request, drafts.get(request, ()))
        return prefill_segment(request, self._config.block_tokens)

    def _fair_share(self, segments: Sequence[PlannedSegment]) -> list[PlannedSegment]:
        """As many as the budget holds, the least served first."""
        queues = self._queues_by_owner(segments)
        turns = [(self._served[owner], owner) for owner in queues]
        heapq.heapify(turns)
        budget = self._config.step_tokens
        chosen: list[PlannedSegment] = []
        while turns:
            _, owner = heapq.heappop(turns)
            segment = self._next_that_fits(queues[owner], budget)
            if segment is None:
                continue
            chosen.append(segment)
            budget -= segment.rows
            self._charge(segment)
            heapq.heappush(turns, (self._served[owner], owner))
        return chosen

    def _charge(self, segment: PlannedSegment) -> None:
        rows = segment.rows
        self._served[segment.sequence.owner] += rows
        segment.request.served += rows

    def _may_run(self, request: Request) -> bool:
        if request.state is FINISHED or request.remaining <= 0:
            return False
        # Unread tokens must stay within the spare slots, so that a cancel can take them back.
        spare = self._config.cache.spare - request.in_flight
        return request.stream.unread <= spare or request.stream.unread_after_pause() <= spare

    def _queues_by_owner(self, segments: Sequence[PlannedSegment]) -> dict[str, list[PlannedSegment]]:
        queues: dict[str, list[PlannedSegment]] = {}
        # The least served last: queues are taken from the end.
        for segment in sorted(segments, key=lambda s: s.request.served, reverse=True):
            queues.setdefault(segment.sequence.owner, []).append(segment)
        return queues

    def _next_that_fits(self, queue: list[PlannedSegment], budget: int) -> PlannedSegment | None:
        """The first segment in the queue that fits the budget; what does not fit waits for the next step."""
        while queue:
            segment = queue.pop()
            if segment.rows <= budget:
                return segment
        return None
