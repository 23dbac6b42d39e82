"""A generate's stream whose events are stored before its reader sees them.

The engine puts events in and goes on. The storage thread takes all that wait, of all streams at once, stores
their tokens in one transaction, and only then lets the readers have them. Tokens that nobody has taken when a
generate is cancelled are cut off the stored history before its end is told.
"""

import sqlite3
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from kakeya.engine.stream import EventStream
from kakeya.sessions.recording import RecordedStream
from kakeya.types import DoneEvent, Event, FailedEvent, TokenEvent, TruncatedEvent

Work = Callable[[sqlite3.Connection], int]


class Journal(Protocol):
    """Where the events of one generate are stored."""

    def start(self) -> int:
        """How long the history is before the first token. Called on the engine thread."""
        ...

    def submit(self, work: Work) -> "Future[int]":
        """Have it done in a transaction."""
        ...

    def write(self, db: sqlite3.Connection, start: int, events: list[Event]) -> None:
        """Store events: the history goes on with their tokens at `start`, and ends with them."""
        ...

    def stored(self, length: int) -> None:
        """The stored history has this length. Called on the storage thread."""
        ...

    def lost_end(self, length: int) -> None:
        """The generate has ended where the history has this length, and that could not be stored."""
        ...


class StoredStream(EventStream):
    """Set `journal` before the engine gets it."""

    journal: Journal

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self._held: deque[Event] = deque()  # that are not stored yet
        self._storing = False
        self._start = -1
        self._released = 0  # tokens that are stored and not taken back
        self._cuts = 0
        self._failure: Exception | None = None

    # The engine's side.

    def put(self, event: Event) -> None:
        """Queue an event to be stored. Nothing may follow a terminal one."""
        assert not self._terminated, "event after the terminal one"
        with self._changed:
            self._begin()
            if isinstance(event, TokenEvent):
                self._queued += 1
            elif isinstance(event, (DoneEvent, FailedEvent)):
                self._terminated = True
            self._hold(event)

    def cut(self, terminal_event: Callable[[int], Event]) -> None:
        """Drop what is unread, and end once the stored history ends with what was taken.

        That is submitted at once, also while tokens are being stored: what is appended next must come behind.
        """
        with self._changed:
            self._begin()
            self._cuts += 1
            announced = [event for event in self._events if isinstance(event, TruncatedEvent)]
            self._events = deque(announced)
            self._held = deque(event for event in self._held if isinstance(event, TruncatedEvent))
            self._queued = self._released = self.taken
            if not self._ended:
                self._terminated = True
                event = terminal_event(self.taken)
                self._held.append(event if self._failure is None else FailedEvent(self._failure))
                self._store()
            self._tell_reader()

    def _begin(self) -> None:
        if self._start < 0:
            self._start = self.journal.start()

    def _hold(self, event: Event) -> None:
        self._held.append(event)
        if not self._storing:
            self._store()

    # The storage thread's side.

    def _store(self) -> None:
        self._storing = True
        try:
            self.journal.submit(self._write).add_done_callback(partial(self._written, self._cuts))
        except Exception as error:  # the storage has ended
            self._fail(error)

    def _write(self, db: sqlite3.Connection) -> int:
        """Store what is held now: how many events that were."""
        with self._changed:
            events, start = list(self._held), self._start + self._released
        self.journal.write(db, start, events)
        return len(events)

    def _written(self, cuts_before: int, result: "Future[int]") -> None:
        with self._changed:
            if cuts_before != self._cuts:
                return  # the cut has submitted a write of its own, which decides
            error = result.exception()
            if error is not None:
                self._fail(error)
                return
            self._release(result.result())
            self._storing = False
            if self._held:
                self._store()
            length = self._start + self._released
        self.journal.stored(length)

    def _release(self, count: int) -> None:
        for _ in range(count):
            event = self._held.popleft()
            self._released += isinstance(event, TokenEvent)
            self._events.append(event)
        self._tell_reader()

    def _fail(self, error: BaseException) -> None:
        """Nothing more can be stored: the generate ends with what its reader has."""
        self._failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
        self._storing = False
        has_all = self._terminated and self.unread == 0
        if self._cuts or has_all:  # it has ended, and its reader must be told
            self._held.clear()
            self.journal.lost_end(self._start + self._released)
            self._events.append(FailedEvent(self._failure))
            self._tell_reader()
        else:
            self.cancel()


class RecordedStoredStream(RecordedStream, StoredStream):
    """The same for a call that can be repeated."""
