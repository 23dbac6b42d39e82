"""The application: every route, every error's answer, and the layers around them."""

from collections.abc import Awaitable, Callable, Iterator, Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

import kakeya
from kakeya.errors import KakeyaError
from kakeya.http_server import service_routes, tokenizing
from kakeya.http_server.completions import routes as completions
from kakeya.http_server.completions.deprecation import Deprecation
from kakeya.http_server.console import routes as console
from kakeya.http_server.errors import ApiError, error_response
from kakeya.http_server.limits import BodyLimit, Guard
from kakeya.http_server.messages import routes as messages
from kakeya.http_server.openapi import ERRORS
from kakeya.http_server.responses import routes as responses
from kakeya.http_server.security import Doorkeeper
from kakeya.http_server.state import HttpState

_EXPOSED_HEADERS = ("x-request-id", "request-id", "retry-after", "deprecation", "sunset", "link")
_ROUTERS = (
    responses.router,
    responses.conversations,
    completions.router,
    messages.router,
    tokenizing.router,
    service_routes.router,
    console.router,
)


def create_app(state: HttpState) -> FastAPI:
    """The routes over one server's state, behind their layers. Serves HTTP alone, no lifespan events."""
    app = FastAPI(
        title="Kakeya",
        version=kakeya.__version__,
        summary="OpenAI's and Anthropic's APIs over sessions of bounded memory.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        responses=ERRORS,
        middleware=list(layers(state)),
    )
    app.state.kakeya = state
    for router in _ROUTERS:
        app.include_router(router)
    for kind, answer in ANSWERS.items():
        app.add_exception_handler(kind, answer)
    return app


def layers(state: HttpState) -> Iterator[Middleware]:
    """From the outside in. All of them see every request, also one that no route wants."""
    config = state.config
    if config.cors_origins:
        yield Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_EXPOSED_HEADERS,
        )
    if config.chat_deprecation:
        yield Middleware(Deprecation, config)
    yield Middleware(Guard, config)
    yield Middleware(Doorkeeper, state)
    yield Middleware(BodyLimit, config)


async def _answer_error(request: Request, error: Exception) -> Response:
    return error_response(error, request.url.path)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the client has gone; only a test ever sees it


# How each kind of error is answered.
ANSWERS: Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    **dict.fromkeys((ApiError, KakeyaError, RequestValidationError, HTTPException), _answer_error),
    ClientDisconnect: _answer_nobody,
}
