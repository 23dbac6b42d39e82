"""HTTP/1.1 on one connection: uvicorn's protocol, with bounds on connections and on what precedes a body."""

import asyncio
import json

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from kakeya.http_server.errors import INVALID_REQUEST, ApiError, error_body
from kakeya.serving.config import HttpConfig

# Cookies and tokens are long; nothing that we read is.
_MOST_HEAD_BYTES = 64 * 1024


class ProtocolConfig(uvicorn.Config):
    """uvicorn's settings, and ours for the protocol."""

    bounds: HttpConfig


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection that is one too many, or whose request line and headers are too long or too slow.

    A request's scope says how to `hang_up` in its `state`.
    """

    config: ProtocolConfig

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self.config.bounds.max_connections:
            self._refuse(503, "the server has too many connections", "server_error", "too_many_connections")
        else:
            self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES:
                self._refuse(431, "the headers are too long", INVALID_REQUEST, "headers_too_large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["hang_up"] = self.transport.abort
        self._in_head = True
        self._head_bytes = 0
        if self._head_timer is None:
            self._time_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, INVALID_REQUEST, "bad_request")

    def _unsupported_upgrade_warning(self) -> None:
        """A client that offers another protocol may use this one; that is no news for the log."""

    def _refuse(self, status: int, message: str, kind: str, code: str) -> None:
        """Say why, and close."""
        body = json.dumps(error_body(ApiError(status, message, type=kind, code=code), path="")).encode()
        head = f"content-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()

    def _time_head(self) -> None:
        self._head_timer = self.loop.call_later(self.config.bounds.receive_timeout_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            self.transport.close()
        else:
            self._time_head()  # an answer is still being sent; the next request has time until it is
