"""A generate's stream that records what its reader got, so that it can be replayed."""

import threading
from collections.abc import Callable

from kakeya.engine.stream import EventStream
from kakeya.errors import ResourceExhausted, SessionBusy
from kakeya.types import Event, TokenEvent, TruncatedEvent


class RecordedStream(EventStream):
    """Keeps up to `limit` events; a generate that has more is not kept at all."""

    def __init__(self, wake: Callable[[], None], limit: int) -> None:
        super().__init__(wake)
        self._limit = limit
        self._record: list[Event] = []
        self._is_too_long = False
        # Held while the record is rewritten, or read as a whole.
        self._record_lock = threading.Lock()
        self.size = 0
        """How much is kept: an event counts one, and so does each candidate it lists."""

    def put(self, event: Event) -> None:
        self._remember(event)
        super().put(event)

    def cut(self, terminal_event: Callable[[int], Event]) -> None:
        def remembered(taken: int) -> Event:
            event = terminal_event(taken)
            with self._record_lock:
                self._forget_unread(taken)
                self._remember(event)
            return event

        super().cut(remembered)

    def replay(self) -> EventStream:
        """What the reader got, as a stream of its own.

        Raises SessionBusy while the generate runs and ResourceExhausted when it was too long to keep.
        """
        if not self.is_settled:
            raise SessionBusy("the first call with this request_id is still generating")
        with self._record_lock:
            events = list(self._record)
        if self._is_too_long:
            raise ResourceExhausted(
                f"the first call with this request_id was answered with more than {self._limit} events: "
                "that is more than is kept to be told again"
            )
        copy = EventStream(lambda: None)
        for event in events:
            copy.put(event)
        return copy

    def _remember(self, event: Event) -> None:
        if self._is_too_long:
            return
        self._record.append(event)
        self.size += _size(event)
        if self.size > self._limit:
            self._is_too_long = True
            self._record, self.size = [], 0

    def _forget_unread(self, taken: int) -> None:
        """Keep the first `taken` tokens and what was announced before them."""
        tokens = [event for event in self._record if isinstance(event, TokenEvent)]
        announced = [event for event in self._record if isinstance(event, TruncatedEvent)]
        self._record = [*announced, *tokens[:taken]]
        self.size = sum(map(_size, self._record))


def _size(event: Event) -> int:
    return 1 + len(event.top_logprobs) if isinstance(event, TokenEvent) else 1
