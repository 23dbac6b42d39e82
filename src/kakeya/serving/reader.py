"""Reads an engine stream on an event loop."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from kakeya.serving.pace import Pace
from kakeya.types import Event

# This many events do not wait for the end of a pause. They fill a quarter of a slab's spare slots; with as
# many on the way, the engine would soon have to wait for its reader.
_GROUP = 8


class EventSource(Protocol):
    """What a generate hands out: an engine's stream, or the replay of one."""

    @property
    def cached_tokens(self) -> int: ...

    def when_ready(self, announce: Callable[[], None], events: int = 1) -> None: ...

    def poll(self) -> Event | None: ...

    def poll_all(self) -> list[Event]: ...

    def cancel(self) -> None: ...


class EventReader:
    """Takes events without blocking the loop. A token is history once it is taken."""

    def __init__(self, source: EventSource, pace: Pace | None = None) -> None:
        self._source = source
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._rests_until = 0.0
        self._woken: asyncio.Future[None] | None = None

    async def next_event(self) -> Event:
        """The next event, as soon as there is one."""
        while True:
            event = self._source.poll()
            if event is not None:
                return event
            await self._until_ready(1)

    async def next_events(self) -> list[Event]:
        """The next events, at least one: all that wait when the pause after the last ones is over."""
        pause = self._rests_until - self._loop.time()
        if pause > 0:
            await self._until_ready(_GROUP, pause)
        while True:
            events = self._source.poll_all()
            if events:
                if self._pace is not None:
                    self._rests_until = self._pace.rests_until(self._loop.time())
                return events
            await self._until_ready(1)

    async def _until_ready(self, events: int, at_most_s: float | None = None) -> None:
        """Until that many events wait, or the time is over. May return early: look again."""
        self._woken = self._loop.create_future()
        timer = None if at_most_s is None else self._loop.call_later(at_most_s, self._wake)
        self._source.when_ready(self._announce, events)
        try:
            await self._woken
        finally:
            if timer is not None:
                timer.cancel()

    def _announce(self) -> None:
        """On the engine thread."""
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            pass  # the loop is closed: nobody reads any more

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)
