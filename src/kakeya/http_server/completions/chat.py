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
from kakeya.http_server.completions.asked import Asked
from kakeya.http_server.completions.completion import CallDelta, Choice, Completion, Delta
from kakeya.http_server.completions.held import HeldConversations
from kakeya.http_server.completions.schema import ChatRequest
from kakeya.http_server.generation import Answer, Part, PartReader, check_least, logprob_of
from kakeya.http_server.text_sessions import TextSession, TextSessions
from kakeya.http_server.tools import answer_grammar
from kakeya.text.answer import TextToken
from kakeya.text.prompting import Message, ToolCall, written_tools, written_variables
from kakeya.text.tool_calls import ArgumentsPiece, CallBegin, TextPiece
from kakeya.text.turns import End

_LABEL = "chat completion"


class ChatChoice(Choice):
    """Reads an answer as a message. Then its session is held for the next request, if it can be continued."""

    def __init__(
        self, index: int, session: TextSession, answer: Answer, held: HeldConversations, asked: Asked
    ) -> None:
        super().__init__(index, held.sessions)
        self._asked = asked
        self._session = session
        self._answer = self.answer = answer
        self._held = held
        self._reader = PartReader(reads_calls=bool(asked.choice.names))
        self._is_in_call = False

    @property
    def finish_reason(self) -> str:
        reason = self.answer.finish_reason
        return "tool_calls" if self.calls and not self._is_in_call and reason == "stop" else reason

    @property
    def whole_calls(self) -> list[ToolCall]:
        """The calls, without one that the answer's end has cut off."""
        return self.calls[:-1] if self._is_in_call else self.calls

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
        """The message is whole: hold the session if its history is just what the client was shown, written
        as the template writes it."""
        session, asked = self._session, self._asked
        is_told = self.answer.shows_all and not self._is_in_call and asked.end is not End.MESSAGE
        if session is not None and is_told:
            self._session = None
            # As the client will send it back.
            session.record(Message("assistant", asked.begun + self.text, tuple(self.calls)), self.answer)
            await self._held.hold(session)

    def _read(self, parts: Iterable[Part]) -> Iterator[Delta]:
        for event, tokens in parts:
            self.tokens += tokens
            match event:
                case TextPiece(text):
                    self._said.append(text)
                    yield Delta(text, tokens=tokens)
                case CallBegin(index, name):
                    call = ToolCall(f"{self._asked.call_prefix}{secrets.token_hex(12)}", name, "")
                    self.calls.append(call)
                    self._is_in_call = True
                    yield Delta(call=CallDelta(index, call.id, name), tokens=tokens)
                case ArgumentsPiece(index, text):
                    call = self.calls[index]
                    self.calls[index] = replace(call, arguments=call.arguments + text)
                    yield Delta(call=CallDelta(index, arguments=text), tokens=tokens)
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
            said["tool_calls"] = [_told_part(delta.call)]
        return {"delta": said, "logprobs": _logprobs(delta.tokens) if delta.tokens else None}


def _logprobs(tokens: Sequence[TextToken]) -> dict[str, Any]:
    return {"content": [logprob_of(token) for token in tokens], "refusal": None}


def _told_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _told_part(call: CallDelta) -> dict[str, Any]:
    if call.id:
        return {"index": call.index, **_told_call(ToolCall(call.id, call.name, call.arguments))}
    return {"index": call.index, "function": {"arguments": call.arguments}}


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
        choices = await self.answer(stack, owner, request.asked())
        return ChatCompletion(request, self._sessions.runtime.fingerprint, choices)

    async def answer(self, stack: AsyncExitStack, owner: str, asked: Asked) -> list[ChatChoice]:
        """The answers, being generated. What is taken for them is released by `stack`.

        Raises ApiError or KakeyaError when it cannot be answered.
        """
        most = asked.most_tokens or self._state.config.default_max_tokens
        check_least(asked.samplings[0], most)
        await stack.enter_async_context(self._state.admission.admit(owner))
        grammar = await self._state.workers.call(
            answer_grammar, self._sessions, asked.tools, asked.choice, asked.json_format
        )
        prediction, begun = await self._encoded(asked.prediction), await self._encoded(asked.begun)
        session = await self._session(owner, asked)
        reading = replace(asked.reading, continues=begun)
        choices: list[ChatChoice] = []
        for index, sampling in enumerate(asked.samplings):
            own = session if index == 0 else await self._sessions.fork(session)
            answer = Answer(self._sessions, own, most, sampling, reading, grammar, prediction)
            choices.append(ChatChoice(index, own, answer, self.held, asked))
            stack.push_async_callback(choices[-1].release)
        for each in choices:  # not before all sessions are forked
            await each.answer.begin()
        return choices

    async def _encoded(self, text: str) -> Sequence[int]:
        encode = self._sessions.runtime.tokenizer.encode
        return await self._state.workers.call(encode, text) if text else ()

    async def _session(self, owner: str, asked: Asked) -> TextSession:
        """A session that ends as it was asked: a held one that can be continued, or a new one."""
        messages, variables = asked.messages, written_variables(asked.variables)
        if asked.end is End.ANSWER:
            while held := self.held.claim(owner, messages, written_tools(asked.tools), variables):
                if await self._extend(held, messages[len(held.messages) :]):
                    return held
        return await self._sessions.start(owner, messages, asked.tools, _LABEL, variables, asked.end)

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
