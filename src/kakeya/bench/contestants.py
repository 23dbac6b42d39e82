"""Who takes part in `bench turns`: each holds one conversation its own way and says what a turn took."""

import time
from collections.abc import Mapping
from typing import Any, Protocol

from kakeya.bench.contestants_http import events
from kakeya.bench.turns_results import Answered
from kakeya.errors import RemoteError

Message = dict[str, str]


class Contestant(Protocol):
    """One conversation with one server. Used by one thread at a time."""

    name: str

    def say(self, text: str) -> Answered:
        """Say something, read the answer to its end, and keep both in the conversation.

        Blocks. Raises Refused when the conversation cannot go on, and RemoteError or PeerFailed when
        something broke; then the conversation is as it was.
        """
        ...

    def forget(self) -> None:
        """Begin another conversation."""
        ...


class Stopwatch:
    """From when it was made to the first piece of text, and to now."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.first_s: float | None = None

    def first(self) -> None:
        """A piece has come; only the first one counts."""
        if self.first_s is None:
            self.first_s = self.now_s

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._began


class ResponsesContestant:
    """The Responses API: only the new message is sent, with the id of the response before it."""

    def __init__(self, name: str, address: str, model: str, max_tokens: int) -> None:
        self.name = name
        self._address, self._model, self._max_tokens = address, model, max_tokens
        self._previous: str | None = None

    def say(self, text: str) -> Answered:
        body: dict[str, Any] = {
            "model": self._model,
            "input": text,
            "max_output_tokens": self._max_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self._previous is not None:
            body["previous_response_id"] = self._previous
        watch, response = Stopwatch(), None
        for event in events(self._address, "/v1/responses", body):
            if event.get("type") == "response.output_text.delta":
                watch.first()
            response = _ended_response(event) or response
        if response is None:
            raise RemoteError("the stream of a response ended without its usage")
        self._previous = response["id"]
        return _answered(watch, response["usage"], "input", "output")

    def forget(self) -> None:
        self._previous = None


def _ended_response(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """The response of the event that ends it well, cut short included. Raises RemoteError when it failed."""
    kind = event.get("type")
    if kind in ("response.completed", "response.incomplete"):
        return dict(event["response"])
    if kind == "response.failed":
        raise RemoteError(f"the response failed: {event['response'].get('error')}")
    if kind == "error" or "error" in event:
        raise RemoteError(f"the response failed: {event.get('message') or event.get('error')}")
    return None


class ChatContestant:
    """Chat completions: the whole history is sent with every message."""

    def __init__(self, name: str, address: str, model: str, max_tokens: int) -> None:
        self.name = name
        self._address, self._model, self._max_tokens = address, model, max_tokens
        self._messages: list[Message] = []

    def say(self, text: str) -> Answered:
        asked = [*self._messages, {"role": "user", "content": text}]
        body = {
            "model": self._model,
            "messages": asked,
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        watch, usage, pieces = Stopwatch(), None, []
        for event in events(self._address, "/v1/chat/completions", body):
            if piece := _piece(event):
                watch.first()
                pieces.append(piece)
            usage = event.get("usage") or usage
        if usage is None:
            raise RemoteError("the stream of a chat completion ended without its usage")
        answered = _answered(watch, usage, "prompt", "completion")
        self._messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
        return answered

    def forget(self) -> None:
        self._messages = []


def _piece(event: Mapping[str, Any]) -> str:
    """The text in a chunk, "" for none. Raises RemoteError for a chunk that tells of an error."""
    if "error" in event:
        raise RemoteError(f"the chat completion failed: {event['error'].get('message')}")
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _answered(watch: Stopwatch, usage: Mapping[str, Any], asked: str, given: str) -> Answered:
    """`usage` in the words of its API: input and output, or prompt and completion."""
    details = usage.get(f"{asked}_tokens_details") or {}
    return Answered(
        latency_s=watch.now_s,
        ttft_s=watch.first_s,
        prompt_tokens=usage[f"{asked}_tokens"],
        answer_tokens=usage[f"{given}_tokens"],
        cached_tokens=details.get("cached_tokens"),
        dropped_tokens=usage.get("dropped_tokens"),
    )
