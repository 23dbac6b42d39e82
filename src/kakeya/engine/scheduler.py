"""Chooses what the next step computes: fair by tokens across owners, under a token budget."""

import heapq
from collections.abc import Mapping, Sequence as List

from kakeya.config import EngineConfig
from kakeya.engine.batch import Segment, decode_segment, prefill_segment
from kakeya.engine.request import Request
from kakeya.engine.sequence import Sequence


class Scheduler:
    """The requests in flight and what each owner has been served.

    Owners take turns by tokens served, and so do the requests of one owner. A newcomer starts
    level with the least served, so it neither waits for the past nor makes up for it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._active: list[Sequence] = []
        self._served: dict[str, int] = {}
        self.changes = 0
        """Goes up with every request that comes or goes."""

    @property
    def active(self) -> List[Sequence]:
        return self._active

    def add(self, sequence: Sequence) -> None:
        request = request_of(sequence)
        request.served = min((request_of(other).served for other in self._active), default=0)
        self._served.setdefault(sequence.owner, min(self._served.values(), default=0))
        self._active.append(sequence)
        self.changes += 1

    def remove(self, sequence: Sequence) -> None:
        self._active.remove(sequence)
        self.changes += 1
        if all(other.owner != sequence.owner for other in self._active):
            del self._served[sequence.owner]

    def has_work(self) -> bool:
        """Whether any sequence is ready."""
        return any(map(self._may_run, self._active))

    def ready(self) -> list[Sequence]:
        """The sequences that may be computed now: work left, and a reader that keeps up."""
        return [sequence for sequence in self._active if self._may_run(sequence)]

    def draft_limit(self, sequence: Sequence, max_draft: int) -> int:
        """How many guesses the spare slots, the request and the budget leave room for."""
        request = request_of(sequence)
        spare = self._config.cache.spare - request.stream.unread
        return max(0, min(max_draft, spare, request.remaining - 1, self._config.max_batch_tokens - 1))

    def plan(self, ready: List[Sequence], drafts: Mapping[int, List[int]]) -> list[Segment]:
        """Fill one step. `drafts` maps id(sequence) to its guesses. Charges owners and requests."""
        segments = [self._segment(sequence, drafts) for sequence in ready]
        if sum(segment.rows for segment in segments) > self._config.max_batch_tokens:
            return self._fair_share(segments)
        for segment in segments:
            self._charge(segment)
        return segments

    def may_repeat(self, segments: List[Segment]) -> bool:
        """Whether a plan would be these single tokens again: they are all there is, and all may go on."""
        return len(segments) == len(self._active) and all(map(self._may_run, self._active))

    def repeat(self, segments: List[Segment]) -> None:
        """Charge for one more token of each."""
        for segment in segments:
            self._charge(segment)

    def _segment(self, sequence: Sequence, drafts: Mapping[int, List[int]]) -> Segment:
        if sequence.is_decoding:
            return decode_segment(sequence, drafts.get(id(sequence), ()))
        return prefill_segment(sequence, self._config.prefill_block)

    def _fair_share(self, segments: List[Segment]) -> list[Segment]:
        """As many as the budget holds, the least served first."""
        queues = self._queues_by_owner(segments)
        turns = [(self._served[owner], owner) for owner in queues]
        heapq.heapify(turns)
        budget = self._config.max_batch_tokens
        chosen: list[Segment] = []
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

    def _charge(self, segment: Segment) -> None:
        rows = segment.rows
        self._served[segment.sequence.owner] += rows
        request_of(segment.sequence).served += rows

    def _may_run(self, sequence: Sequence) -> bool:
        request = request_of(sequence)
        if request.finished or request.remaining <= 0:
            return False
        # Unread tokens must stay within the spare slots, so that a cancel can take them back.
        spare = self._config.cache.spare - request.in_flight
        return request.stream.unread <= spare or request.stream.unread_after_pause() <= spare

    def _queues_by_owner(self, segments: List[Segment]) -> dict[str, list[Segment]]:
        queues: dict[str, list[Segment]] = {}
        # The least served last: queues are taken from the end.
        for segment in sorted(segments, key=lambda s: request_of(s.sequence).served, reverse=True):
            queues.setdefault(segment.sequence.owner, []).append(segment)
        return queues

    def _next_that_fits(self, queue: list[Segment], budget: int) -> Segment | None:
        """The first segment in the queue that fits the budget; what does not fit waits for the next step."""
        while queue:
            segment = queue.pop()
            if segment.rows <= budget:
                return segment
        return None


def request_of(sequence: Sequence) -> Request:
    """The request of a sequence that is known to have one."""
    assert sequence.request is not None
    return sequence.request
