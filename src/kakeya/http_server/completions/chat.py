"""Chat completions: the stateless API on sessions.

A request whose messages continue a held conversation continues its session, and only the new messages are
computed. Any other request gets a new session, with the whole conversation written into it.
"""

import secrets
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any, ClassVar

from kakeya.errors import Conflict, InvariantViolation, KakeyaError, SessionNotFound
from kakeya.http_server.archive import Archive
from kakeya.http_server.completions.completion import Choice, Completion, Delta
from kakeya.http_server.completions.held import HeldConversations
from kakeya.http_server.completions.schema import ChatRequest
from kakeya.http_server.generation import Answer, Part, PartReader, logprob_of
from kakeya.http_server.text_sessions import TextSession, TextSessions
from kakeya.http_server.tools import answer_grammar, function_tool
from kakeya.text.answer import TextToken
from kakeya.text.prompting import Message, Tool, ToolCall, written_tools
from kakeya.text.tool_calls import ArgumentsPiece, CallBegin, TextPiece

_LABEL = "chat completion"


class ChatChoice(Choice):
    """Reads an answer as a message. Then its session is held for the next request, if it can be continued."""

    def __init__(
        self, index: int, session: TextSession, answer: Answer, held: HeldConversations, *, reads_calls: bool
    ) -> None:
        super().__init__(index, held.sessions)
        self._session = session
        self._answer = self.answer = answer
        self._held = held
        self._reader = PartReader(reads_calls=reads_calls)
        self._is_in_call = False

    @property
    def finish_reason(self) -> str:
        reason = self.answer.finish_reason
        return "tool_calls" if self.calls and not self._is_in_call and reason == "stop" else reason

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What is new, as it comes. The session is handed on before the last, which says why it ended."""
        async with aclosing(aiter(self.answer)) as pieces:
            async for piece in pieces:
                for delta in self._read(self._reader.feed(piece)):
                    yield delta
        for delta in self._read(self._reader.finish()):
            yield delta
        await self._hand_on()
        yield Delta(finish_reason=self.finish_reason)

    async def _close(self, session: TextSession) -> None:
        await self._held.close(session)

    async def _hand_on(self) -> None:
        """The message is whole: hold the session if its history is just what the client was shown."""
        session = self._session
        if session is not None and not self._is_in_call and not self.answer.stopped_by_string:
            self._session = None
            # As the client will send it back.
            session.record(Message("assistant", self.text, tuple(self.calls)), self.answer)
            await self._held.hold(session)

    def _read(self, parts: Iterable[Part]) -> Iterator[Delta]:
        for event, tokens in parts:
            self.tokens += tokens
            match event:
                case TextPiece(text):
                    self._said.append(text)
                    yield Delta(text, tokens=tokens)
                case CallBegin(index, name):
                    call = ToolCall(f"call_{secrets.token_hex(12)}", name, "")
                    self.calls.append(call)
                    self._is_in_call = True
                    yield Delta(call={"index": index, **_told_call(call)}, tokens=tokens)
                case ArgumentsPiece(index, text):
                    call = self.calls[index]
                    self.calls[index] = replace(call, arguments=call.arguments + text)
                    yield Delta(call={"index": index, "function": {"arguments": text}}, tokens=tokens)
                case _:
                    self._is_in_call = False


class ChatCompletion(Completion):
    """Tells messages."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    opening: ClassVar = {"delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None}

    def _told(self, choice: Choice) -> dict[str, Any]:
        said = choice.text if choice.text or not choice.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
        if choice.calls:
            message["tool_calls"] = [_told_call(call) for call in choice.calls]
        logprobs = _logprobs(choice.tokens) if self._request.wants_logprobs else None
        return {"message": message, "logprobs": logprobs}

    def _told_delta(self, delta: Delta) -> dict[str, Any]:
        said: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.call is not None:
            said["tool_calls"] = [delta.call]
        return {"delta": said, "logprobs": _logprobs(delta.tokens) if delta.tokens else None}


def _logprobs(tokens: Sequence[TextToken]) -> dict[str, Any]:
    return {"content": [logprob_of(token) for token in tokens], "refusal": None}


def _told_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class ChatService:
    """Answers conversations. Used from one event loop."""

    def __init__(self, sessions: TextSessions, archive: Archive | None = None) -> None:
        self._sessions = sessions
        self._state = sessions.state
        config = sessions.state.config
        most = config.held_conversations if config.chat_matching else 0
        self.held = HeldConversations(sessions, most, config.held_seconds, archive)

    async def begin(self, stack: AsyncExitStack, owner: str, request: ChatRequest) -> ChatCompletion:
        """Start generating. What is taken for it is released by `stack`, which the caller closes.

        Raises ApiError or KakeyaError when the request cannot be answered.
        """
        request.check(self._sessions.runtime)
        choice = request.choose_tools()
        await stack.enter_async_context(self._state.admission.admit(owner))
        # The model hears of no tools if it must not call any.
        tools = [function_tool(tool.function.model_dump()) for tool in request.tools or () if choice.names]
        grammar = await self._state.workers.call(
            answer_grammar, self._sessions, tools, choice, request.json_format
        )
        messages = tuple(message.to_message() for message in request.messages)
        prediction = await self._prediction(request)
        session = await self._session(owner, messages, tools)
        most = request.most_tokens or self._state.config.default_max_tokens
        choices: list[ChatChoice] = []
        for index, sampling in enumerate(request.samplings(request.choice_count)):
            own = session if index == 0 else await self._sessions.fork(session)
            answer = Answer(self._sessions, own, most, sampling, request.stop, grammar, prediction=prediction)
            choices.append(ChatChoice(index, own, answer, self.held, reads_calls=bool(choice.names)))
            stack.push_async_callback(choices[-1].release)
        for each in choices:  # not before all sessions are forked
            await each.answer.begin()
        return ChatCompletion(request, self._sessions.runtime.fingerprint, choices)

    async def _prediction(self, request: ChatRequest) -> Sequence[int]:
        """The predicted answer as tokens; none where nothing is predicted."""
        if request.prediction is None or not request.prediction.content:
            return ()
        encode = self._sessions.runtime.tokenizer.encode
        return await self._state.workers.call(encode, request.prediction.content)

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
            pass  # it expired, or somebody else used the session
        except KakeyaError:
            # Refused, and as it was before.
            await self.held.hold(session)
            is_extended = True
            raise
        finally:
            if not is_extended:
                await self.held.close(session)
        return is_extended
