"""Ways to hold a conversation: each says something to one server and tells what the turn took.

A way raises Refused when its conversation cannot go on, and another KakeyaError when something broke; then
the conversation is as it was.
"""

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from kakeya.bench.talk import GRPC, Turn
from kakeya.bench.text import Messages
from kakeya.client import AsyncClient, AsyncSession
from kakeya.errors import KakeyaError, RemoteError, SessionNotFound

# A turn that hangs is an error in the end.
TIMEOUT_S = 600.0

Message = dict[str, str]


class Refused(RemoteError):
    """The server will not do this, however often it is asked: a status from 400 to 499."""


class Way(Protocol):
    """One conversation with one server."""

    name: str

    async def say(self, text: str) -> Turn:
        """Say something, read the answer to its end, and keep both in the conversation."""
        ...

    async def forget(self) -> None:
        """Begin another conversation."""
        ...


class GrpcWay:
    """A session over gRPC: only the new message is sent, as tokens; answers have a fixed length."""

    name = GRPC

    def __init__(self, client: AsyncClient, messages: Messages, max_tokens: int) -> None:
        self._client, self._messages, self._max_tokens = client, messages, max_tokens
        self._session: AsyncSession | None = None
        self.sessions_opened = 0

    async def say(self, text: str) -> Turn:
        if self._session is None:  # at the beginning, and when the server has lost it
            self._session = await self._client.create_session(label="bench conversation", ignore_eos=True)
            self.sessions_opened += 1
        try:
            return await self._say(self._session, text)
        except SessionNotFound:
            self._session = None
            raise

    async def _say(self, session: AsyncSession, text: str) -> Turn:
        began, first, count = time.perf_counter(), None, 0
        said = self._messages.encoded(text)
        await session.append(said)
        async for _ in session.generate(self._max_tokens, timeout=TIMEOUT_S):
            first = first or time.perf_counter()
            count += 1
        ended = time.perf_counter()
        info = await session.info()
        prompt = info.history_length - count
        return Turn(
            latency_s=ended - began,
            ttft_s=first and first - began,
            prompt_tokens=prompt,
            answer_tokens=count,
            cached_tokens=prompt - len(said),
            dropped_tokens=info.dropped_token_count,
            kv_live_bytes=info.kv_live_bytes,
        )

    async def forget(self) -> None:
        session, self._session, self.sessions_opened = self._session, None, 0
        if session is not None:
            with suppress(KakeyaError):  # the turns have told what there is to tell about this server
                await session.close()


@dataclass
class HttpWay:
    """What ways over HTTP share: a streamed answer, greedy, from a model at an address."""

    name: str
    client: httpx.AsyncClient
    address: str
    model: str
    max_tokens: int

    async def post(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed answer, each as it arrives."""
        asked = {"model": self.model, "temperature": 0, "stream": True, **body}
        try:
            async with self.client.stream("POST", f"http://{self.address}{path}", json=asked) as answer:
                if answer.status_code != httpx.codes.OK:
                    await answer.aread()
                    raise refusal(path, answer)
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        yield json.loads(line.removeprefix("data: "))
        except (httpx.HTTPError, ValueError) as error:
            raise RemoteError(f"POST {path} broke off: {error!r}") from error


def refusal(path: str, answer: httpx.Response) -> RemoteError:
    """What a status other than success means."""
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = answer.text.strip()[:500]
    for_ever = answer.is_client_error and answer.status_code != httpx.codes.TOO_MANY_REQUESTS
    kind = Refused if for_ever else RemoteError
    return kind(f"{path} was answered {answer.status_code}: {message}")


@dataclass
class ResponsesWay(HttpWay):
    """The Responses API: only the new message is sent, with the id of the response before it."""

    previous: str | None = None

    async def say(self, text: str) -> Turn:
        body = {"input": text, "max_output_tokens": self.max_tokens}
        if self.previous is not None:
            body["previous_response_id"] = self.previous
        began, first, response = time.perf_counter(), None, None
        async for event in self.post("/v1/responses", body):
            match event.get("type"):
                case "response.output_text.delta":
                    first = first or time.perf_counter()
                case "response.completed" | "response.incomplete":
                    response = event["response"]
                case "response.failed":
                    raise RemoteError(f"the response failed: {event['response'].get('error')}")
                case kind if kind == "error" or "error" in event:
                    raise RemoteError(f"the response failed: {event.get('message') or event.get('error')}")
        if response is None:
            raise RemoteError("the stream of a response ended without its usage")
        self.previous = response["id"]
        return _turn(began, first, response["usage"], "input", "output")

    async def forget(self) -> None:
        self.previous = None


@dataclass
class ChatWay(HttpWay):
    """Chat completions: the whole history is sent with every message."""

    history: list[Message] = field(default_factory=list)

    async def say(self, text: str) -> Turn:
        asked = [*self.history, {"role": "user", "content": text}]
        usage_wanted = {"stream_options": {"include_usage": True}}
        body = {"messages": asked, "max_tokens": self.max_tokens, **usage_wanted}
        began, first, usage, answer = time.perf_counter(), None, None, ""
        async for event in self.post("/v1/chat/completions", body):
            if "error" in event:
                raise RemoteError(f"the chat completion failed: {event['error'].get('message')}")
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    first = first or time.perf_counter()
                    answer += piece
            usage = event.get("usage") or usage
        if usage is None:
            raise RemoteError("the stream of a chat completion ended without its usage")
        turn = _turn(began, first, usage, "prompt", "completion")
        self.history = [*asked, {"role": "assistant", "content": answer}]
        return turn

    async def forget(self) -> None:
        self.history = []


def _turn(began: float, first: float | None, usage: Mapping[str, Any], asked: str, given: str) -> Turn:
    """One that ends now. `usage` is in the words of its API: input and output, or prompt and completion."""
    details = usage.get(f"{asked}_tokens_details") or {}
    return Turn(
        latency_s=time.perf_counter() - began,
        ttft_s=first and first - began,
        prompt_tokens=usage[f"{asked}_tokens"],
        answer_tokens=usage[f"{given}_tokens"],
        cached_tokens=details.get("cached_tokens"),
        dropped_tokens=usage.get("dropped_tokens"),
    )
