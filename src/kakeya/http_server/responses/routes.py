"""The Responses API: the session API over HTTP.

A response that names the one before it continues in the same session, so only the new input is computed,
however long the conversation is. Any stored response can be continued, any number of times. A conversation is
a named place that moves on with every response made in it.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from kakeya.http_server.errors import AsciiJsonResponse
from kakeya.http_server.responses.items import page
from kakeya.http_server.responses.records import Conversation
from kakeya.http_server.responses.run import Run
from kakeya.http_server.responses.schema import (
    ConversationChange,
    ConversationFork,
    NewConversation,
    ResponseRequest,
)
from kakeya.http_server.responses.service import Responses
from kakeya.http_server.schema import check_model
from kakeya.http_server.security import Owner
from kakeya.http_server.state import State
from kakeya.http_server.streaming import respond

router = APIRouter(tags=["responses"], default_response_class=AsciiJsonResponse)
conversations = APIRouter(tags=["conversations"], default_response_class=AsciiJsonResponse)

Include = list[Literal["message.output_text.logprobs"]]


class Paging(BaseModel, extra="forbid"):
    """Which part of a list is wanted."""

    limit: int = Field(default=20, ge=1, le=100)
    after: str | None = None


class ItemPaging(Paging):
    """Which items are wanted. Log-probabilities are there if they were asked for with the response."""

    order: Literal["asc", "desc"] = "desc"
    include: Include | None = None


class Retrieval(BaseModel, extra="forbid"):
    """How a response is wanted: as it is, since it is not told a second time."""

    include: Include | None = None
    stream: Literal["false", "0"] | None = None


Items = Annotated[ItemPaging, Query()]


async def service_of(state: State) -> Responses:
    """The service of the server that got this request. Raises Unavailable while there is none."""
    return state.require_loaded().responses


Service = Annotated[Responses, Depends(service_of)]


@router.post(
    "/v1/responses",
    summary="Respond, and remember",
    responses={200: {"description": "The response, or its events", "content": {"text/event-stream": {}}}},
)
async def create_response(
    request: Request, body: ResponseRequest, owner: Owner, service: Service
) -> Response:
    run = Run(service, owner, service.plan(owner, body))
    return await respond(request, run.open, stream=bool(body.stream), response_class=AsciiJsonResponse)


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


@conversations.post("/v1/conversations", summary="Begin a conversation")
async def create_conversation(
    owner: Owner, service: Service, body: NewConversation | None = None
) -> Response:
    """It takes no session before its first response."""
    wanted = body or NewConversation()
    if wanted.model is not None:
        check_model(wanted.model, service.sessions.runtime)
    conversation = await service.new_conversation(owner, wanted.items or (), wanted.metadata or {})
    return AsciiJsonResponse(_shown(conversation))


@conversations.get("/v1/conversations", summary="List your conversations, newest first")
async def list_conversations(owner: Owner, service: Service, wanted: Annotated[Paging, Query()]) -> Response:
    """An extension: the original has no such list."""
    shown = [_shown(conversation) for conversation in service.store.conversations(owner)]
    return AsciiJsonResponse(page(shown, after=wanted.after, limit=wanted.limit, order="asc"))


@conversations.get("/v1/conversations/{conversation_id}", summary="Look up a conversation")
async def retrieve_conversation(conversation_id: str, owner: Owner, service: Service) -> Response:
    return AsciiJsonResponse(_shown(service.conversation(owner, conversation_id)))


@conversations.post("/v1/conversations/{conversation_id}", summary="Change a conversation's metadata")
async def update_conversation(
    conversation_id: str, body: ConversationChange, owner: Owner, service: Service
) -> Response:
    conversation = service.conversation(owner, conversation_id)
    await service.change_metadata(conversation, body.metadata or {})
    return AsciiJsonResponse(_shown(conversation))


@conversations.delete(
    "/v1/conversations/{conversation_id}", summary="Forget a conversation and free its sessions"
)
async def delete_conversation(conversation_id: str, owner: Owner, service: Service) -> Response:
    """The responses made in it are forgotten too, unless another conversation was forked from them."""
    await service.delete_conversation(service.conversation(owner, conversation_id))
    return AsciiJsonResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@conversations.get("/v1/conversations/{conversation_id}/items", summary="List what was said")
async def list_conversation_items(
    conversation_id: str, owner: Owner, service: Service, wanted: Items
) -> Response:
    items = service.conversation(owner, conversation_id).all_items()
    return AsciiJsonResponse(page(items, after=wanted.after, limit=wanted.limit, order=wanted.order))


@conversations.post("/v1/conversations/{conversation_id}/fork", summary="Branch a conversation")
async def fork_conversation(
    conversation_id: str, owner: Owner, service: Service, body: ConversationFork | None = None
) -> Response:
    """An extension. The new conversation goes on from the same history, at its end or after an earlier
    response; it takes no session before its first response."""
    wanted = body or ConversationFork()
    conversation = service.conversation(owner, conversation_id)
    forked = await service.fork(conversation, wanted.response_id, wanted.metadata)
    return AsciiJsonResponse(_shown(forked))


def _shown(conversation: Conversation) -> dict[str, Any]:
    """A conversation; what follows its metadata are extensions of ours."""
    head, session = conversation.head, conversation.session
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created_at,
        "metadata": conversation.metadata,
        "title": conversation.title,
        "message_count": conversation.item_count,
        "session_id": None if session is None else session.session_id,
        "last_response_id": None if head is None else head.id,
        "is_answering": conversation.is_busy,
    }
