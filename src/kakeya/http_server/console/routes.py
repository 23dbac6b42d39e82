"""The console's routes: its page at `/`, its files and its own view of the sessions under `/console`."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from kakeya.http_server.console import figures
from kakeya.http_server.console.assets import PAGE, Asset, assets
from kakeya.http_server.errors import ApiError, AsciiJsonResponse
from kakeya.http_server.security import Owner
from kakeya.http_server.state import State

router = APIRouter(include_in_schema=False)

_FRESH = {"Cache-Control": "no-store"}


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    return _sent(assets()[PAGE], request)


@router.get("/console/sessions")
async def sessions(state: State, owner: Owner) -> Response:
    """The caller's sessions and the server's facts, at one moment."""
    runtime = state.require_loaded().runtime
    answer = await state.workers.call(figures.overview, runtime, state.metrics, owner)
    return AsciiJsonResponse(answer, headers=_FRESH)


@router.get("/console/sessions/{session_id}")
async def session(session_id: str, state: State, owner: Owner) -> Response:
    """The turns of one of the caller's sessions."""
    answer = await state.workers.call(figures.turns, state.require_loaded().runtime, session_id, owner)
    return AsciiJsonResponse(answer, headers=_FRESH)


@router.api_route("/console/{name}", methods=["GET", "HEAD"])
async def file(name: str, request: Request) -> Response:
    found = assets().get(name)
    if found is None:
        raise ApiError(404, f"the console has no file {name!r}", code="not_found")
    return _sent(found, request)


def _sent(asset: Asset, request: Request) -> Response:
    if request.headers.get("if-none-match") == asset.headers["ETag"]:
        return Response(status_code=304, headers=dict(asset.headers))
    return Response(asset.content, media_type=asset.media_type, headers=dict(asset.headers))
