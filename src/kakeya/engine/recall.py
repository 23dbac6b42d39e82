"""Recall: a turn brings back pieces of its session's past that have left the window.

The last slots of the pinned region are written anew, in place: the tokens of the chosen ranges are computed
at the positions of these slots, by ordinary blocks, behind the pinned tokens. It happens once a turn, between
two blocks of the prompt. Nothing else differs from a session that pinned these tokens from the start.

What the slots held before is copied to one of a few places in the pool, and put back if nothing of the answer
is ever taken. A generate whose first token waits to be taken gives its place away when others need it.
"""

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from kakeya.engine.slab import KVSlab, SlabPool, recalled_positions
from kakeya.errors import InvalidArgument
from kakeya.observer import SearchResult
from kakeya.types import RecallQuery, TokenRange

if TYPE_CHECKING:
    from kakeya.engine.request import Request
    from kakeya.engine.sequence import TokenSequence

log = logging.getLogger(__name__)

TAIL = 128
"""At least so many of a prompt's last tokens see what was recalled, where as many are new."""
QUERY = 256
"""At most so many of a prompt's last tokens are searched with."""
Ranges = tuple[TokenRange, ...]


class Turn(NamedTuple):
    """From position `at` on, tokens saw these ranges."""

    at: int
    ranges: Ranges


class Retriever(Protocol):
    """Finds what a turn should see of its session's past. One for each session, used by one thread at a time,
    which is not the engine's."""

    def choose(self, history: Sequence[int], query: RecallQuery) -> Sequence[TokenRange]:
        """The ranges to bring back: sorted, apart from each other, out of the sight of the token at
        `query.length`, at most `query.recall` tokens. None keeps what is there.

        `history` may grow meanwhile. Only the first `query.end` tokens count.
        """

    @property
    def nbytes(self) -> int:
        """What it takes in memory, roughly while it is used."""

    def fork(self) -> "Retriever":
        """An independent copy, for a session that goes on from the same history."""


class SessionRecall:
    """What a session remembers of recall between its turns. Owned by the engine thread."""

    def __init__(self, retriever: "Callable[[], Retriever] | None" = None) -> None:
        self.retriever = retriever
        self.wanted: Ranges | None = None
        """What the client named for the next turn."""
        self.remembered: Ranges = ()
        self.turn_from = 0
        """Where the turn began that has no answer yet."""
        self.seconds = 0.0
        """What the last recall took."""
        self.past: tuple[Turn, ...] = ()
        """Turns that were answered and whose tokens are to be computed again, as after a crash."""
        self._before_named: tuple[Ranges | None, Ranges] = (None, ())

    def name(self, wanted: Ranges | None, remembered: Ranges) -> None:
        """The client has named what to bring back."""
        self._before_named = self.wanted, self.remembered
        self.wanted, self.remembered = wanted, remembered

    def take_back_named(self) -> None:
        """Undo a `name` that nothing has followed."""
        self.wanted, self.remembered = self._before_named

    def answered(self, length: int, seconds: float) -> None:
        """A turn is over: something of its answer was taken. Its recall has taken so long."""
        self.wanted, self.turn_from, self.seconds = None, length, seconds


class TurnRecall:
    """The recall of one generate: when it happens, with what, and how it is undone.

    Where a generate computes `past` turns again, each has its own, and the one that comes `then`.
    """

    def __init__(
        self,
        request: "Request",
        at: int,
        chosen: "Future[Ranges | None]",
        places: "Places",
        *,
        is_past: bool = False,
        then: "TurnRecall | None" = None,
    ) -> None:
        self.at = at
        self._request, self._chosen, self._places = request, chosen, places
        self._is_past, self._then = is_past, then
        self._slab = request.sequence.slab
        self._before: Ranges = ()
        self._ranges: Ranges = ()
        self._held_before, self._positions = self._slab.holds, self._slab.holds
        self._tokens = array("i")
        self._next = 0
        self._place: int | None = None
        self._is_over = False
        self._began_at = 0.0
        self.seconds = 0.0

    def found(self, chosen: Ranges | None, seconds: float) -> None:
        """A search is over. May be called from any thread, once."""
        self.seconds = seconds
        self._chosen.set_result(chosen)

    @property
    def is_due(self) -> bool:
        """Whether the prompt is computed as far as it need not see what is recalled."""
        return not self._is_over and self._slab.written >= self.at

    @property
    def may_go_on(self) -> bool:
        """Whether nothing is waited for."""
        if not self.is_due or self._place is not None:
            return True
        return self._chosen.done() and self._places.has_one()

    @property
    def is_settled(self) -> bool:
        """Whether nothing of it can be taken back: the slots hold what the slab says."""
        return self._place is None

    @property
    def may_lose_place(self) -> bool:
        """Whether its answer has begun."""
        return self._request.emitted > 0

    @property
    def left(self) -> int:
        """Slots that are still to be written, once it is known which."""
        return 0 if self._is_over or self._place is None else self._slab.sink - self._next

    def limit(self, rows: int) -> int:
        """So many of the prompt's next `rows` rows come before it."""
        return rows if self._is_over else min(rows, self.at - self._slab.written)

    def begin(self) -> None:
        """Take what was chosen. It is over at once if that is what the slots hold."""
        if self._place is not None:
            return
        self._before = self._slab.recalled
        self._ranges = self._fitting(self._chosen.result())
        slab = self._slab
        self._positions = recalled_positions(self._ranges, slab.pinned, slab.recall)
        changed = np.flatnonzero(self._positions != slab.holds)
        if not len(changed):
            self._slab.recalled = self._ranges
            self._go_on()
            return
        self._began_at = time.perf_counter()
        self._place = self._places.take(self)
        slab.keep_copy(self._place)
        self._held_before = slab.holds.copy()
        first, history = int(changed[0]), self._request.sequence.tokens
        self._next = slab.pinned + first
        slab.untouched = min(slab.untouched, self._next)
        self._tokens = array("i", [history[position] for position in self._positions[first:].tolist()])

    def next_rows(self, most: int) -> tuple[int, Sequence[int]]:
        """The next slot that is written, and the tokens from there on."""
        done = len(self._tokens) - (self._slab.sink - self._next)
        return self._next, self._tokens[done : done + most]

    def computed(self, rows: int) -> None:
        """So many slots more hold what was chosen."""
        first = self._next - self._slab.pinned
        self._slab.holds[first : first + rows] = self._positions[first : first + rows]
        self._next += rows
        if self._next < self._slab.sink:
            return
        self._slab.repin(self._ranges, self._next)
        self._go_on()
        seconds = time.perf_counter() - self._began_at
        self.seconds += seconds
        self._request.sequence.observer.recalled(len(self._ranges), len(self._tokens), seconds)

    def settle(self, taken: int) -> None:
        """Something of the answer was taken: what was recalled stays."""
        if taken:
            self.leave()

    def end(self, taken: int) -> None:
        """The generate is over. If nothing was taken of it, the slots hold again what they held before."""
        if self._place is not None and not taken:
            self._slab.put_back(self._place)
            self._slab.recalled, self._slab.holds = self._before, self._held_before
        self.leave()

    def leave(self) -> None:
        """Give the place back and leave the slots as they are."""
        self._is_over = True
        if self._place is not None:
            self._places.give_back(self._place)
            self._place = None

    def _go_on(self) -> None:
        """The slots hold what was chosen. Of a turn that was answered nothing is ever taken back."""
        self._is_over = True
        if not self._is_past:
            return
        self.leave()
        session = self._request.sequence.recall
        assert session is not None
        session.past = session.past[1:]
        self._request.recall = self._then or self

    def _fitting(self, chosen: Ranges | None) -> Ranges:
        """What was chosen; what is there already where nothing was, or what the slots cannot hold."""
        if chosen is None:
            return self._before
        sequence = self._request.sequence
        length = len(sequence.tokens)
        if tokens_in(chosen) <= self._slab.recall and all(each.end <= length for each in chosen):
            return chosen
        log.error(
            "%s do not fit into %d slots; the session sees what it saw before", chosen, self._slab.recall
        )
        sequence.observer.recall_searched(0.0, SearchResult.FAILED)
        return self._before


class Places:
    """The places in the pool for what recall overwrites."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._holders: dict[int, TurnRecall] = {}

    def has_one(self) -> bool:
        return bool(self._free) or any(holder.may_lose_place for holder in self._holders.values())

    def take(self, holder: TurnRecall) -> int:
        """A free place, or that of the first whose answer has begun: what it recalled then stays."""
        if not self._free:
            next(other for other in self._holders.values() if other.may_lose_place).leave()
        place = self._free.pop()
        self._holders[place] = holder
        return place

    def give_back(self, place: int) -> None:
        del self._holders[place]
        self._free.append(place)


class Recalls:
    """Recall for an engine: what a generate brings back, found on a thread of its own."""

    def __init__(self, pool: SlabPool, block: int, wake: Callable[[], None], *, any_cut: bool) -> None:
        self._places, self._wake = Places(len(pool.undo)), wake
        self._grain, self._any_cut = TAIL if any_cut else block, any_cut
        self._searching = ThreadPoolExecutor(1, "kakeya-recall") if len(pool.undo) else None

    def begin(self, request: "Request") -> TurnRecall | None:
        """The first recall of a generate that is queued: of turns that it computes again, or its own."""
        recall, session = self._own(request), request.sequence.recall
        for turn in reversed(session.past) if session is not None else ():
            known = _known(turn.ranges)
            recall = TurnRecall(request, turn.at, known, self._places, is_past=True, then=recall)
        return recall

    def _own(self, request: "Request") -> TurnRecall | None:
        """The recall of its own turn; None if nothing is out of sight, or nothing was said."""
        sequence = request.sequence
        session, at = sequence.recall, self.recalls_at(sequence)
        if session is None or at < sequence.slab.geometry.cache.capacity:
            return None
        query = self._query(sequence, session, at)
        if session.wanted is not None:
            named = brought_back(session.wanted, query.remembered)
            return TurnRecall(request, at, _known(named), self._places)
        if session.turn_from == query.end:
            return None  # the answer goes on
        if session.retriever is None:
            known = _known(query.remembered or None)
            return TurnRecall(request, at, known, self._places)
        recall = TurnRecall(request, at, Future(), self._places)
        self._search(recall, sequence, query)
        return recall

    def name(self, sequence: "TokenSequence", ranges: Sequence[TokenRange], *, remember: bool) -> Ranges:
        """Take the client's ranges: for the next turn, or, in the place of those remembered so far, for every
        one that does not see them. Returns what the next turn is known to bring back. Raises InvalidArgument
        and changes nothing."""
        session, at = sequence.recall, self.recalls_at(sequence)
        if session is None:
            raise InvalidArgument("the session has no slots for recall: create it with recall_tokens")
        slab, wanted, remembered = sequence.slab, session.wanted, session.remembered
        check_ranges(ranges, len(sequence.tokens))
        if remember:
            remembered = _merged(ranges)
        else:
            _check_out_of_sight(ranges, slab, at)
            wanted = tuple(sorted(ranges))
        total = tokens_in(brought_back(wanted, remembered))
        if total > slab.recall:
            others = wanted if remember else remembered
            known = "what the next turn was told to see" if remember else "what is remembered"
            beside = f"with {known} " if others else ""
            raise InvalidArgument(f"the ranges are {beside}{total} tokens, recall_tokens is {slab.recall}")
        session.name(wanted, remembered)
        return brought_back(wanted, self._query(sequence, session, at).remembered)

    def fork(self, session: SessionRecall) -> SessionRecall:
        """For a session that goes on from the same history."""
        copy = SessionRecall()
        copy.wanted, copy.remembered, copy.turn_from = session.wanted, session.remembered, session.turn_from
        copy.past, copy.seconds = session.past, session.seconds
        if session.retriever is not None and self._searching is not None:
            original = session.retriever
            # After searches that still run, and before any of the original's later turns.
            copy.retriever = self._searching.submit(lambda: original().fork()).result
        return copy

    def close(self) -> None:
        """End the thread; nobody waits for it."""
        if self._searching is not None:
            self._searching.shutdown(wait=False, cancel_futures=True)

    def recalls_at(self, sequence: "TokenSequence") -> int:
        """The first position of a prompt that sees what is recalled: the start of the aligned block that
        its last tokens begin in. It does not depend on how the history was cut into appends, nor, where a
        row's bits do not depend on how prompts are cut, on how much of it must be computed again."""
        written, end = sequence.slab.written, len(sequence.tokens)
        # The newest token of the last answer is computed with this turn.
        start = max(sequence.recall.turn_from - 1, 0) if sequence.recall is not None else written
        at = start + max(0, end - TAIL - start) // self._grain * self._grain
        if self._any_cut and at > written:
            return at
        return written + max(0, at - written) // self._grain * self._grain

    def _query(self, sequence: "TokenSequence", session: SessionRecall, at: int) -> RecallQuery:
        slab, end = sequence.slab, len(sequence.tokens)
        sight = at - slab.window + 1
        clipped = (TokenRange(max(r.start, slab.pinned), min(r.end, sight)) for r in session.remembered)
        return RecallQuery(
            length=at,
            pinned=slab.pinned,
            window=slab.window,
            recall=slab.recall,
            query_from=max(session.turn_from, end - QUERY),
            end=end,
            remembered=tuple(each for each in clipped if each.length > 0),
        )

    def _search(self, recall: TurnRecall, sequence: "TokenSequence", query: RecallQuery) -> None:
        assert self._searching is not None
        assert sequence.recall is not None
        retriever, history, observer = sequence.recall.retriever, sequence.tokens, sequence.observer
        assert retriever is not None

        def search() -> None:
            began, chosen = time.perf_counter(), None
            try:
                chosen = _checked(retriever().choose(history, query), query) or None
                result = SearchResult.NOTHING if chosen is None else SearchResult.FOUND
            except Exception:
                log.exception("a search failed; the session goes on with what it had recalled before")
                result = SearchResult.FAILED
            seconds = time.perf_counter() - began
            observer.recall_searched(seconds, result)
            recall.found(chosen, seconds)
            self._wake()

        self._searching.submit(search)


def let_search(sequence: "TokenSequence", retriever: Retriever | None) -> None:
    """Have the retriever find what this sequence recalls, if it does. Call on the engine thread."""
    if sequence.recall is not None and retriever is not None:
        sequence.recall.retriever = lambda: retriever


def check_ranges(ranges: Sequence[TokenRange], length: int) -> None:
    """Raises InvalidArgument for ranges that are empty, outside a history of this length, or overlap."""
    for each in ranges:
        if not 0 <= each.start < each.end <= length:
            raise InvalidArgument(
                f"range {each.start} to {each.end} is empty or outside the history of {length} tokens"
            )
    for before, after in pairwise(sorted(ranges)):
        if after.start < before.end:
            raise InvalidArgument(
                f"ranges {before.start} to {before.end} and {after.start} to {after.end} overlap"
            )


def tokens_in(ranges: Sequence[TokenRange]) -> int:
    return sum(each.length for each in ranges)


def brought_back(wanted: Ranges | None, remembered: Ranges) -> Ranges:
    """What a client named for a turn together with what is always remembered."""
    return _merged((*(wanted or ()), *remembered))


def _check_out_of_sight(ranges: Sequence[TokenRange], slab: KVSlab, at: int) -> None:
    if ranges and at < slab.geometry.cache.capacity:
        raise InvalidArgument(
            f"nothing can be recalled yet: the next turn would see it from position {at} on, "
            "and there it sees the whole history"
        )
    window_from = at - slab.window + 1
    for each in ranges:
        if each.start < slab.pinned or each.end > window_from:
            raise InvalidArgument(
                f"range {each.start} to {each.end} is in sight: the next turn sees the first {slab.pinned} "
                f"tokens and those from {window_from} on"
            )


def past_from(turns: Sequence[Turn], start: int) -> tuple[Turn, ...]:
    """The turns of which tokens from `start` on were computed, where the slots hold the beginning there."""
    seen = [turn for turn in turns if turn.at <= start]
    later = tuple(turn for turn in turns if turn.at > start)
    return (Turn(start, seen[-1].ranges), *later) if seen else later


def _checked(ranges: Sequence[TokenRange], query: RecallQuery) -> Ranges:
    """What a retriever chose. Raises ValueError where it breaks its promises."""
    check_ranges(ranges, query.length - query.window + 1)
    if tokens_in(ranges) > query.recall or any(each.start < query.pinned for each in ranges):
        raise ValueError(f"a retriever chose {ranges}, asked for {query}")
    return tuple(sorted(ranges))


def _merged(ranges: Sequence[TokenRange]) -> Ranges:
    """The same tokens as ranges that do not overlap, in order of time."""
    merged: list[TokenRange] = []
    for each in sorted(ranges):
        if merged and each.start <= merged[-1].end:
            merged[-1] = TokenRange(merged[-1].start, max(merged[-1].end, each.end))
        else:
            merged.append(each)
    return tuple(merged)


def _known(ranges: Ranges | None) -> "Future[Ranges | None]":
    known: Future[Ranges | None] = Future()
    known.set_result(ranges)
    return known
