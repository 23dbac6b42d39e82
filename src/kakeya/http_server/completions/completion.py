"""A completion of either kind: its choices, and how it goes over the wire, in one object or in chunks."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kakeya.http_server.errors import error_body
from kakeya.http_server.generation import Answer, Usage
from kakeya.http_server.schema import CompletionFields
from kakeya.http_server.streaming import STREAM_END, merged, sse
from kakeya.http_server.text_sessions import TextSession, TextSessions
from kakeya.text.answer import TextToken


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


class Choice(ABC):
    """Reads one answer, and remembers what was said. The session is the choice's own.

    `release` must be called on every path: it ends what still runs and closes the session, unless that was
    handed on.
    """

    def __init__(self, index: int, sessions: TextSessions) -> None:
        self.index = index
        self.tokens: list[TextToken] = []
        self._sessions = sessions
        self._session: TextSession | None = None
        self._answer: Answer | None = None
        self._said: list[str] = []

    @property
    def text(self) -> str:
        """What was said so far, besides calls."""
        return "".join(self._said)

    @property
    def answer(self) -> Answer:
        assert self._answer is not None, "the choice has not begun"
        return self._answer

    @property
    @abstractmethod
    def finish_reason(self) -> str:
        """Why it ended. Known once it has."""

    @property
    def usage(self) -> Usage:
        return self.answer.usage

    @abstractmethod
    def deltas(self) -> AsyncGenerator[Delta, None]:
        """What is new, as it comes; the last says why it ended."""

    async def release(self) -> None:
        """End what runs and close what is open. Does nothing the second time."""
        if self._answer is not None:
            await self._answer.aclose()
        session, self._session = self._session, None
        if session is not None:
            await self._sessions.close(session)

    async def _begin(self, answer: Answer) -> None:
        self._answer = answer
        await answer.begin()


C = TypeVar("C", bound=Choice)


class Completion(ABC, Generic[C]):
    """A completion whose choices are being generated. Log-probabilities are told if they were asked for."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, request: CompletionFields, fingerprint: str, choices: Sequence[C]) -> None:
        self._choices = choices
        self._logprobs = request.wants_logprobs
        self._includes_usage = request.includes_usage
        self._head = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": fingerprint,
        }

    async def whole(self) -> dict[str, Any]:
        """The completion in one object, when all of it is there."""
        async with aclosing(merged([choice.deltas() for choice in self._choices])) as deltas:
            async for _ in deltas:
                pass  # choices remember what they said
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [
                {"index": choice.index, **self._told(choice), "finish_reason": choice.finish_reason}
                for choice in self._choices
            ],
            "usage": self._usage().to_chat(),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The completion as server-sent events. An error is the last of them."""
        try:
            for opening in self._openings():
                yield opening
            async with aclosing(merged([choice.deltas() for choice in self._choices])) as deltas:
                async for index, delta in deltas:
                    yield self._chunk(index, self._told_delta(delta), delta.finish_reason)
            usage = self._event([], self._usage().to_chat()) if self._includes_usage else b""
            yield usage + STREAM_END
        except Exception as error:
            yield sse(error_body(error))

    def _chunk(self, index: int, told: dict[str, Any], finish_reason: str | None = None) -> bytes:
        return self._event([{"index": index, **told, "finish_reason": finish_reason}])

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        return sse({**chunk, "usage": usage} if self._includes_usage else chunk)

    def _openings(self) -> Iterator[bytes]:
        """The chunks that come before anything is said."""
        return iter(())

    @abstractmethod
    def _told(self, choice: C) -> dict[str, Any]:
        """A whole choice, as it is told."""

    @abstractmethod
    def _told_delta(self, delta: Delta) -> dict[str, Any]:
        """What is new of a choice, as it is told."""

    @abstractmethod
    def _usage(self) -> Usage:
        """Of all choices together; each prompt counts once."""
