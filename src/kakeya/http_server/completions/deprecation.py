"""Chat completions say that they are deprecated, on every answer: errors and streams included."""

from datetime import UTC, datetime, time
from email.utils import format_datetime

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kakeya.config import HttpConfig

_ROUTE = "/v1/chat/completions"
_SUCCESSOR = "/v1/responses"


class Deprecation:
    """Adds Deprecation, Sunset and Link. Belongs around everything that may answer."""

    def __init__(self, app: ASGIApp, config: HttpConfig) -> None:
        self._app = app
        sunset = datetime.combine(config.chat_sunset, time(), UTC)
        self._headers = (
            (b"deprecation", b"true"),
            (b"sunset", format_datetime(sunset, usegmt=True).encode()),
            (b"link", f'<{_SUCCESSOR}>; rel="successor-version"'.encode()),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != _ROUTE:
            await self._app(scope, receive, send)
            return

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._headers]
            await send(message)

        await self._app(scope, receive, told)
