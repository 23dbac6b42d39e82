"""Routes about the server itself: is it alive, is it ready, what does it serve, how does it fare."""

from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import Response

from kakeya.http_server.errors import ApiError
from kakeya.http_server.security import owner_of
from kakeya.http_server.state import HttpState, state_of

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

router = APIRouter(tags=["service"])

State = Annotated[HttpState, Depends(state_of)]


class Health(BaseModel):
    """One word on how the server is."""

    status: Literal["alive", "ready"]


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
    if state.runtime is not None:
        state.runtime.check_alive()
    return Health(status="alive")


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", summary="The model is loaded, and the server neither dead nor shutting down")
async def readyz(state: State) -> Health:
    state.ready_runtime()
    return Health(status="ready")


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(state: State) -> Response:
    if state.metrics is None:
        raise ApiError(404, "this server counts nothing", code="no_metrics")
    text = await state.workers.call(state.metrics.exposition)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models", summary="List the models", dependencies=[Depends(owner_of)])
async def list_models(state: State) -> ModelList:
    return ModelList(data=[_described(state.loaded_runtime(), state)])


@router.get("/v1/models/{model:path}", summary="Describe a model", dependencies=[Depends(owner_of)])
async def retrieve_model(model: str, state: State) -> Model:
    served = _described(state.loaded_runtime(), state)
    if model != served.id:
        raise ApiError(
            404,
            f"there is no model {model!r} here; this server serves {served.id!r}",
            param="model",
            code="model_not_found",
        )
    return served


def _described(runtime: "Runtime", state: HttpState) -> Model:
    facts = runtime.describe()
    return Model(
        id=facts.model,
        created=state.opened_at,
        family=facts.family,
        parameters=facts.parameters,
        sink=facts.sink,
        window=facts.window,
        context_length=facts.sink + facts.window,
        capacity=facts.capacity,
        session_bytes=facts.session_bytes,
    )
