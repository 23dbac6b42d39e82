"""One choice of a chat completion: what it says, and what becomes of its thread afterwards."""

import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kakeya.http_server.chat.schema import ChatRequest
from kakeya.http_server.generation import Answer, Piece, TextToken
from kakeya.http_server.prompting import Message, ToolCall
from kakeya.http_server.threads import Thread
from kakeya.text.tool_calls import ArgumentsPiece, CallBegin, TextPiece, ToolCallParser, ToolEvent
from kakeya.types import SamplingParams

if TYPE_CHECKING:
    from kakeya.http_server.chat.held import HeldConversations
    from kakeya.http_server.state import HttpState
    from kakeya.text.grammar import Grammar


@dataclass(frozen=True)
class CallDelta:
    """More of a tool call. The first has the id and the name, the others only arguments."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Delta:
    """What is new of a choice: text or part of a call, the tokens behind it, or that it has ended."""

    text: str = ""
    call: CallDelta | None = None
    tokens: tuple[TextToken, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True)
class _Call:
    """A call as it grows."""

    id: str
    name: str
    arguments: list[str]


class Choice:
    """Reads an answer as a message. The thread is the choice's own until the message is whole.

    Then it is held for the next request, where it can be continued, or closed. `release` must be called on
    every path: it ends what still runs and closes a thread that was not settled.
    """

    def __init__(
        self, index: int, thread: Thread, state: "HttpState", held: "HeldConversations | None"
    ) -> None:
        self.index = index
        self._thread: Thread | None = thread
        self._state = state
        self._held = held
        self._answer: Answer | None = None
        self._parser: ToolCallParser | None = None
        self._waiting: tuple[TextToken, ...] = ()
        self._said: list[str] = []
        self._calls: list[_Call] = []
        self._ended_calls = 0
        self.tokens: list[TextToken] = []

    async def begin(self, request: ChatRequest, sampling: SamplingParams, grammar: "Grammar | None") -> None:
        """Start generating. Raises what the engine refuses."""
        assert self._thread is not None
        most = request.most_tokens or self._state.config.default_max_tokens
        constraint = None if grammar is None else grammar.start()
        self._parser = ToolCallParser() if request.choice.names else None
        self._answer = Answer(self._state, self._thread, most, sampling, request.stop, constraint)
        await self._answer.begin()

    @property
    def answer(self) -> Answer:
        assert self._answer is not None, "the choice has not begun"
        return self._answer

    @property
    def content(self) -> str:
        """What was said so far, besides calls."""
        return "".join(self._said)

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

    @property
    def message(self) -> Message:
        """What was said, as the client will send it back."""
        return Message("assistant", self.content, tuple(self.calls))

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What is new, as it comes. The thread is settled before the last, which says why it ended."""
        async with aclosing(aiter(self.answer)) as pieces:
            async for piece in pieces:
                for delta in self._read(piece):
                    yield delta
        for delta in self._rest():
            yield delta
        await self._settle()
        yield Delta(finish_reason=self.finish_reason)

    async def release(self) -> None:
        """End what runs and close what is open. Does nothing the second time."""
        if self._answer is not None:
            await self._answer.aclose()
        thread, self._thread = self._thread, None
        if thread is not None:
            await self._state.threads.close(thread)

    async def _settle(self) -> None:
        """The message is whole: keep the thread if its history is just what the client was shown."""
        thread, is_shown = self._thread, self._calls_are_whole and not self.answer.stopped_by_string
        if self._held is None or thread is None or not is_shown:
            return
        self._thread = None
        thread.record(self.message, self.answer)
        await self._held.hold(thread)

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
                yield Delta(tokens=self._taken())

    def _with_tokens(self, events: list[ToolEvent]) -> Iterator[Delta]:
        """Tokens go with the first thing that is told after them."""
        for event in events:
            delta = self._told(event)
            if delta is not None:
                yield replace(delta, tokens=self._taken())

    def _taken(self) -> tuple[TextToken, ...]:
        tokens, self._waiting = self._waiting, ()
        self.tokens += tokens
        return tokens

    def _told(self, event: ToolEvent) -> Delta | None:
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
