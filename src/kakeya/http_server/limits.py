"""What a request may take: bytes, time to arrive, time to be answered. And the net under every answer."""

import asyncio
import logging
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kakeya.errors import DeadlineExceeded
from kakeya.http_server.errors import ApiError, error_event, error_response, is_messages
from kakeya.http_server.streaming import EVENT_STREAM
from kakeya.serving.config import HttpConfig

log = logging.getLogger(__name__)

# A body that is too long is read to its end, if that is near: a client that still writes does not look for
# an answer.
_TOO_LONG_BUT_READ = 16
# A client that does not read its answer is not waited for to read why there is none.
_LAST_WORDS_S = 1.0
_CLOSE = {"Connection": "close"}


class BodyLimit:
    """Reads the whole body before the application sees it, and refuses one that is too long or too slow."""

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
            message = f"the body did not arrive in {self._seconds:g} s"
            raise ApiError(408, message, code="request_timeout", headers=_CLOSE) from None
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
        message = f"the body is longer than the {self._most:,} bytes that are accepted"
        return ApiError(413, message, code="request_too_large", headers=_CLOSE if hang_up else None)


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
        answer, began = _Answer(send, scope["path"]), time.monotonic()
        timeout = asyncio.timeout(self._seconds)
        try:
            async with timeout:
                await self._app(scope, receive, answer.send)
        except ClientDisconnect:
            pass  # nobody is there to be answered
        except Exception as error:
            failure = error
            if timeout.expired():
                failure = DeadlineExceeded(f"the request took longer than {self._seconds:g} s")
            await _fail(failure, answer, scope, receive)
        finally:
            facts = {"method": scope["method"], "path": scope["path"], "seconds": time.monotonic() - began}
            facts |= {"request_id": answer.id, "status": answer.status, "complete": answer.is_complete}
            log.debug("request ended", extra=facts)


class _Answer:
    """What has been sent of an answer."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self.id = f"req_{secrets.token_hex(16)}"
        self._is_event_stream = False
        self.status = 0
        self.is_complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            self._is_event_stream = headers.get("content-type", "").startswith(EVENT_STREAM)
            headers["x-request-id"] = self.id
            if is_messages(self._path):  # where Anthropic's clients look for it
                headers["request-id"] = self.id
        elif not message.get("more_body", False):
            self.is_complete = True
        await self._send(message)

    async def end_with(self, error: Exception) -> None:
        """Tell the error as an event. Raises it where that cannot be: the connection then breaks."""
        if not self._is_event_stream:
            raise error
        event = error_event(error, self._path)
        await self.send({"type": "http.response.body", "body": event, "more_body": False})


async def _fail(error: Exception, answer: _Answer, scope: Scope, receive: Receive) -> None:
    """Tell the client what went wrong, as far as that is still possible."""
    if answer.is_complete:
        log.error("a request failed after its answer", exc_info=error)
        return
    try:
        async with asyncio.timeout(_LAST_WORDS_S):
            if not answer.status:
                await error_response(error, scope["path"])(scope, receive, answer.send)
            # Starlette wraps an error that has a handler and comes too late for it.
            elif isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
                await answer.end_with(error.__cause__)
            else:
                await answer.end_with(error)
    except TimeoutError:
        # Break the connection at once, without waiting for what was written to be read.
        scope["state"]["hang_up"]()
        await asyncio.sleep(0)  # for the protocol to learn of it, or it misses the end of our answer
