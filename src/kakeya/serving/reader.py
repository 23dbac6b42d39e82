"""Reads an engine stream on an event loop."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from kakeya.types import Event


class EventSource(Protocol):
    """What a generate hands out: an engine's stream, or the replay of one."""

    def subscribe(self, announce: Callable[[], None]) -> None: ...

    def poll(self) -> Event | None: ...

    def cancel(self) -> None: ...


class EventReader:
    """Takes events one by one without blocking the loop. A token is history once it is taken."""

    def __init__(self, source: EventSource) -> None:
        self._source = source
        self._loop = asyncio.get_running_loop()
        self._waiting = asyncio.Event()
        source.subscribe(self._announce)

    async def next_event(self) -> Event:
        """The next event, as soon as there is one."""
        while True:
            # Cleared before the look, so that an announcement in between is not lost.
            self._waiting.clear()
            event = self._source.poll()
            if event is not None:
                return event
            await self._waiting.wait()

    def _announce(self) -> None:
        """On the engine thread."""
        try:
            self._loop.call_soon_threadsafe(self._waiting.set)
        except RuntimeError:
            pass  # the loop is closed: nobody reads any more
