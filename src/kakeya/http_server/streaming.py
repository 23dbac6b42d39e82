"""Server-sent events, and clients that go away: their work ends, and everything it held is released."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

EVENT_STREAM = "text/event-stream"
STREAM_END = b"data: [DONE]\n\n"


def sse(data: dict[str, Any]) -> bytes:
    """One event, as chat completions and completions write it."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def named_sse(name: str, data: dict[str, Any]) -> bytes:
    """One event with a name. ASCII, because a client may have sent half of a surrogate pair."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode("ascii")


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
    """Server-sent events. Whatever happens, the events' generator is closed at the end and then `stack`, also
    when the generator was never begun.

    A client that goes away cancels the generator where it waits.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], stack: AsyncExitStack) -> None:
        # Proxies that buffer would turn a stream into one late answer.
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type=EVENT_STREAM)
        stack.push_async_callback(events.aclose)
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # A task of its own: a second cancellation must not leave half of it undone.
            await asyncio.shield(asyncio.create_task(self._stack.aclose()))


class Answering(Protocol):
    """An answer being generated: in one object, or as server-sent events, of which an error is the last."""

    async def whole(self) -> dict[str, Any]: ...

    def events(self) -> AsyncGenerator[bytes, None]: ...


async def respond(
    request: Request,
    begin: Callable[[AsyncExitStack], Awaitable[Answering]],
    *,
    stream: bool,
    response_class: type[JSONResponse] = JSONResponse,
) -> Response:
    """The answer, whole or as a stream. What is wrong before the first event is told by the status.

    What `begin` takes it enters on the stack, which is closed at the end on every path.
    """
    async with AsyncExitStack() as stack:
        answering = await until_disconnect(request, begin(stack))
        if stream:
            return EventStreamResponse(answering.events(), stack.pop_all())
        return response_class(await until_disconnect(request, answering.whole()))


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """What the sources give, as it comes, with the number of the source. A slow reader slows them down.

    The first error ends all. However it ends, every source was closed before.
    """
    if len(sources) == 1:  # by far the most common, and no task is needed for it
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield 0, item
        return
    waiting = {asyncio.ensure_future(anext(source)): number for number, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: waiting[task]):
                number = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(sources[number]))] = number
                yield number, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()
