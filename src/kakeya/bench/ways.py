"""Ways to hold a conversation: each says something to one server and tells what the turn took.

A way raises Refused when its conversation cannot go on, and another KakeyaError when something broke; then
the conversation is as it was.
"""

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from kakeya.bench.talk import GRPC, Turn
from kakeya.bench.text import Messages
from kakeya.client import AsyncClient, AsyncSession
from kakeya.errors import KakeyaError, RemoteError, SessionNotFound

# A turn that hangs is an error in the end.
TIMEOUT_S = 600.0
_TOO_MANY_REQUESTS = 429

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


class GrpcWay:
    """A session over gRPC: only the new message is sent, as tokens; answers have a fixed length."""

    name = GRPC

    def __init__(self, client: AsyncClient, messages: Messages, max_tokens: int) -> None:
        self._client, self._messages, self._max_tokens = client, messages, max_tokens
        self._session: AsyncSession | None = None
        self.sessions_opened = 0

    async def say(self, text: str) -> Turn:
        try:
            return await self._say(text)
        except SessionNotFound:
            self._session = None
            raise

    async def _say(self, text: str) -> Turn:
        session = await self._opened()
        watch, count = Stopwatch(), 0
        said = self._messages.encoded(text)
        await session.append(said)
        async for _ in session.generate(self._max_tokens, timeout=TIMEOUT_S):
            watch.first()
            count += 1
        latency = watch.now_s
        info = await session.info()
        prompt = info.history_length - count
        return Turn(
            latency_s=latency,
            ttft_s=watch.first_s,
            prompt_tokens=prompt,
            answer_tokens=count,
            cached_tokens=prompt - len(said),
            dropped_tokens=info.dropped_token_count,
            kv_live_bytes=info.kv_live_bytes,
        )

    async def _opened(self) -> AsyncSession:
        """The session; a new one at the beginning, and when the server has lost it."""
        if self._session is None:
            self._session = await self._client.create_session(label="bench conversation", ignore_eos=True)
            self.sessions_opened += 1
        return self._session

    async def forget(self) -> None:
        session, self._session, self.sessions_opened = self._session, None, 0
        try:
            if session is not None:
                await session.close()
        except KakeyaError:
            pass  # the turns have told what there is to tell about this server


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
                    raise refusal(path, answer.status_code, (await answer.aread()).decode("utf-8", "replace"))
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        yield json.loads(line.removeprefix("data: "))
        except (httpx.HTTPError, ValueError) as error:
            raise RemoteError(f"POST {path} broke off: {error!r}") from error


def refusal(path: str, status: int, said: str) -> RemoteError:
    """What a status other than success means."""
    try:
        message = str(json.loads(said)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = said.strip()[:500]
    kind = Refused if 400 <= status < 500 and status != _TOO_MANY_REQUESTS else RemoteError
    return kind(f"{path} was answered {status}: {message}")


@dataclass
class ResponsesWay(HttpWay):
    """The Responses API: only the new message is sent, with the id of the response before it."""

    previous: str | None = None

    async def say(self, text: str) -> Turn:
        body = {"input": text, "max_output_tokens": self.max_tokens}
        if self.previous is not None:
            body["previous_response_id"] = self.previous
        watch, response = Stopwatch(), None
        async for event in self.post("/v1/responses", body):
            if event.get("type") == "response.output_text.delta":
                watch.first()
            response = _ended_response(event) or response
        if response is None:
            raise RemoteError("the stream of a response ended without its usage")
        self.previous = response["id"]
        return _turn(watch, response["usage"], "input", "output")

    async def forget(self) -> None:
        self.previous = None


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


class History:
    """The messages so far, for ways that send them all every time."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def with_user(self, text: str) -> list[Message]:
        return [*self.messages, {"role": "user", "content": text}]

    def keep(self, asked: list[Message], answer: str) -> None:
        self.messages = [*asked, {"role": "assistant", "content": answer}]


class ChatWay(HttpWay):
    """Chat completions: the whole history is sent with every message."""

    def __init__(
        self, name: str, client: httpx.AsyncClient, address: str, model: str, max_tokens: int
    ) -> None:
        super().__init__(name, client, address, model, max_tokens)
        self._history = History()

    async def say(self, text: str) -> Turn:
        asked = self._history.with_user(text)
        usage_wanted = {"stream_options": {"include_usage": True}}
        body = {"messages": asked, "max_tokens": self.max_tokens, **usage_wanted}
        watch, usage, pieces = Stopwatch(), None, []
        async for event in self.post("/v1/chat/completions", body):
            if piece := _piece(event):
                watch.first()
                pieces.append(piece)
            usage = event.get("usage") or usage
        if usage is None:
            raise RemoteError("the stream of a chat completion ended without its usage")
        turn = _turn(watch, usage, "prompt", "completion")
        self._history.keep(asked, "".join(pieces))
        return turn

    async def forget(self) -> None:
        self._history = History()


def _piece(event: Mapping[str, Any]) -> str:
    """The text in a chunk, "" for none. Raises RemoteError for a chunk that tells of an error."""
    if "error" in event:
        raise RemoteError(f"the chat completion failed: {event['error'].get('message')}")
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _turn(watch: Stopwatch, usage: Mapping[str, Any], asked: str, given: str) -> Turn:
    """`usage` in the words of its API: input and output, or prompt and completion."""
    details = usage.get(f"{asked}_tokens_details") or {}
    return Turn(
        latency_s=watch.now_s,
        ttft_s=watch.first_s,
        prompt_tokens=usage[f"{asked}_tokens"],
        answer_tokens=usage[f"{given}_tokens"],
        cached_tokens=details.get("cached_tokens"),
        dropped_tokens=usage.get("dropped_tokens"),
    )
