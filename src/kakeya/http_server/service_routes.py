"""Routes about the server itself: is it alive, is it ready, what does it serve, how does it fare."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

import kakeya
from kakeya.http_server.errors import ApiError
from kakeya.http_server.openapi import document
from kakeya.http_server.schema import check_model
from kakeya.http_server.state import State

if TYPE_CHECKING:
    from kakeya.http_server.loaded import Loaded

router = APIRouter(tags=["service"])


class Health(BaseModel):
    """One word on how the server is."""

    status: Literal["alive", "ready", "ok"]


class Version(BaseModel):
    """What this server is."""

    version: str


class Model(BaseModel):
    """A model that can be asked for, and what its sessions hold."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["kakeya"] = "kakeya"
    family: str
    parameters: int
    sink: int
    window: int
    context_length: int
    capacity: int
    session_bytes: int


class ModelList(BaseModel):
    """The models of this server: one."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", summary="The process is alive, and so is its engine")
async def healthz(state: State) -> Health:
    if state.loaded is not None:
        state.loaded.runtime.check_alive()
    return Health(status="alive")


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", summary="The model is loaded, and the server neither dead nor shutting down")
async def readyz(state: State) -> Health:
    state.require_ready()
    return Health(status="ready")


@router.head("/health", include_in_schema=False)
@router.head("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
@router.get("/ping", summary="The same as /health, for clients that ask there")
@router.get("/health", summary="The same as /readyz, for clients of vLLM and llama.cpp")
async def health(state: State) -> Health:
    state.require_ready()
    return Health(status="ok")


@router.get("/version", summary="The server's version")
async def version() -> Version:
    return Version(version=kakeya.__version__)


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(state: State) -> Response:
    if state.metrics is None:
        raise ApiError(404, "this server counts nothing", code="no_metrics")
    text = await state.workers.call(state.metrics.exposition)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/openapi.json", include_in_schema=False)
async def openapi_json(request: Request, state: State) -> JSONResponse:
    return JSONResponse(document(request.app, needs_key=state.config.needs_key))


@router.get("/v1/models", summary="List the models")
async def list_models(state: State) -> ModelList:
    return ModelList(data=[_described(state.require_loaded())])


@router.get("/v1/models/{model:path}", summary="Describe a model")
async def retrieve_model(model: str, state: State) -> Model:
    loaded = state.require_loaded()
    check_model(model, loaded.runtime)
    return _described(loaded)


def _described(loaded: "Loaded") -> Model:
    facts = asdict(loaded.runtime.describe())
    context_length = loaded.runtime.config.cache.capacity
    return Model(id=facts["model"], created=loaded.opened_at, context_length=context_length, **facts)
