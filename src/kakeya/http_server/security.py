"""Who may call: the key of a request, and pages in a browser that have no business here."""

from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kakeya.http_server.errors import ApiError, is_messages
from kakeya.http_server.state import HttpState
from kakeya.serving.config import is_loopback

# What belongs to somebody: callers need a key, where the server has keys.
_OWNED = ("/v1", "/console/sessions", "/tokenize", "/detokenize")


def is_owned(path: str) -> bool:
    """Whether a route belongs to somebody, so that callers need a key."""
    return any(path == owned or path.startswith(owned + "/") for owned in _OWNED)


async def owner_of(request: Request) -> str:
    """The caller's name, as the Doorkeeper found it."""
    owner: str = request.state.owner
    return owner


Owner = Annotated[str, Depends(owner_of)]


class Doorkeeper:
    """Finds out who calls, and turns callers away before their body is read: without a key where one is
    needed, or, where none is needed, when they are sent by a foreign web page. The only one to look at keys.

    A server without keys trusts its own machine. A page from elsewhere that is open in a browser there can
    send requests too, under its own origin, or under a name that it made point here.
    """

    def __init__(self, app: ASGIApp, state: HttpState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if is_owned(scope["path"]):
            scope.setdefault("state", {})["owner"] = self._state.keys.owner_of(
                _credentials(scope["path"], headers)
            )
        self._check_page(headers)
        await self._app(scope, receive, send)

    def _check_page(self, headers: Headers) -> None:
        config = self._state.config
        if config.needs_key:
            return
        host = headers.get("host", "")
        if is_loopback(config.host) and not _is_local_name(host):
            message = f"this server answers on its own machine only, not as {host!r}"
            raise ApiError(403, message, code="host_not_allowed")
        origin = headers.get("origin")
        is_allowed = not {"*", origin}.isdisjoint(config.cors_origins)
        if origin is not None and not is_allowed and urlsplit(origin).netloc != host:
            message = f"pages from {origin!r} may not call this server"
            raise ApiError(403, message, code="origin_not_allowed")


def _credentials(path: str, headers: Headers) -> Sequence[tuple[str, str]]:
    """The headers, with the key where it is looked for: clients of Anthropic's API send it as `x-api-key`."""
    key = headers.get("x-api-key") if is_messages(path) else None
    if key is None or "authorization" in headers:
        return headers.items()
    return [("authorization", f"Bearer {key}")]


def _is_local_name(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
