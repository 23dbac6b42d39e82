"""Server-sent events of the Responses API: typed, and numbered from 0 within one stream."""

import json
from collections.abc import Iterable

from kakeya.http_server.responses.output import Event


class EventWriter:
    """Writes one stream's events."""

    def __init__(self) -> None:
        self._next = 0

    def written(self, events: Iterable[Event]) -> bytes:
        """The events as they go over the wire, in one piece."""
        return b"".join(self._written(event) for event in events)

    def _written(self, event: Event) -> bytes:
        numbered = {**event, "sequence_number": self._next}
        self._next += 1
        # ASCII, because a client may have sent half of a surrogate pair and gets it back.
        data = json.dumps(numbered, separators=(",", ":"))
        return f"event: {event['type']}\ndata: {data}\n\n".encode("ascii")
