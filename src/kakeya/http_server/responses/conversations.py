"""Conversations: named places that move on with every response that is made in them."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from kakeya.http_server.errors import AsciiJsonResponse
from kakeya.http_server.responses.body import shown_conversation
from kakeya.http_server.responses.items import page
from kakeya.http_server.responses.routes import Items, Owner, Paging, Service
from kakeya.http_server.responses.schema import ConversationChange, ConversationFork, NewConversation

router = APIRouter(tags=["conversations"], default_response_class=AsciiJsonResponse)


@router.post("/v1/conversations", summary="Begin a conversation")
async def create_conversation(
    owner: Owner, service: Service, body: NewConversation | None = None
) -> Response:
    """It takes no session before its first response."""
    wanted = body or NewConversation()
    conversation = service.new_conversation(owner, wanted.items or (), wanted.metadata or {})
    return AsciiJsonResponse(shown_conversation(conversation))


@router.get("/v1/conversations", summary="List your conversations, newest first")
async def list_conversations(owner: Owner, service: Service, wanted: Annotated[Paging, Query()]) -> Response:
    """An extension: the original has no such list."""
    shown = [shown_conversation(conversation) for conversation in service.conversations(owner)]
    return AsciiJsonResponse(page(shown, after=wanted.after, limit=wanted.limit, order="asc"))


@router.get("/v1/conversations/{conversation_id}", summary="Look up a conversation")
async def retrieve_conversation(conversation_id: str, owner: Owner, service: Service) -> Response:
    return AsciiJsonResponse(shown_conversation(service.conversation(owner, conversation_id)))


@router.post("/v1/conversations/{conversation_id}", summary="Change a conversation's metadata")
async def update_conversation(
    conversation_id: str, body: ConversationChange, owner: Owner, service: Service
) -> Response:
    conversation = service.conversation(owner, conversation_id)
    conversation.metadata = body.metadata or {}
    return AsciiJsonResponse(shown_conversation(conversation))


@router.delete("/v1/conversations/{conversation_id}", summary="Forget a conversation and free its sessions")
async def delete_conversation(conversation_id: str, owner: Owner, service: Service) -> Response:
    """The responses made in it are forgotten too, unless another conversation was forked from them."""
    await service.delete_conversation(service.conversation(owner, conversation_id))
    return AsciiJsonResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.get("/v1/conversations/{conversation_id}/items", summary="List what was said")
async def list_conversation_items(
    conversation_id: str, owner: Owner, service: Service, wanted: Items
) -> Response:
    items = service.conversation(owner, conversation_id).all_items()
    return AsciiJsonResponse(page(items, after=wanted.after, limit=wanted.limit, order=wanted.order))


@router.post("/v1/conversations/{conversation_id}/fork", summary="Branch a conversation")
async def fork_conversation(
    conversation_id: str, owner: Owner, service: Service, body: ConversationFork | None = None
) -> Response:
    """An extension. The new conversation goes on from the same history, at its end or after an earlier
    response; it takes no session before its first response."""
    wanted = body or ConversationFork()
    forked = service.fork(service.conversation(owner, conversation_id), wanted.response_id, wanted.metadata)
    return AsciiJsonResponse(shown_conversation(forked))
