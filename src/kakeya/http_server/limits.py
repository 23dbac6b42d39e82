"""What a request may take: bytes, time to arrive, time to be answered. And the net under every answer."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kakeya.config import HttpConfig
from kakeya.errors import DeadlineExceeded
from kakeya.http_server.errors import ApiError, error_body, error_response
from kakeya.http_server.streaming import EVENT_STREAM

log = logging.getLogger(__name__)

# A body that is too long is read to its end, if that is near: a client that still writes does not look for
# an answer.
_TOO_LONG_BUT_READ = 16
# A client that does not read its answer is not waited for to read why there is none.
_LAST_WORDS_S = 1.0


class BodyLimit:
    """Reads the body before anybody works on it: at most so many bytes, in at most so many seconds.

    The application gets it in one piece.
    """

    def __init__(self, app: ASGIApp, config: HttpConfig) -> None:
        self._app = app
        self._most = config.max_body_bytes
        self._seconds = config.receive_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        declared = int(headers.get("content-length") or 0)
        if declared > self._most and ("expect" in headers or declared > self._most * _TOO_LONG_BUT_READ):
            raise self._too_long(hang_up=True)
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(receive)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive in {self._seconds:g} s",
                code="request_timeout",
                headers={"Connection": "close"},
            ) from None
        await self._app(scope, _replayed(body, receive), send)

    async def _read(self, receive: Receive) -> bytes:
        body, length, more = bytearray(), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part, more = message.get("body", b""), message.get("more_body", False)
            length += len(part)
            if length <= self._most:
                body += part
            elif length > self._most * _TOO_LONG_BUT_READ:
                raise self._too_long(hang_up=True)
        if length > self._most:
            raise self._too_long(hang_up=False)
        return bytes(body)

    def _too_long(self, hang_up: bool) -> ApiError:
        return ApiError(
            413,
            f"the body is longer than the {self._most:,} bytes that are accepted",
            code="request_too_large",
            headers={"Connection": "close"} if hang_up else None,
        )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body, then whatever else comes."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


class Guard:
    """Every request gets an id, ends in time, and is answered whatever happens inside.

    An answer that has begun and is a stream of events gets its error as the last of them.
    """

    def __init__(self, app: ASGIApp, config: HttpConfig) -> None:
        self._app = app
        self._seconds = config.request_timeout_s or None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, began = _Answer(send), time.monotonic()
        timeout = asyncio.timeout(self._seconds)
        try:
            async with timeout:
                await self._app(scope, receive, answer.send)
        except ClientDisconnect:
            pass  # nobody is there to be answered
        except Exception as error:
            await self._fail(self._late() if timeout.expired() else error, answer, scope, receive)
        finally:
            facts = {"method": scope["method"], "path": scope["path"], "seconds": time.monotonic() - began}
            log.debug("request ended", extra={**facts, **answer.facts})

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the request took longer than {self._seconds:g} s")

    async def _fail(self, error: Exception, answer: "_Answer", scope: Scope, receive: Receive) -> None:
        if answer.is_complete:
            log.error("a request failed after its answer", exc_info=error)
            return
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                if not answer.has_begun:
                    await error_response(error)(scope, receive, answer.send)
                else:
                    await answer.end_with(_cause(error))
        except TimeoutError:
            await _hang_up(scope)


class _Answer:
    """What has been sent of an answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._request_id = f"req_{secrets.token_hex(16)}"
        self._is_event_stream = False
        self.status = 0
        self.is_complete = False

    @property
    def has_begun(self) -> bool:
        return self.status > 0

    @property
    def facts(self) -> dict[str, object]:
        return {"request_id": self._request_id, "status": self.status, "complete": self.is_complete}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begin(message)
        elif not message.get("more_body", False):
            self.is_complete = True
        await self._send(message)

    def _begin(self, message: MutableMapping[str, Any]) -> None:
        self.status = message["status"]
        headers = list(message.get("headers", ()))
        self._is_event_stream = any(
            name == b"content-type" and value.startswith(EVENT_STREAM.encode()) for name, value in headers
        )
        message["headers"] = [*headers, (b"x-request-id", self._request_id.encode())]

    async def end_with(self, error: Exception) -> None:
        """Tell the error as an event. Raises it where that cannot be: the connection then breaks."""
        if not self._is_event_stream:
            raise error
        event = f"data: {json.dumps(error_body(error))}\n\n"
        await self.send({"type": "http.response.body", "body": event.encode(), "more_body": False})


def _cause(error: Exception) -> Exception:
    """What Starlette wraps when an error that has a handler comes too late for it."""
    wrapped = isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception)
    return error.__cause__ if wrapped else error  # type: ignore[return-value]


async def _hang_up(scope: Scope) -> None:
    """Break the request's connection at once, without waiting for what was written to be read."""
    abort: Callable[[], None] = scope["state"]["hang_up"]
    abort()
    await asyncio.sleep(0)  # for the protocol to learn of it, or it misses the end of our answer
