"""The HTTP server of a front end: each request goes to the home that has what it is about.

A response or a conversation names its home in its id. A chat has none: its beginning decides, so that its
next turn finds the session of the last one. Lists and metrics are put together from all homes.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import httpx
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kakeya.cluster.exposition import labelled
from kakeya.cluster.homes import Homes, Link
from kakeya.cluster.members import home_in
from kakeya.errors import Unavailable
from kakeya.http_server import HttpServer
from kakeya.http_server.app import ANSWERS, layers
from kakeya.http_server.errors import invalid
from kakeya.http_server.responses.items import page
from kakeya.http_server.state import HttpState

log = logging.getLogger(__name__)

# They speak of one connection, or are written anew on the other side.
_OF_A_CONNECTION = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "upgrade", "host", "content-length", "date")
)
# What a front end says of chat completions, or does not, by its own settings.
_OF_A_FRONT_END = frozenset(("deprecation", "sunset", "link"))
_KEYS = frozenset(("authorization", "x-api-key"))
# Homes take their time to answer, and none to be connected to.
_TIMEOUT = httpx.Timeout(None, connect=5.0)
# How often a home is connected to that says over gRPC that it is there.
_TRIES = 5
# Of a list, as the API has it.
_MOST_LISTED = 100
_MODEL = "/v1/models/"
_CHATS = ("/v1/chat/completions", "/v1/messages", "/v1/completions")


class ClusterHttp(HttpServer):
    """Use it like an HttpServer, over homes instead of a runtime."""

    _proxy: "Proxy | None" = None

    async def open(self, homes: Homes) -> None:  # type: ignore[override]
        """Serve from now on."""
        await homes.open()
        assert self._proxy is not None
        self._proxy.homes = homes

    async def stop(self, grace_s: float) -> None:
        await super().stop(grace_s)
        if self._proxy is not None:
            await self._proxy.client.aclose()

    def _app(self) -> ASGIApp:
        self._proxy = Proxy(self.state)
        return create_proxy(self.state, self._proxy)


def create_proxy(state: HttpState, proxy: "Proxy") -> Starlette:
    """A proxy behind the same layers as a server's own routes."""
    app = Starlette(middleware=list(layers(state)), exception_handlers=dict(ANSWERS))
    app.router.default = proxy
    app.router.redirect_slashes = False
    return app


class Proxy:
    """Passes requests on, and the answers back as they come. Used from one event loop."""

    def __init__(self, state: HttpState) -> None:
        self.homes: Homes | None = None
        self.client = httpx.AsyncClient(
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,  # homes are reached directly, whatever proxy the machine has for the world
        )
        self._state = state
        self._merged: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/healthz": self._healthz,
            **dict.fromkeys(("/readyz", "/health", "/ping"), self._readyz),
            "/metrics": self._metrics,
            "/v1/models": self._models,
            "/v1/conversations": self._conversations,
            "/console/sessions": self._sessions,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"a front end does not serve {scope['type']}")
        request = Request(scope, receive)
        merged = self._merged_for(request)
        if merged is not None:
            answer = await merged(request)
            await answer(scope, receive, send)
            return
        body = await request.body()
        passing = asyncio.create_task(self._pass(request, body, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((passing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:  # of a client that has gone, the work at the home ends with the connection to it
            for task in (passing, leaving):
                task.cancel()
            await asyncio.gather(passing, leaving, return_exceptions=True)

    def _merged_for(self, request: Request) -> Callable[[Request], Awaitable[Response]] | None:
        """What puts the answer together from all homes; None where one home has it."""
        path: str = request.scope["path"]
        if request.method == "GET" and path.startswith(_MODEL):
            return self._model
        return self._merged.get(path) if request.method in ("GET", "HEAD") or path == "/ping" else None

    async def _pass(self, request: Request, body: bytes, send: Send) -> None:
        homes = self._ready()
        names = await self._homes_for(request, body)
        for _ in range(_TRIES):
            link = await homes.reach(*names)
            try:
                await self._pass_to(link, request, body, send)
                return
            except _NotConnected as error:  # nothing was sent, so it may be sent again
                log.warning("home %s cannot be connected to: %s", link.name, error)
        raise Unavailable(f"home {names[0]!r} of the cluster cannot be reached over HTTP: try again later")

    async def _pass_to(self, link: Link, request: Request, body: bytes, send: Send) -> None:
        homes = self._ready()
        url = httpx.URL(link.http_url).copy_with(raw_path=_target(request.scope))
        sent = self.client.build_request(
            request.method, url, headers=self._headers(request.headers, request.scope), content=body
        )
        try:
            answer = await self.client.send(sent, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            homes.broke(link)
            raise _NotConnected(f"home {link.name!r} of the cluster cannot be reached: {error}") from error
        except httpx.HTTPError as error:
            homes.broke(link)
            raise Unavailable(f"home {link.name!r} of the cluster broke off: try again later") from error
        try:
            await _relay(answer, send)
        except httpx.HTTPError as error:
            homes.broke(link)
            raise Unavailable(f"home {link.name!r} of the cluster broke off: try again later") from error
        finally:
            await answer.aclose()

    async def _homes_for(self, request: Request, body: bytes) -> list[str]:
        """The homes that may answer, the best first. Only what leaves nothing behind may go to several."""
        homes, path = self._ready(), request.url.path
        parts = path.strip("/").split("/")
        if parts[:2] == ["console", "sessions"] and len(parts) == 3:
            return [await homes.home_of(parts[2])]
        if parts[:2] in (["v1", "responses"], ["v1", "conversations"]) and len(parts) > 2:
            return [_home_by(parts[2], homes)]
        asked = _json(body) if request.method == "POST" else {}
        model = str(asked.get("model") or homes.default_model)
        if parts == ["v1", "responses"]:
            before = asked.get("previous_response_id") or _id_of(asked.get("conversation"))
            return [_home_with(before, asked, homes)] if before else await _new_home(homes, model)
        if parts == ["v1", "conversations"]:
            return await _new_home(homes, model)
        if path in _CHATS:
            return homes.home_for(model, _beginning(request.scope["state"]["owner"], asked))
        if request.method == "POST":
            return homes.home_for(model, b"")
        return [homes.any_home()]

    def _headers(self, given: Headers, scope: Scope) -> list[tuple[str, str]]:
        owner = scope.get("state", {}).get("owner", "")
        kept = [
            (name, value)
            for name, value in given.items()
            if name not in _OF_A_CONNECTION | _KEYS and not name.startswith("kakeya-") and name != "origin"
        ]
        return [*kept, *self._ready().credentials(owner)]

    def _ready(self) -> Homes:
        if self.homes is None:
            raise Unavailable("the front end is still looking for the homes of the cluster")
        return self.homes

    # What is put together.

    async def _healthz(self, request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def _readyz(self, request: Request) -> Response:
        if self._state.is_draining:
            raise Unavailable("the server is shutting down and takes no new work")
        self._ready().require_any()
        return JSONResponse({"status": "ready" if request.url.path == "/readyz" else "ok"})

    async def _models(self, request: Request) -> Response:
        found = await self._all(request)
        merged = _merged_models(model for listed in found for model in listed["data"])
        return JSONResponse({"object": "list", "data": merged})

    async def _model(self, request: Request) -> Response:
        """One model as the list has it."""
        self._ready().serving(request.scope["path"].removeprefix(_MODEL))
        return JSONResponse(_merged_models(await self._all(request))[0])

    async def _conversations(self, request: Request) -> Response:
        """All homes' conversations, newest first."""
        wanted = request.query_params
        limit = wanted.get("limit", "20")
        if not limit.isdecimal() or not 1 <= int(limit) <= _MOST_LISTED:
            raise invalid("limit", f"limit: must be 1 to {_MOST_LISTED}, got {limit!r}")
        names = self._heard_of()
        lists = await asyncio.gather(*(self._conversations_of(name, request) for name in names))
        every = sorted(
            (each for listed in lists for each in listed),
            key=lambda each: (-each["created_at"], each["id"]),
        )
        return JSONResponse(page(every, after=wanted.get("after"), limit=int(limit), order="asc"))

    async def _conversations_of(self, name: str, request: Request) -> list[Any]:
        found: list[Any] = []
        while True:
            after = f"&after={found[-1]['id']}" if found else ""
            answer = await self._ask(name, request, f"limit={_MOST_LISTED}{after}".encode())
            if answer is None or not answer.is_success:
                raise Unavailable(f"home {name!r} of the cluster does not list its conversations")
            listed = answer.json()
            found += listed["data"]
            if not listed["has_more"]:
                return found

    async def _sessions(self, request: Request) -> Response:
        """The console's table: all homes' sessions, and their rooms together."""
        found = await self._all(request)
        merged: dict[str, Any] = found[0]
        for each in found[1:]:
            merged["sessions"] += each["sessions"]
            merged["session_count"] += each["session_count"]
            _add(merged["facts"], each["facts"])
        return JSONResponse(merged, headers={"Cache-Control": "no-store"})

    async def _metrics(self, request: Request) -> Response:
        """The metrics of every home, each with its name."""
        homes = self._ready()
        told = await asyncio.gather(*(self._ask(name, request) for name in sorted(homes.homes)))
        texts = {
            name: answer.text
            for name, answer in zip(sorted(homes.homes), told, strict=True)
            if answer is not None
        }
        return PlainTextResponse(labelled(texts), media_type=CONTENT_TYPE_LATEST)

    async def _all(self, request: Request) -> list[Any]:
        """What each home says that was heard of."""
        answers = await asyncio.gather(*(self._ask(name, request) for name in self._heard_of()))
        found = [answer.json() for answer in answers if answer is not None and answer.is_success]
        if not found:
            raise Unavailable("no home of the cluster can be reached")
        return found

    def _heard_of(self) -> list[str]:
        homes = self._ready()
        homes.require_any()
        return sorted(name for name, home in homes.homes.items() if not home.silent)

    async def _ask(self, name: str, request: Request, query: bytes | None = None) -> httpx.Response | None:
        """A home's answer to the same request; None when it does not answer."""
        homes = self._ready()
        home = homes.homes[name]
        url = httpx.URL(home.http_url).copy_with(raw_path=_target(request.scope, query))
        try:
            return await self.client.get(
                url, headers=self._headers(request.headers, request.scope), timeout=5.0
            )
        except httpx.HTTPError as error:
            log.info("home %s does not answer: %s", name, error)
            return None


class _NotConnected(Exception):
    """A home could not be connected to, so it knows nothing of the request."""


async def _relay(answer: httpx.Response, send: Send) -> None:
    headers = [
        (name.encode(), value.encode())
        for name, value in answer.headers.items()
        if name.lower() not in _OF_A_CONNECTION | _OF_A_FRONT_END
    ]
    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
    async for part in answer.aiter_raw():
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    """Until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _target(scope: Scope, query: bytes | None = None) -> bytes:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    asked = scope["query_string"] if query is None else query
    return path + (b"?" + asked if asked else b"")


def _json(body: bytes) -> Mapping[str, Any]:
    """The request's fields; none where it has no such body. The home says what is wrong with it."""
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _id_of(conversation: object) -> str:
    named = conversation.get("id") if isinstance(conversation, dict) else conversation
    return named if isinstance(named, str) else ""


def _home_by(name: object, homes: Homes) -> str:
    """The home that an id names; any home where it names none that is known, which then says so."""
    named = home_in(name) if isinstance(name, str) else ""
    return named if named in homes.homes else homes.any_home()


def _home_with(before: object, asked: Mapping[str, Any], homes: Homes) -> str:
    """The home where a response goes on. Raises ApiError where another model is asked for than it has."""
    home, model = _home_by(before, homes), asked.get("model")
    there = homes.homes[home].model
    if model not in (None, there) and any(model == each.model for each in homes.homes.values()):
        raise invalid(
            "model",
            f"{before} is answered by {there!r}, not by {model!r}: what was begun with one stays with it. "
            f'Begin a conversation for another one with POST /v1/conversations and {{"model": …}}',
        )
    return home


async def _new_home(homes: Homes, model: str) -> list[str]:
    return [(await homes.reach_for_new("", model)).name]


def _beginning(owner: str, asked: Mapping[str, Any]) -> bytes:
    """What all turns of one chat have in common: who asks for what, and what was said before any answer."""
    messages = asked.get("messages")
    said: Any = asked.get("prompt")
    if isinstance(messages, list):
        until = next(
            (
                place
                for place, each in enumerate(messages)
                if isinstance(each, dict) and each.get("role") == "assistant"
            ),
            len(messages),
        )
        said = messages[:until]
    told = json.dumps([owner, asked.get("model"), asked.get("system"), said], sort_keys=True)
    return hashlib.sha256(told.encode()).digest()


def _merged_models(models: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One of each model, with the sessions of all its homes."""
    merged: dict[str, dict[str, Any]] = {}
    for model in models:
        known = merged.setdefault(model["id"], model)
        if known is not model:
            known["capacity"] += model["capacity"]
    return list(merged.values())


def _add(total: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Add one home's room to that of others. What is no amount stays that of the first."""
    for name in ("capacity", "pool_bytes", "free_slabs", "generated_tokens"):
        total[name] = (total[name] or 0) + (facts[name] or 0)
    asleep, more = total["asleep"], facts["asleep"]
    if asleep is not None and more is not None:
        for name in ("host", "disk", "host_bytes", "disk_bytes"):
            asleep[name] += more[name]
        asleep["lag_tokens"] = max(asleep["lag_tokens"], more["lag_tokens"])
