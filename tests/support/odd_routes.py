"""Routes that misbehave, for tests of what stands around the real ones."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from kakeya.errors import InvalidArgument
from kakeya.http_server.state import state_of
from kakeya.http_server.streaming import EventStreamResponse, until_disconnect

router = APIRouter()
# How often each thing has happened.
seen: Counter[str] = Counter()


@router.post("/odd/size")
async def size(request: Request) -> int:
    seen["read"] += 1
    return len(await request.body())


@router.get("/odd/boom")
async def boom() -> None:
    raise ValueError("something that nobody may see")


@router.get("/odd/stream")
async def stream(ending: str) -> Response:
    """Two events, then an end, an error or an endless wait."""

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: 1\n\n"
            yield b"data: 2\n\n"
            if ending == "error":
                raise ValueError("something that nobody may see")
            if ending == "refusal":
                raise InvalidArgument("what a client may see")
            if ending == "wait":
                await asyncio.Event().wait()
        finally:
            seen["closed"] += 1

    async def release() -> None:
        await asyncio.sleep(0.01)
        seen["released"] += 1
        if ending == "late-error":
            raise ValueError("something that nobody may see")

    return EventStreamResponse(events(), releasing(release))


def releasing(release: Callable[[], Awaitable[None]]) -> AsyncExitStack:
    stack = AsyncExitStack()
    stack.push_async_callback(release)
    return stack


@router.get("/odd/text")
async def text() -> Response:
    async def parts() -> AsyncGenerator[bytes, None]:
        yield b"half of "
        raise ValueError("something that nobody may see")

    return StreamingResponse(parts(), media_type="text/plain")


@router.get("/odd/flood")
async def flood() -> Response:
    """Never ends, as fast as it is read."""

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                await asyncio.sleep(0)
                seen["chunks"] += 1
                yield b"data: " + b"x" * 65536 + b"\n\n"
        finally:
            seen["closed"] += 1

    async def release() -> None:
        seen["released"] += 1

    return EventStreamResponse(events(), releasing(release))


@router.post("/odd/work")
async def work(request: Request) -> str:
    """Takes until the client has had enough, in a place of its own."""

    async def working() -> str:
        async with state_of(request).admission.admit("odd"):
            seen["begun"] += 1
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                seen["ended"] += 1
        return "never"

    return await until_disconnect(request, working())
