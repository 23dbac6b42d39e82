"""The event queue between the engine and one request's reader.

A token is history from the moment its reader takes it. Tokens that wait unread are still
uncommitted: the engine never runs further ahead of a reader than the slab's spare slots
allow, so a stalled reader costs nothing and a cancel keeps exactly the tokens that were taken.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator

from kakeya.types import DoneEvent, Event, FailedEvent, TokenEvent, TruncatedEvent


class EventStream:
    """Events of one generate: truncated?, token…, then exactly one done or failed.

    Iterate from one thread. `cancel` may be called from any thread, any number of times.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self.taken = 0  # tokens that its reader has
        self.cached_tokens = 0  # of the prompt, computed before; known to the reader of a first token
        self._queued = 0  # tokens that were put; only the engine counts here, and only the reader there
        self._waiting = False
        self._reader_is_behind = False
        self._terminated = False
        self._ended = False
        self._announce: Callable[[], None] | None = None
        self._wanted = 1
        self.cancel_requested = False

    # The engine's side.

    def put(self, event: Event) -> None:
        """Queue an event. Nothing may follow a terminal one.

        It takes no lock unless the reader waits. A reader marks itself as waiting before it looks at the
        queue, and the engine looks for the mark after it has queued, so one of them sees the other.
        """
        assert not self._terminated, "event after the terminal one"
        if isinstance(event, TokenEvent):
            self._queued += 1
        elif isinstance(event, (DoneEvent, FailedEvent)):
            self._terminated = True
            if isinstance(event, DoneEvent):
                self.cached_tokens = event.cached_token_count  # a replay is put whole before it is read
        self._events.append(event)
        if self._waiting or self._announce is not None:
            with self._changed:
                self._tell_reader()

    def cut(self, terminal_event: Callable[[int], Event]) -> None:
        """Drop what is unread and end with `terminal_event(tokens taken)`, unless the reader saw the end."""
        with self._changed:
            self._events = deque(event for event in self._events if isinstance(event, TruncatedEvent))
            self._queued = self.taken
            if not self._ended:
                self._terminated = True
                self._events.append(terminal_event(self.taken))
            self._tell_reader()

    @property
    def unread(self) -> int:
        """Tokens that wait."""
        return self._queued - self.taken

    @property
    def is_settled(self) -> bool:
        """Whether the generate has ended and its reader has every token, or never will."""
        with self._changed:
            return self._terminated and self.unread == 0

    def unread_after_pause(self) -> int:
        """How many tokens wait; asks for a wake-up call when the reader takes the next one."""
        with self._changed:
            self._reader_is_behind = self.unread > 0
            self._announce_if_ready()
            return self.unread

    def _tell_reader(self) -> None:
        self._changed.notify()
        self._announce_if_ready()

    def _announce_if_ready(self) -> None:
        enough = len(self._events) >= self._wanted or self._terminated or self._reader_is_behind
        if self._announce is not None and self._events and enough:
            announce, self._announce = self._announce, None
            announce()

    # The reader's side.

    def when_ready(self, announce: Callable[[], None], events: int = 1) -> None:
        """Call `announce` once, as soon as `events` events wait, the last event does, or the engine waits for
        the reader: now, or later from the engine thread. Replaces an earlier request.

        For readers that cannot block. `announce` must return quickly and must not use the stream.
        """
        with self._changed:
            self._announce, self._wanted = announce, events
            self._announce_if_ready()

    def cancel(self) -> None:
        """Ask the engine to stop; the stream then ends with a CANCELLED done event."""
        self.cancel_requested = True
        self._wake()

    def next_event(self, timeout: float | None = None) -> Event:
        """Wait for and take the next event, a failed one included.

        Raises TimeoutError when none came in `timeout` seconds.
        """
        with self._changed:
            self._waiting = True
            try:
                if not self._changed.wait_for(lambda: self._events, timeout):
                    raise TimeoutError(f"no event within {timeout} s")
            finally:
                self._waiting = False
            event = self._take()
        self._wake_if_asked()
        return event

    def poll(self) -> Event | None:
        """Take the next event if one waits."""
        with self._changed:
            event = self._take() if self._events else None
        self._wake_if_asked()
        return event

    def poll_all(self) -> list[Event]:
        """Take every event that waits."""
        with self._changed:
            events = [self._events.popleft() for _ in range(len(self._events))]
            self.taken += sum(isinstance(event, TokenEvent) for event in events)
            if events:
                self._ended = isinstance(events[-1], (DoneEvent, FailedEvent))
        self._wake_if_asked()
        return events

    def _take(self) -> Event:
        event = self._events.popleft()
        if isinstance(event, TokenEvent):
            self.taken += 1
        self._ended = isinstance(event, (DoneEvent, FailedEvent))
        return event

    def _wake_if_asked(self) -> None:
        if self._reader_is_behind:
            self._reader_is_behind = False
            self._wake()

    def __iter__(self) -> Iterator[Event]:
        """Yield events up to and including the done one; a failure is raised as its error."""
        while True:
            event = self.next_event()
            if isinstance(event, FailedEvent):
                raise event.error
            yield event
            if isinstance(event, DoneEvent):
                return
