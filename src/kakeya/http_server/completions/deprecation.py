"""Chat completions say that they are deprecated, on every answer: errors and streams included."""

from datetime import UTC, datetime, time
from email.utils import format_datetime

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kakeya.serving.config import HttpConfig

_ROUTE = "/v1/chat/completions"
_SUCCESSOR = "/v1/responses"


class Deprecation:
    """Adds Deprecation, Sunset and Link. Belongs around everything that may answer."""

    def __init__(self, app: ASGIApp, config: HttpConfig) -> None:
        self._app = app
        sunset = datetime.combine(config.chat_sunset, time(), UTC)
        self._headers = {
            "deprecation": "true",
            "sunset": format_datetime(sunset, usegmt=True),
            "link": f'<{_SUCCESSOR}>; rel="successor-version"',
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start" and scope["path"] == _ROUTE:
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        await self._app(scope, receive, send_with_headers)
