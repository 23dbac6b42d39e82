"""The Responses API: the session API over HTTP.

A response that names the one before it goes on in the same session, so that only the new input is computed,
however long the conversation is. Any stored response can be gone on from, any number of times.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from kakeya.http_server.disconnect import EventStreamResponse, until_disconnect
from kakeya.http_server.errors import AsciiJsonResponse
from kakeya.http_server.responses.items import page
from kakeya.http_server.responses.run import Run
from kakeya.http_server.responses.schema import ResponseRequest
from kakeya.http_server.responses.service import ResponsesService
from kakeya.http_server.security import owner_of
from kakeya.http_server.state import HttpState, state_of

router = APIRouter(tags=["responses"], default_response_class=AsciiJsonResponse)

Owner = Annotated[str, Depends(owner_of)]
Include = list[Literal["message.output_text.logprobs"]]


class Paging(BaseModel):
    """Which part of a list is wanted."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(default=20, ge=1, le=100)
    after: str | None = None


class ItemPaging(Paging):
    """Which items are wanted. Log-probabilities are there if they were asked for with the response."""

    order: Literal["asc", "desc"] = "desc"
    include: Include | None = None


class Retrieval(BaseModel):
    """How a response is wanted: as it is, since it is not told a second time."""

    model_config = ConfigDict(extra="forbid")

    include: Include | None = None
    stream: Literal["false", "0"] | None = None


Items = Annotated[ItemPaging, Query()]


async def service_of(state: Annotated[HttpState, Depends(state_of)]) -> ResponsesService:
    """The service of the server that got this request. Raises Unavailable while there is none."""
    state.loaded_runtime()
    assert state.responses is not None, "who has a runtime has its services"
    return state.responses


Service = Annotated[ResponsesService, Depends(service_of)]


@router.post(
    "/v1/responses",
    summary="Respond, and remember",
    responses={200: {"description": "The response, or its events", "content": {"text/event-stream": {}}}},
)
async def create_response(
    request: Request, body: ResponseRequest, owner: Owner, service: Service
) -> Response:
    run = service.begin(owner, body)
    if body.stream:
        return await _streamed(request, run)
    try:
        return AsciiJsonResponse(await until_disconnect(request, _whole(run)))
    finally:
        await run.aclose()


async def _whole(run: Run) -> dict[str, Any]:
    await run.prepare()
    return await run.whole()


async def _streamed(request: Request, run: Run) -> Response:
    """The events. What is wrong before the first of them is told by the status instead."""
    try:
        await until_disconnect(request, run.prepare())
    except BaseException:
        await run.aclose()
        raise
    return EventStreamResponse(run.stream(), release=run.aclose)


@router.get("/v1/responses/{response_id}", summary="Look up a response")
async def retrieve_response(
    response_id: str, owner: Owner, service: Service, wanted: Annotated[Retrieval, Query()]
) -> Response:
    """Log-probabilities are there if they were asked for when the response was made."""
    return AsciiJsonResponse(service.response(owner, response_id).body)


@router.delete("/v1/responses/{response_id}", summary="Forget a response and free its session")
async def delete_response(response_id: str, owner: Owner, service: Service) -> Response:
    """Responses that go on from it stay, and so does a conversation that stands there."""
    await service.delete_response(owner, response_id)
    return AsciiJsonResponse({"id": response_id, "object": "response.deleted", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items", summary="List what a response answered")
async def list_input_items(response_id: str, owner: Owner, service: Service, wanted: Items) -> Response:
    """The items that came with the request, not those of the responses before it."""
    items = service.response(owner, response_id).input_items
    return AsciiJsonResponse(page(items, after=wanted.after, limit=wanted.limit, order=wanted.order))
