"""Reads an engine stream on an event loop, and runs the runtime's blocking calls beside it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

from kakeya.types import Event

P = ParamSpec("P")
T = TypeVar("T")


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


class Workers:
    """Threads for calls that wait for the engine, at most one step each."""

    def __init__(self, count: int = 64) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="kakeya-rpc")

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's answer. A caller that is cancelled meanwhile does not learn it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(function, *args, **kwargs))

    async def call_or_undo(self, function: Callable[[], T], undo: Callable[[T], object]) -> T:
        """Like `call`, but an answer that comes after the caller was cancelled is given to `undo`."""
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(self._pool, function)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(partial(self._undo, undo))
            raise

    def _undo(self, undo: Callable[[T], object], answer: "asyncio.Future[T]") -> None:
        if not answer.cancelled() and answer.exception() is None:
            with suppress(RuntimeError):  # closed: the engine is gone, and the answer with it
                self._pool.submit(undo, answer.result())

    def close(self) -> None:
        """Take no more calls; those that run end with the engine."""
        self._pool.shutdown(wait=False, cancel_futures=True)
