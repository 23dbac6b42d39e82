"""Clients that go away: their work ends, and everything it held is released."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

EVENT_STREAM = "text/event-stream"


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """The work's answer. When the client goes first, the work is cancelled and ClientDisconnect raised.

    However this ends, the work has ended before: its clean-up is waited for. The request's body must
    have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait((task, gone))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse(StreamingResponse):
    """Server-sent events. Whatever happens, `release` is called once at the end, after the events'
    generator was closed, also when it was never begun.

    A client that goes away cancels the generator where it waits.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        release: Callable[[], Awaitable[None]],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # Proxies that buffer would turn a stream into one late answer.
        never_kept = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(events, headers={**never_kept, **(headers or {})}, media_type=EVENT_STREAM)
        self._events = events
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # A task of its own: a second cancellation must not leave half of it undone.
            await asyncio.shield(asyncio.create_task(self._end()))

    async def _end(self) -> None:
        try:
            await self._events.aclose()
        finally:
            await self._release()


class Completing(Protocol):
    """A completion whose choices are being generated."""

    async def whole(self) -> dict[str, Any]:
        """The completion in one object, when all of it is there."""
        ...

    def events(self) -> AsyncGenerator[bytes, None]:
        """The completion as server-sent events."""
        ...


async def completed(
    request: Request, begin: Callable[[AsyncExitStack], Awaitable[Completing]], *, stream: bool
) -> Response:
    """The answer to a request for a completion, whole or as a stream.

    What `begin` takes it enters on the stack, which is closed at the end on every path.
    """
    stack = AsyncExitStack()
    try:
        completion = await until_disconnect(request, begin(stack))
        if stream:
            return EventStreamResponse(completion.events(), release=stack.aclose)
        answer = JSONResponse(await until_disconnect(request, completion.whole()))
    except BaseException:
        await stack.aclose()
        raise
    await stack.aclose()
    return answer
