"""What is stored of one generate while it runs, and how it is told again by a later process."""

import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any

from kakeya.engine.stream import EventStream
from kakeya.sessions.answers import Call
from kakeya.sessions.session import Session
from kakeya.sessions.stored_stream import Work
from kakeya.storage.records import StoredAnswer
from kakeya.storage.store import StateStore
from kakeya.storage.turns import StoredTurn
from kakeya.types import (
    DoneEvent,
    Event,
    FailedEvent,
    StopReason,
    TokenEvent,
    TokenLogprob,
    TokenRange,
    TruncatedEvent,
)


class GenerateJournal:
    """Stores tokens in the session's history and, if the call can be repeated, what it was answered with.

    Of an answer only its end is written at its end: the tokens are in the history.
    """

    def __init__(
        self,
        store: StateStore,
        session: Session,
        call: Call,
        progressed: Callable[[Session, int], None],
        not_stored: Callable[[StoredAnswer], None],
    ) -> None:
        """`not_stored` is told of an answer whose end must be stored before anything else of the session."""
        self._store, self._session, self._call, self._progressed = store, session, call, progressed
        self._not_stored = not_stored
        self._start = 0
        self._turn: StoredTurn | None = None
        self._dropped = 0
        self._logprobs: list[tuple[float, list[tuple[int, float]]]] = []
        self._is_known = False

    def start(self) -> int:
        sequence = self._session.sequence
        assert sequence is not None, "a session that generates has a slab"
        self._start = sequence.committed
        if sequence.recall is not None:
            recall = None if sequence.request is None else sequence.request.recall
            position = self._start if recall is None else recall.at
            self._turn = StoredTurn(position, self._start, sequence.slab.recalled)
        return self._start

    def submit(self, work: Work) -> "Future[int]":
        return self._store.submit(work)

    def write(self, db: sqlite3.Connection, start: int, events: list[Event]) -> None:
        if not self._store.records.has_session(db, self._session.session_id):
            return  # it is closed, and nothing is kept of it but what its forks share
        tokens = [event.token_id for event in events if isinstance(event, TokenEvent)]
        self._store.histories.write(db, self._session.history, start, tokens)
        if self._turn is not None:
            self._write_turn(db, self._turn, start + len(tokens))
        if self._call.request_id:
            self._write_answer(db, start, events)

    def stored(self, length: int) -> None:
        self._is_known = True  # not before: a transaction that fails is tried again
        self._progressed(self._session, length)

    def lost_end(self, length: int) -> None:
        if self._call.request_id:
            count = length - self._start
            del self._logprobs[count:]
            self._not_stored(self._answer(count, None))

    def _write_turn(self, db: sqlite3.Connection, turn: StoredTurn, end: int) -> None:
        """What it brought back, from the first token of its answer on."""
        if end > self._start:
            self._store.turns.put(db, self._session.history, replace(turn, end=end))
        else:
            self._store.turns.take_back(db, self._session.history, turn)

    def _write_answer(self, db: sqlite3.Connection, start: int, events: list[Event]) -> None:
        done: dict[str, Any] | None = None
        count: int | None = None
        # What was said before `start` stays; what comes from there on may be written a second time.
        del self._logprobs[start - self._start :]
        for event in events:
            match event:
                case TruncatedEvent():
                    self._dropped = event.dropped_token_count
                case TokenEvent():
                    if event.logprob is not None:
                        best = [(each.token_id, each.logprob) for each in event.top_logprobs]
                        self._logprobs.append((event.logprob, best))
                case DoneEvent():
                    done, count = asdict(event), event.generated_token_count
                case FailedEvent():
                    count = start - self._start
        if self._is_known and count is None:
            return
        self._store.remember(db, self._answer(count, done))

    def _answer(self, count: int | None, done: dict[str, Any] | None) -> StoredAnswer:
        answer: dict[str, Any] = {
            "start": self._start,
            "dropped": self._dropped,
            "count": count,
            "done": done,
        }
        if count is not None and self._logprobs:
            answer["logprobs"] = self._logprobs
        stored = self._call.answered(self._session.owner, answer)
        assert stored is not None
        return stored


@dataclass(frozen=True)
class StoredGenerate:
    """A generate that an earlier process has answered. One that it cut short is as good as cancelled."""

    start: int
    count: int
    dropped: int
    done: DoneEvent
    logprobs: tuple[tuple[float, tuple[TokenLogprob, ...]], ...] = ()

    @classmethod
    def read(cls, answer: dict[str, Any]) -> "StoredGenerate":
        """From what is stored of one that has ended."""
        start, count = answer["start"], answer["count"]
        cancelled = DoneEvent(StopReason.CANCELLED, count, 0.0, 0.0, 0)
        done = cancelled if answer["done"] is None else _done(answer["done"])
        logprobs = tuple(
            (logprob, tuple(TokenLogprob(*each) for each in best))
            for logprob, best in answer.get("logprobs", ())
        )
        return cls(start, count, answer["dropped"], done, logprobs)

    def replay(self, history: Sequence[int]) -> EventStream:
        """Its events, from the session's history."""
        stream = EventStream(lambda: None)
        if self.dropped:
            stream.put(TruncatedEvent(self.dropped))
        for place, token in enumerate(history[self.start : self.start + self.count]):
            logprob = self.logprobs[place] if place < len(self.logprobs) else (None, ())
            stream.put(TokenEvent(token, *logprob))
        stream.put(self.done)
        return stream


def _done(stored: dict[str, Any]) -> DoneEvent:
    """The event, from what JSON made of it."""
    typed = {
        "stop_reason": StopReason(stored["stop_reason"]),
        "recalled": tuple(TokenRange(**each) for each in stored["recalled"]),
        "recalled_token_ids": tuple(map(tuple, stored["recalled_token_ids"])),
    }
    return DoneEvent(**stored | typed)
