"""POST /v1/messages and POST /v1/messages/count_tokens."""

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from kakeya.http_server.errors import MESSAGES, AsciiJsonResponse
from kakeya.http_server.messages.answer import MessageAnswer
from kakeya.http_server.messages.schema import CountRequest, MessagesRequest
from kakeya.http_server.schema import check_model
from kakeya.http_server.security import Owner
from kakeya.http_server.state import State
from kakeya.http_server.streaming import EVENT_STREAM, respond
from kakeya.text.prompting import written_tools

if TYPE_CHECKING:
    from kakeya.http_server.loaded import Loaded


class MessagesErrorDetails(BaseModel, title="ErrorDetails"):
    """What went wrong."""

    type: str
    message: str


class MessagesError(BaseModel, title="Error"):
    """An error, in Anthropic's shape."""

    type: str
    error: MessagesErrorDetails


router = APIRouter(
    tags=["messages"],
    responses={"default": {"description": "An error, in Anthropic's shape", "model": MessagesError}},
)

_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The message, or the events that build it up", "content": {EVENT_STREAM: {}}}
}


class TokenCount(BaseModel):
    """How long a conversation is as the model reads it."""

    input_tokens: int


@router.post(MESSAGES, summary="Answer a conversation, in Anthropic's shape", responses=_ANSWERS)
async def create_message(request: Request, body: MessagesRequest, owner: Owner, state: State) -> Response:
    loaded = state.require_ready()

    async def begin(stack: AsyncExitStack) -> MessageAnswer:
        return await _begin(loaded, stack, owner, body)

    # ASCII: what a client has sent may come back in the input of a tool.
    return await respond(request, begin, stream=bool(body.stream), response_class=AsciiJsonResponse)


@router.post(f"{MESSAGES}/count_tokens", summary="Count the tokens of a conversation")
async def count_tokens(body: CountRequest, owner: Owner, state: State) -> TokenCount:
    loaded = state.require_ready()
    check_model(body.model, loaded.runtime)
    asked = body.asked()

    def count() -> int:
        prompter = loaded.sessions.prompter
        return len(prompter.whole(asked.messages, written_tools(asked.tools), end=asked.end))

    return TokenCount(input_tokens=await state.workers.call(count))


async def _begin(loaded: "Loaded", stack: AsyncExitStack, owner: str, body: MessagesRequest) -> MessageAnswer:
    body.check(loaded.runtime)
    [choice] = await loaded.chat.answer(stack, owner, body.to_answer())
    return MessageAnswer(body.model, choice)
