"""POST /v1/chat/completions: the stateless API on sessions.

A request whose messages go on with a conversation that is still held continues its session, so that only the
new messages are computed. Otherwise a session is made for it, and the whole conversation written into it.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from kakeya.errors import Conflict, InvariantViolation, KakeyaError, SessionNotFound
from kakeya.http_server.chat.choice import Choice
from kakeya.http_server.chat.chunks import ChatWriter
from kakeya.http_server.chat.held import HeldConversations
from kakeya.http_server.chat.schema import ChatRequest, check_chat
from kakeya.http_server.checks import blames, check_against_model
from kakeya.http_server.disconnect import EVENT_STREAM, completed
from kakeya.http_server.errors import error_body
from kakeya.http_server.merging import merged
from kakeya.http_server.prompting import Message, Tool, written_tools
from kakeya.http_server.security import owner_of
from kakeya.http_server.sse import sse
from kakeya.http_server.state import HttpState, state_of
from kakeya.http_server.threads import Thread
from kakeya.http_server.tools import specs_of

if TYPE_CHECKING:
    from kakeya.runtime import Runtime
    from kakeya.text.grammar import Grammar

router = APIRouter(tags=["chat"])

_LABEL = "chat completion"


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation",
    response_class=JSONResponse,
    responses={200: {"description": "The completion, or its chunks", "content": {EVENT_STREAM: {}}}},
)
async def create_chat_completion(
    request: Request,
    body: ChatRequest,
    owner: Annotated[str, Depends(owner_of)],
    state: Annotated[HttpState, Depends(state_of)],
) -> Response:
    state.ready_runtime()
    assert state.chat is not None, "who has a runtime has its services"
    begin = partial(state.chat.begin, owner=owner, request=body)
    return await completed(request, begin, stream=bool(body.stream))


class ChatCompletion:
    """A completion whose choices are being generated."""

    def __init__(self, choices: Sequence[Choice], writer: ChatWriter) -> None:
        self._choices = choices
        self._writer = writer

    async def whole(self) -> dict[str, Any]:
        """The completion in one object, when all of it is there."""
        async for _ in merged([choice.deltas() for choice in self._choices]):
            pass  # choices remember what they said
        return self._writer.whole(self._choices)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The completion as server-sent events. An error is the last of them."""
        try:
            for choice in self._choices:
                yield self._writer.opening(choice.index)
            async with aclosing(merged([choice.deltas() for choice in self._choices])) as deltas:
                async for index, delta in deltas:
                    yield self._writer.delta(index, delta)
            yield self._writer.ending(self._choices)
        except Exception as error:
            yield sse(error_body(error))


class ChatService:
    """Answers conversations. Used from one event loop."""

    def __init__(self, state: HttpState) -> None:
        self._state = state
        config = state.config
        self._held: HeldConversations | None = None
        if config.chat_matching and config.held_conversations:
            self._held = HeldConversations(state.threads, config.held_conversations, config.held_seconds)

    async def begin(self, stack: AsyncExitStack, owner: str, request: ChatRequest) -> ChatCompletion:
        """Start generating. What is taken for it is released by `stack`, which the caller closes.

        Raises ApiError or KakeyaError when the request cannot be answered.
        """
        runtime = self._state.ready_runtime()
        check_against_model(request, runtime)
        check_chat(request)
        await stack.enter_async_context(self._state.admission.admit(owner))
        grammar = await self._state.workers.call(self._grammar, runtime, request)
        messages = tuple(message.to_message() for message in request.messages)
        thread = await self._thread(owner, messages, _told_tools(request))
        choices = await self._choices(stack, thread, request.choice_count)
        samplings = request.choices(
            len(choices), logprobs=bool(request.logprobs), top_logprobs=request.top_logprobs or 0
        )
        for choice, sampling in zip(choices, samplings, strict=True):
            await choice.begin(request, sampling, grammar)
        writer = ChatWriter(
            request.model,
            runtime.fingerprint,
            logprobs=bool(request.logprobs),
            includes_usage=request.includes_usage,
        )
        return ChatCompletion(choices, writer)

    async def _thread(self, owner: str, messages: Sequence[Message], tools: Sequence[Tool]) -> Thread:
        """A thread that ends with the last message: one that was held and can be continued, or a new one."""
        while self._held is not None and (held := self._held.claim(owner, messages, written_tools(tools))):
            if await self._goes_on(held, messages[len(held.messages) :]):
                return held
        return await self._state.threads.start(owner, messages, tools, _LABEL)

    async def _goes_on(self, thread: Thread, new: Sequence[Message]) -> bool:
        """Whether the thread took the new messages. It is closed if it did not."""
        goes_on = False
        try:
            goes_on = await self._state.threads.extend(thread, new)
        except (SessionNotFound, Conflict, InvariantViolation):
            pass  # it expired, or somebody else used the session meanwhile
        except KakeyaError:
            # Refused, and as it was before.
            assert self._held is not None
            await self._held.hold(thread)
            goes_on = True
            raise
        finally:
            if not goes_on:
                await self._state.threads.close(thread)
        return goes_on

    async def _choices(self, stack: AsyncExitStack, thread: Thread, count: int) -> list[Choice]:
        """Choices on the thread and on forks of it. None of them has begun."""
        choices: list[Choice] = []
        for index in range(count):
            own = thread if index == 0 else await self._state.threads.fork(thread)
            choices.append(Choice(index, own, self._state, self._held))
            stack.push_async_callback(choices[-1].release)
        return choices

    def _grammar(self, runtime: "Runtime", request: ChatRequest) -> "Grammar | None":
        """What the answer is held to, if anything. Runs on a worker: compiling takes a while."""
        choice, wanted = request.choice, request.response_format
        if not choice.names and (wanted is None or wanted.type == "text"):
            return None
        compiler = self._state.threads.compiler(runtime)
        if choice.names or wanted is None:
            tools = specs_of(_told_tools(request), choice)
            with blames("tools"):
                return compiler.tool_calls(tools, required=choice.required, parallel=choice.parallel)
        if wanted.json_schema is None:
            return compiler.json_object()
        with blames("response_format"):
            return compiler.json_schema(wanted.json_schema.schema_)


def _told_tools(request: ChatRequest) -> list[Tool]:
    """The tools that the model hears of: none if it must not call any."""
    return [tool.to_tool() for tool in request.tools or ()] if request.choice.names else []
