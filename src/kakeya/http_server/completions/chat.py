"""Chat completions: the stateless API on sessions.

A request whose messages go on with a conversation that is still held continues its session, so that only the
new messages are computed. Otherwise a session is made for it, and the whole conversation written into it.
"""

import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kakeya.errors import Conflict, InvariantViolation, KakeyaError, SessionNotFound
from kakeya.http_server.checks import check_against_model
from kakeya.http_server.completions.completion import CallDelta, Choice, Completion, Delta
from kakeya.http_server.completions.held import HeldConversations
from kakeya.http_server.completions.schema import ChatRequest, check_chat
from kakeya.http_server.generation import Answer, Usage, logprob_of
from kakeya.http_server.text_sessions import TextSession, TextSessions
from kakeya.http_server.tools import answer_grammar
from kakeya.text.answer import Piece, TextToken
from kakeya.text.prompting import Message, Tool, ToolCall, written_tools
from kakeya.text.tool_calls import ArgumentsPiece, CallBegin, TextPiece, ToolCallParser, ToolEvent
from kakeya.types import SamplingParams

if TYPE_CHECKING:
    from kakeya.text.grammar import Grammar

_LABEL = "chat completion"


@dataclass(frozen=True)
class _Call:
    """A call as it grows."""

    id: str
    name: str
    arguments: list[str]


class ChatChoice(Choice):
    """Reads an answer as a message. Then its session is held for the next request, if it can be continued."""

    def __init__(
        self, index: int, session: TextSession, sessions: TextSessions, held: HeldConversations
    ) -> None:
        super().__init__(index, sessions)
        self._session = session
        self._held = held
        self._parser: ToolCallParser | None = None
        self._waiting: tuple[TextToken, ...] = ()
        self._calls: list[_Call] = []
        self._ended_calls = 0

    async def begin(self, request: ChatRequest, sampling: SamplingParams, grammar: "Grammar | None") -> None:
        """Start generating. Raises what the engine refuses."""
        assert self._session is not None, "a choice begins before it is released"
        self._parser = ToolCallParser() if request.choice.names else None
        most = request.most_tokens or self._sessions.state.config.default_max_tokens
        constraint = None if grammar is None else grammar.start()
        await self._begin(Answer(self._sessions, self._session, most, sampling, request.stop, constraint))

    @property
    def calls(self) -> list[ToolCall]:
        """The calls so far; the last may be cut short."""
        return [ToolCall(call.id, call.name, "".join(call.arguments)) for call in self._calls]

    @property
    def finish_reason(self) -> str:
        reason = self.answer.finish_reason
        return "tool_calls" if self._calls and self._calls_are_whole and reason == "stop" else reason

    @property
    def _calls_are_whole(self) -> bool:
        return self._ended_calls == len(self._calls)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What is new, as it comes. The session is handed on before the last, which says why it ended."""
        async with aclosing(aiter(self.answer)) as pieces:
            async for piece in pieces:
                for delta in self._read(piece):
                    yield delta
        for delta in self._rest():
            yield delta
        await self._hand_on()
        yield Delta(finish_reason=self.finish_reason)

    async def _hand_on(self) -> None:
        """The message is whole: hold the session if its history is just what the client was shown."""
        session = self._session
        if session is not None and self._calls_are_whole and not self.answer.stopped_by_string:
            self._session = None
            # As the client will send it back.
            session.record(Message("assistant", self.text, tuple(self.calls)), self.answer)
            await self._held.hold(session)

    def _read(self, piece: Piece) -> Iterator[Delta]:
        if self._parser is None:
            self._said.append(piece.text)
            self.tokens += piece.tokens
            yield Delta(text=piece.text, tokens=piece.tokens)
        else:
            self._waiting += piece.tokens
            yield from self._with_tokens(self._parser.feed(piece.text))

    def _rest(self) -> Iterator[Delta]:
        if self._parser is not None:
            yield from self._with_tokens(self._parser.finish())
            if self._waiting:
                yield Delta(tokens=self._take_tokens())

    def _with_tokens(self, events: list[ToolEvent]) -> Iterator[Delta]:
        """Tokens go with the first thing that is told after them."""
        for event in events:
            delta = self._remember(event)
            if delta is not None:
                yield replace(delta, tokens=self._take_tokens())

    def _take_tokens(self) -> tuple[TextToken, ...]:
        tokens, self._waiting = self._waiting, ()
        self.tokens += tokens
        return tokens

    def _remember(self, event: ToolEvent) -> Delta | None:
        match event:
            case TextPiece(text):
                self._said.append(text)
                return Delta(text=text)
            case CallBegin(index, name):
                call = _Call(f"call_{secrets.token_hex(12)}", name, [])
                self._calls.append(call)
                return Delta(call=CallDelta(index, "", call.id, name))
            case ArgumentsPiece(index, text):
                self._calls[index].arguments.append(text)
                return Delta(call=CallDelta(index, text))
            case _:
                self._ended_calls += 1
                return None


class ChatCompletion(Completion[ChatChoice]):
    """Tells messages."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _openings(self) -> Iterator[bytes]:
        said = {"role": "assistant", "content": "", "refusal": None}
        return (self._chunk(choice.index, {"delta": said, "logprobs": None}) for choice in self._choices)

    def _told(self, choice: ChatChoice) -> dict[str, Any]:
        said = choice.text if choice.text or not choice.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
        if choice.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in choice.calls
            ]
        return {"message": message, "logprobs": _logprobs(choice.tokens) if self._logprobs else None}

    def _told_delta(self, delta: Delta) -> dict[str, Any]:
        said: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.call is not None:
            said["tool_calls"] = [_told_call(delta.call)]
        return {"delta": said, "logprobs": _logprobs(delta.tokens) if delta.tokens else None}

    def _usage(self) -> Usage:
        usages = [choice.usage for choice in self._choices]
        return Usage(
            prompt_tokens=usages[0].prompt_tokens,
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=usages[0].cached_tokens,
            dropped_tokens=max(usage.dropped_tokens for usage in usages),
        )


def _logprobs(tokens: Sequence[TextToken]) -> dict[str, Any]:
    return {"content": [logprob_of(token) for token in tokens], "refusal": None}


def _told_call(call: CallDelta) -> dict[str, Any]:
    if call.id:
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": call.id, "type": "function", "function": function}
    return {"index": call.index, "function": {"arguments": call.arguments}}


class ChatService:
    """Answers conversations. Used from one event loop."""

    def __init__(self, sessions: TextSessions) -> None:
        self._sessions = sessions
        self._state = sessions.state
        config = sessions.state.config
        most = config.held_conversations if config.chat_matching else 0
        self.held = HeldConversations(sessions, most, config.held_seconds)

    async def begin(self, stack: AsyncExitStack, owner: str, request: ChatRequest) -> Completion[ChatChoice]:
        """Start generating. What is taken for it is released by `stack`, which the caller closes.

        Raises ApiError or KakeyaError when the request cannot be answered.
        """
        check_against_model(request, self._sessions.runtime)
        check_chat(request)
        await stack.enter_async_context(self._state.admission.admit(owner))
        # The model hears of no tools if it must not call any.
        tools = [tool.to_tool() for tool in request.tools or ()] if request.choice.names else []
        grammar = await self._state.workers.call(
            answer_grammar, self._sessions, tools, request.choice, request.json_format
        )
        messages = tuple(message.to_message() for message in request.messages)
        session = await self._session(owner, messages, tools)
        choices = await self._choices(stack, session, request.choice_count)
        for choice, sampling in zip(choices, request.samplings(), strict=True):
            await choice.begin(request, sampling, grammar)
        return ChatCompletion(request, self._sessions.runtime.fingerprint, choices)

    async def _session(self, owner: str, messages: Sequence[Message], tools: Sequence[Tool]) -> TextSession:
        """A session that ends with the last message: a held one that can be continued, or a new one."""
        while held := self.held.claim(owner, messages, written_tools(tools)):
            if await self._extend(held, messages[len(held.messages) :]):
                return held
        return await self._sessions.start(owner, messages, tools, _LABEL)

    async def _extend(self, session: TextSession, new: Sequence[Message]) -> bool:
        """Whether the session took the new messages. It is closed if it did not."""
        is_extended = False
        try:
            is_extended = await self._sessions.extend(session, new)
        except (SessionNotFound, Conflict, InvariantViolation):
            pass  # it expired, or somebody else used the session meanwhile
        except KakeyaError:
            # Refused, and as it was before.
            await self.held.hold(session)
            is_extended = True
            raise
        finally:
            if not is_extended:
                await self._sessions.close(session)
        return is_extended

    async def _choices(self, stack: AsyncExitStack, session: TextSession, count: int) -> list[ChatChoice]:
        """Choices on the session and on forks of it. None of them has begun."""
        choices: list[ChatChoice] = []
        for index in range(count):
            own = session if index == 0 else await self._sessions.fork(session)
            choices.append(ChatChoice(index, own, self._sessions, self.held))
            stack.push_async_callback(choices[-1].release)
        return choices
