"""POST /v1/chat/completions and POST /v1/completions."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from kakeya.http_server.completions.schema import ChatRequest, CompletionRequest
from kakeya.http_server.security import owner_of
from kakeya.http_server.state import HttpState, state_of
from kakeya.http_server.streaming import EVENT_STREAM, respond

router = APIRouter(default_response_class=JSONResponse)

Owner = Annotated[str, Depends(owner_of)]
State = Annotated[HttpState, Depends(state_of)]

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
    begin = partial(state.require_ready().completions.begin, owner=owner, request=body)
    return await respond(request, begin, stream=bool(body.stream))
