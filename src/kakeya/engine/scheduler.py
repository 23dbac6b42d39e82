"""Chooses what the next step computes: streams first, then prompts, fair by tokens across owners."""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from kakeya.config import EngineConfig
from kakeya.engine.batch import PlannedSegment, RecallSegment, decode_segment, prefill_segment, recall_segment
from kakeya.engine.request import FINISHED, Request
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.shared_prefixes import GRANULE, SharedPrefixes
from kakeya.engine.stall import StallLimit


class Scheduler:
    """The requests in flight and what each owner has been served.

    Tokens of streams go into every step. Prompts share the rest of it: owners take turns by tokens served,
    and the prompts of one owner are computed one after another, that with the least left first. A newcomer
    starts level with the least served, so it neither waits for the past nor makes up for it.

    A prompt is passed by prompts of its owner that came later with no more tokens than it had itself when it
    was queued. Then it goes before all that came later, however short they are.
    """

    def __init__(self, config: EngineConfig, prefixes: SharedPrefixes, *, any_cut: bool) -> None:
        self._config, self._prefixes, self._any_cut = config, prefixes, any_cut
        self._active: list[Request] = []
        self._served: dict[str, int] = {}
        self._queued = 0
        self._streamed = 0
        self._stall = StallLimit(config.max_stall_ms / 1000)
        # Of the last plan: rows of prompts, how many slots they see in all, and whether streams go along.
        self._prompt_rows, self._prompts_see, self._has_streams = 0, 0, False
        self.changes = 0
        """Goes up with every request that comes or goes."""

    @property
    def active(self) -> Sequence[Request]:
        return self._active

    def add(self, request: Request) -> None:
        """Queue a request. It leaves by itself when it is over."""
        request.queue(self._remove)
        request.served = min((other.served for other in self._active), default=0)
        owner = request.sequence.owner
        self._served.setdefault(owner, min(self._served.values(), default=0))
        self._queued += 1
        request.number = self._queued
        request.patience = len(request.sequence.tokens) - request.sequence.slab.written
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
        streams = [decode_segment(each, drafts.get(each, ())) for each in ready if each.is_decoding]
        prompts = [each for each in ready if not each.is_decoding]
        stream_rows = sum(segment.rows for segment in streams)
        queues = self._prompt_queues(prompts)
        room = self._room_for_prompts(stream_rows, queues) if prompts else 0
        chosen = self._fair_share(streams, stream_rows, self._config.step_tokens - room)
        read = self._prompt_segments(queues, room)
        self._prompt_rows, self._has_streams = sum(segment.rows for segment in read), bool(chosen)
        self._prompts_see = sum(each.rows * self._sees(each.start + each.rows // 2) for each in read)
        return chosen + read

    def learn(self, seconds: float) -> None:
        """What was planned last has taken so long."""
        self._stall.learn(self._prompt_rows, self._prompts_see, seconds, has_streams=self._has_streams)

    def may_repeat(self, segments: Sequence[PlannedSegment]) -> bool:
        """Whether a plan would be these single tokens again: they are all there is, and all may go on."""
        if len(segments) != len(self._active):
            return False
        return all(map(self._may_run, self._active)) and self.has_room(segments, segments[0].own_drafts)

    def repeat(self, segments: Sequence[PlannedSegment]) -> None:
        """Charge for one more step of each."""
        self._prompt_rows, self._has_streams = 0, True
        for segment in segments:
            self._charge(segment)

    def charge_drafts(self, segments: Sequence[PlannedSegment], drafts: int) -> None:
        """Charge planned segments for guesses that the backend makes behind each."""
        for segment in segments:
            self._served[segment.sequence.owner] += drafts
            segment.request.served += drafts

    def has_room(self, segments: Sequence[PlannedSegment], drafts: int) -> bool:
        """Whether the spare slots hold so many guesses behind what is not read yet."""
        spare = self._config.cache.spare - drafts
        return all(s.request.stream.unread + s.request.in_flight <= spare for s in segments)

    def _remove(self, request: Request) -> None:
        self._active.remove(request)
        self.changes += 1
        owner = request.sequence.owner
        if all(other.sequence.owner != owner for other in self._active):
            del self._served[owner]
        self._prefixes.rests(request.sequence)

    # Streams.

    def _fair_share(self, streams: Sequence[PlannedSegment], rows: int, budget: int) -> list[PlannedSegment]:
        """All streams, or as many as the budget holds, the least served first."""
        if rows <= budget:
            for segment in streams:
                self._charge(segment)
            return list(streams)
        queues = _by_owner(sorted(streams, key=lambda s: s.request.served, reverse=True))
        chosen: list[PlannedSegment] = []
        for owner in self._turns(queues):
            fitting = _first_that_fits(queues[owner], budget)
            if fitting is not None:
                chosen.append(fitting)
                budget -= fitting.rows
                self._charge(fitting)
        return chosen

    # Prompts.

    def _prompt_queues(self, prompts: Sequence[Request]) -> dict[str, list[Request]]:
        """Each owner's prompts, to be taken from the end."""
        return _by_owner(sorted(prompts, key=self._place, reverse=True))

    def _room_for_prompts(self, stream_rows: int, queues: Mapping[str, Sequence[Request]]) -> int:
        """Rows of prompts in a step that has so many rows of streams.

        A step that ends a prompt is as short as one with streams: it gives a first token.
        """
        budget, block = self._config.step_tokens, self._config.block_tokens
        free = budget - stream_rows
        seen = max(self._sees(_first_row(queue[-1])) for queue in queues.values())
        paced = self._stall.rows(max(free, 0), seen)
        waiting = (each for queue in queues.values() for each in queue)
        if not stream_rows and all(_left(each) > paced for each in waiting):
            paced = self._stall.rows(free, seen, is_awaited=False)
        if self._any_cut:
            return max(paced, min(GRANULE, budget // 2))
        if free >= block:
            return max(block, paced)
        # No block fits beside the streams: both are given as many tokens in turns.
        self._streamed += min(stream_rows, budget)
        if self._streamed < block:
            return 0
        self._streamed = 0
        return block

    def _sees(self, position: int) -> int:
        """How many slots a row at this position sees."""
        return min(position + 1, self._config.cache.capacity)

    def _prompt_segments(self, queues: dict[str, list[Request]], room: int) -> list[PlannedSegment]:
        """The next rows of the prompts whose turn it is."""
        prompts = [each for queue in queues.values() for each in queue]
        computed: set[bytes] = set()
        chosen: list[PlannedSegment] = []
        for owner in self._turns(queues):
            if not room:
                break
            segment = self._next_prompt(queues[owner], room, computed)
            if segment is not None:
                chosen.append(segment)
                room -= segment.rows
                self._charge(segment)
                _try_patience(prompts, segment)
        return chosen

    def _place(self, request: Request) -> tuple[int, int]:
        """The lowest goes first: whoever has lost patience, then the shortest; the older of equals."""
        sequence = request.sequence
        request.matched = self._prefixes.match(sequence, request.matched)
        if request.patience <= 0:
            return 0, request.number
        return _left(request), request.number

    def _next_prompt(self, queue: list[Request], room: int, computed: set[bytes]) -> PlannedSegment | None:
        """The next rows of the first prompt in the queue that fit, and that nobody else in the step computes:
        who waits a step can copy those."""
        while queue:
            request = queue.pop()
            if not _may_recall(request):
                continue  # another prompt of this step has taken the last place for what recall overwrites
            sequence = request.sequence
            first = _first_row(request)
            if not computed.isdisjoint(self._prefixes.granules(sequence, first, first + 1)):
                continue
            request.cached_tokens += self._prefixes.copy(sequence)
            segment = _prompt_segment(request, self._most_rows(sequence, room))
            if segment is not None and segment.rows <= room:
                if not isinstance(segment, RecallSegment):
                    computed.update(self._prefixes.granules(sequence, segment.start, segment.end))
                return segment
        return None

    def _most_rows(self, sequence: TokenSequence, room: int) -> int:
        """How many rows a segment of a prompt may have: a whole block where its bits depend on the cut."""
        block, written, lap = self._config.block_tokens, sequence.slab.written, sequence.slab.pool.lap
        if not self._any_cut:
            return block
        outgrows = self._prefixes.is_on and len(sequence.tokens) >= self._config.cache.capacity
        if outgrows and written < lap:
            return min(block, room, lap - written)  # so that the first lap is saved before it is overwritten
        return min(block, room)

    def _charge(self, segment: PlannedSegment) -> None:
        rows = segment.rows + segment.own_drafts
        self._served[segment.sequence.owner] += rows
        segment.request.served += rows

    def _may_run(self, request: Request) -> bool:
        if request.state is FINISHED or request.remaining <= 0:
            return False
        if not _may_recall(request) or _waits_for_prompt(request):
            return False
        # Unread tokens must stay within the spare slots, so that a cancel can take them back.
        spare = self._config.cache.spare - request.in_flight
        return request.stream.unread <= spare or request.stream.unread_after_pause() <= spare

    def _turns(self, queues: Mapping[str, Sequence[object]]) -> Iterator[str]:
        """Owners whose turn it is, the least served first, until their queues are empty."""
        turns = [(self._served[owner], owner) for owner in queues]
        heapq.heapify(turns)
        while turns:
            _, owner = heapq.heappop(turns)
            yield owner
            if queues[owner]:
                heapq.heappush(turns, (self._served[owner], owner))


def _may_recall(request: Request) -> bool:
    return request.recall is None or request.recall.may_go_on


def _waits_for_prompt(request: Request) -> bool:
    prompt = request.sequence.shared_prompt
    return prompt is not None and not request.is_decoding and not prompt.leads(request.sequence)


def _prompt_segment(request: Request, block: int) -> PlannedSegment | None:
    """The next rows of a prompt, or of what it brings back before its last ones; None if it must wait."""
    while (recall := request.recall) is not None and recall.is_due:
        if not recall.may_go_on:
            return None
        recall.begin()
        if recall.is_due:
            return recall_segment(request, recall, block)
    return prefill_segment(request, block if recall is None else recall.limit(block))


class _Owned(Protocol):
    @property
    def sequence(self) -> TokenSequence: ...


T = TypeVar("T", bound=_Owned)


def _first_row(request: Request) -> int:
    """The first position of its prompt that nobody has computed, as far as was seen."""
    return max(request.sequence.slab.written, request.matched)


def _left(request: Request) -> int:
    """Tokens of its prompt that nobody has computed, as far as was seen, and what it is bringing back."""
    left = len(request.sequence.tokens) - _first_row(request)
    return left if request.recall is None else left + request.recall.left


def _by_owner(entries: Iterable[T]) -> dict[str, list[T]]:
    queues: dict[str, list[T]] = {}
    for entry in entries:
        queues.setdefault(entry.sequence.owner, []).append(entry)
    return queues


def _try_patience(waiting: Iterable[Request], segment: PlannedSegment) -> None:
    """Rows were given to a prompt: older ones of its owner were passed."""
    served = segment.request
    for request in waiting:
        if request.number < served.number and request.sequence.owner == served.sequence.owner:
            request.patience -= segment.rows


def _first_that_fits(queue: list[PlannedSegment], budget: int) -> PlannedSegment | None:
    """The last segment of the queue that fits the budget; what does not fit waits for the next step."""
    while queue:
        segment = queue.pop()
        if segment.rows <= budget:
            return segment
    return None
