"""POST /v1/completions: plain text and tokens, continued or only scored."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from kakeya.errors import InvalidArgument
from kakeya.http_server.checks import check_against_model, invalid
from kakeya.http_server.completions.choice import CompletionChoice, CompletionPrompt
from kakeya.http_server.completions.chunks import CompletionWriter
from kakeya.http_server.completions.schema import CompletionRequest, check_completion
from kakeya.http_server.disconnect import EVENT_STREAM, completed
from kakeya.http_server.errors import error_body
from kakeya.http_server.merging import merged
from kakeya.http_server.security import owner_of
from kakeya.http_server.sse import sse
from kakeya.http_server.state import HttpState, state_of

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

router = APIRouter(tags=["completions"])

# Of one request; the others wait for these to end.
_AT_ONCE = 4
# Each is kept with the most probable tokens in its place until the answer is written.
_MOST_SCORED_TOKENS = 2**15


@router.post(
    "/v1/completions",
    summary="Continue a text",
    response_class=JSONResponse,
    responses={200: {"description": "The completion, or its chunks", "content": {EVENT_STREAM: {}}}},
)
async def create_completion(
    request: Request,
    body: CompletionRequest,
    owner: Annotated[str, Depends(owner_of)],
    state: Annotated[HttpState, Depends(state_of)],
) -> Response:
    begin = partial(_begin, owner=owner, request=body, state=state)
    return await completed(request, begin, stream=bool(body.stream))


class Completion:
    """A completion whose choices are being generated."""

    def __init__(self, choices: Sequence[CompletionChoice], writer: CompletionWriter) -> None:
        self._choices = choices
        self._writer = writer

    async def whole(self) -> dict[str, Any]:
        """The completion in one object, when all of it is there."""
        async with aclosing(merged([choice.deltas() for choice in self._choices])) as deltas:
            async for _ in deltas:
                pass  # choices remember what they said
        return self._writer.whole(self._choices)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The completion as server-sent events. An error is the last of them."""
        try:
            async with aclosing(merged([choice.deltas() for choice in self._choices])) as deltas:
                async for index, delta in deltas:
                    yield self._writer.delta(index, delta)
            yield self._writer.ending(self._choices)
        except Exception as error:
            yield sse(error_body(error))


async def _begin(
    stack: AsyncExitStack, owner: str, request: CompletionRequest, state: HttpState
) -> Completion:
    """Start generating. What is taken for it is released by `stack`, which the caller closes."""
    runtime = state.ready_runtime()
    check_against_model(request, runtime)
    check_completion(request)
    await stack.enter_async_context(state.admission.admit(owner))
    prompts = await state.workers.call(_read_prompts, request, runtime)
    places = asyncio.Semaphore(min(_AT_ONCE, runtime.describe().capacity))
    samplings = request.choices(
        request.choice_count, logprobs=request.logprobs is not None, top_logprobs=request.logprobs or 0
    )
    choices: list[CompletionChoice] = []
    for prompt in prompts:
        for sampling in samplings:
            choice = CompletionChoice(len(choices), prompt, request, sampling, owner, state, places)
            stack.push_async_callback(choice.release)
            choices.append(choice)
    # The first shows whether the request can be served at all, while that is not a matter of a stream.
    await choices[0].begin()
    writer = CompletionWriter(
        request.model,
        runtime.fingerprint,
        logprobs=request.logprobs is not None,
        includes_usage=request.includes_usage,
    )
    return Completion(choices, writer)


def _read_prompts(request: CompletionRequest, runtime: "Runtime") -> list[CompletionPrompt]:
    try:
        prompts = [CompletionPrompt(prompt, runtime.tokenizer) for prompt in request.prompt]
    except InvalidArgument as error:
        raise invalid("prompt", f"prompt: {error}") from error
    if not all(prompt.token_ids for prompt in prompts):
        raise invalid("prompt", "a prompt must hold at least one token")
    scored = sum(len(prompt.token_ids) for prompt in prompts)
    if request.scores_prompt and scored > _MOST_SCORED_TOKENS:
        raise invalid(
            "prompt", f"at most {_MOST_SCORED_TOKENS} tokens of prompts are scored at once, got {scored}"
        )
    return prompts
