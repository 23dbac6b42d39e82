"""A completion of either kind: its choices, and how it goes over the wire, in one object or in chunks."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

from kakeya.http_server.completions.schema import CompletionFields
from kakeya.http_server.errors import error_event
from kakeya.http_server.generation import Answer, Usage
from kakeya.http_server.streaming import STREAM_END, merged, sse
from kakeya.http_server.text_sessions import TextSession, TextSessions
from kakeya.text.answer import TextToken
from kakeya.text.prompting import ToolCall


@dataclass(frozen=True)
class CallDelta:
    """What is new of the `index`th call: its head, which has the id and the name, or arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


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

    def __init__(self, index: int, sessions: TextSessions, prompt_tokens: int = 0) -> None:
        self.index = index
        self.tokens: list[TextToken] = []
        self.calls: list[ToolCall] = []
        self._said: list[str] = []
        self._sessions = sessions
        self._prompt_tokens = prompt_tokens
        self._session: TextSession | None = None
        self._answer: Answer | None = None

    @property
    def text(self) -> str:
        """What was said so far, besides calls."""
        return "".join(self._said)

    @property
    def finish_reason(self) -> str:
        """Why it ended. Known once it has."""
        return "length" if self._answer is None else self._answer.finish_reason

    @property
    def usage(self) -> Usage:
        """What it took. Known once it has ended."""
        return Usage(self._prompt_tokens) if self._answer is None else self._answer.usage

    @property
    def token_counts(self) -> dict[str, int]:
        """What was read and said so far."""
        prompt, said = (self._prompt_tokens, 0) if self._answer is None else self._answer.token_counts
        return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}

    @abstractmethod
    def deltas(self) -> AsyncGenerator[Delta, None]:
        """What is new, as it comes; the last says why it ended."""

    async def release(self) -> None:
        """End what runs and close what is open. Does nothing the second time."""
        if self._answer is not None:
            await self._answer.aclose()
        session, self._session = self._session, None
        if session is not None:
            await self._close(session)

    async def _close(self, session: TextSession) -> None:
        await self._sessions.close(session)


class Completion(ABC):
    """A completion whose choices are being generated. Log-probabilities are told if they were asked for."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    opening: ClassVar[dict[str, Any] | None] = None
    """What the first chunk of each choice tells, before anything is said."""

    def __init__(self, request: CompletionFields, fingerprint: str, choices: Sequence[Choice]) -> None:
        self._choices = choices
        self._request = request
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
            "usage": self._usage(),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The completion as server-sent events. An error is the last of them."""
        try:
            if self.opening is not None:
                for choice in self._choices:
                    yield self._chunk(choice.index, self.opening)
            async with aclosing(merged([choice.deltas() for choice in self._choices])) as deltas:
                async for index, delta in deltas:
                    yield self._chunk(index, self._told_delta(delta), delta.finish_reason)
            usage = self._event([], self._usage()) if self._request.includes_usage else b""
            yield usage + STREAM_END
        except Exception as error:
            yield error_event(error, "")

    def _chunk(self, index: int, told: dict[str, Any], finish_reason: str | None = None) -> bytes:
        counts = self._choices[index].token_counts if self._request.counts_continuously else None
        return self._event([{"index": index, **told, "finish_reason": finish_reason}], counts)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        return sse({**chunk, "usage": usage} if self._request.includes_usage else chunk)

    def _usage(self) -> dict[str, Any]:
        """Of all choices together; each prompt counts once, with what its longest choice dropped."""
        usages = [choice.usage for choice in self._choices]
        count = self._request.choice_count
        prompts = [usages[first : first + count] for first in range(0, len(usages), count)]
        return Usage(
            prompt_tokens=sum(choices[0].prompt_tokens for choices in prompts),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(choices[0].cached_tokens for choices in prompts),
            dropped_tokens=sum(max(usage.dropped_tokens for usage in choices) for choices in prompts),
            recalled_tokens=sum(choices[0].recalled_tokens for choices in prompts),
            accepted_prediction_tokens=sum(usage.accepted_prediction_tokens for usage in usages),
            rejected_prediction_tokens=sum(usage.rejected_prediction_tokens for usage in usages),
        ).to_chat()

    @abstractmethod
    def _told(self, choice: Choice) -> dict[str, Any]:
        """A whole choice, as it is told."""

    @abstractmethod
    def _told_delta(self, delta: Delta) -> dict[str, Any]:
        """What is new of a choice, as it is told."""
