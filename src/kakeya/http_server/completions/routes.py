"""POST /v1/chat/completions and POST /v1/completions."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kakeya.http_server.completions.schema import ChatRequest, CompletionRequest
from kakeya.http_server.completions.text import begin_completion
from kakeya.http_server.security import Owner
from kakeya.http_server.state import State
from kakeya.http_server.streaming import EVENT_STREAM, respond

router = APIRouter(default_response_class=JSONResponse)

_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The completion, or its chunks", "content": {EVENT_STREAM: {}}}
}


@router.post("/v1/chat/completions", tags=["chat"], summary="Answer a conversation", responses=_ANSWERS)
async def create_chat_completion(request: Request, body: ChatRequest, owner: Owner, state: State) -> Response:
    begin = partial(state.require_ready().chat.begin, owner=owner, request=body)
    return await respond(request, begin, stream=bool(body.stream))


@router.post("/v1/completions", tags=["completions"], summary="Continue a text", responses=_ANSWERS)
async def create_completion(
    request: Request, body: CompletionRequest, owner: Owner, state: State
) -> Response:
    begin = partial(begin_completion, state.require_ready().sessions, owner=owner, request=body)
    return await respond(request, begin, stream=bool(body.stream))
