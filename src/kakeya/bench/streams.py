"""N streams at once through each way in: the engine itself, gRPC by the SDK, and HTTP as raw SSE.

Every way gets the same prompts and must give the same number of tokens; less is an error, not a speed.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kakeya.bench.overhead_results import REQUEST, TURN, Timing
from kakeya.bench.prose import stretch
from kakeya.client import AsyncClient, AsyncSession
from kakeya.errors import ConfigError, RemoteError
from kakeya.types import Event, StopReason, TokenEvent

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

# Candidates for prompts begin this many tokens apart.
SEARCH_STEP = 29


@dataclass(frozen=True)
class Job:
    """A prompt for each stream, and how many tokens each must give."""

    prompts: Sequence[Sequence[int]]
    tokens: int

    def timing(self, counts: Sequence[int], seconds: float) -> Timing:
        """Raises RemoteError when a stream gave fewer tokens than asked for: the work was not the same."""
        if set(counts) != {self.tokens}:
            raise RemoteError(f"streams gave {sorted(set(counts))} tokens instead of {self.tokens}")
        return Timing(sum(counts), seconds)


def through_engine(runtime: "Runtime", job: Job, work: str) -> Timing:
    """The runtime in this process, read by one thread."""
    sessions: list[str] = []
    began = time.perf_counter()
    try:
        for prompt in job.prompts:
            sessions.append(runtime.create_session(client_label="bench", eos_token_ids=[]))
            runtime.append(sessions[-1], prompt)
        if work == TURN:
            _read([iter(runtime.generate(session, 1)) for session in sessions])
            began = time.perf_counter()
        counts = _read([iter(runtime.generate(session, job.tokens)) for session in sessions])
        return job.timing(counts, time.perf_counter() - began)
    finally:
        for session in sessions:
            runtime.close_session(session)


def _read(streams: Sequence[Iterator[Event]]) -> list[int]:
    """Take from all streams in turn until all have ended; how many tokens each gave."""
    counts = [0] * len(streams)
    live = set(range(len(streams)))
    while live:
        for place in sorted(live):
            event = next(streams[place], None)
            counts[place] += isinstance(event, TokenEvent)
            if event is None:
                live.discard(place)
    return counts


async def through_grpc(client: AsyncClient, job: Job, work: str) -> Timing:
    """The SDK: one client, a session for each stream."""
    sessions: list[AsyncSession] = []
    try:
        if work == TURN:
            sessions += await asyncio.gather(*(_opened(client, prompt) for prompt in job.prompts))
            await asyncio.gather(*(_counted(session, 1) for session in sessions))
        began = time.perf_counter()
        if work == REQUEST:
            sessions += await asyncio.gather(*(_opened(client, prompt) for prompt in job.prompts))
        counts = await asyncio.gather(*(_counted(session, job.tokens) for session in sessions))
        return job.timing(counts, time.perf_counter() - began)
    finally:
        await asyncio.gather(*(session.close() for session in sessions))


async def _opened(client: AsyncClient, prompt: Sequence[int]) -> AsyncSession:
    session = await client.create_session(label="bench", ignore_eos=True)
    await session.append(prompt)
    return session


async def _counted(session: AsyncSession, tokens: int) -> int:
    count = 0
    async for _ in session.generate(tokens):
        count += 1
    return count


async def endless_prompts(
    client: AsyncClient, text: Sequence[int], count: int, history: int, tokens: int
) -> list[list[int]]:
    """Prompts after which the model goes on for `tokens` tokens by itself: no front end can be told to.

    They begin at different places of the text. Raises ConfigError when there are not enough of them.
    """
    found: list[list[int]] = []
    for start in range(0, len(text), SEARCH_STEP * count):
        candidates = [stretch(text, start + SEARCH_STEP * place, history) for place in range(count)]
        lengths = await asyncio.gather(*(_natural_length(client, each, tokens) for each in candidates))
        pairs = zip(candidates, lengths, strict=True)
        found += [prompt for prompt, length in pairs if length == tokens]
        if len(found) >= count:
            return found[:count]
    raise ConfigError(f"the model ends too early: {len(found)} prompts go on for {tokens} tokens")


async def _natural_length(client: AsyncClient, prompt: Sequence[int], tokens: int) -> int:
    async with await client.create_session(label="bench") as session:
        await session.append(prompt)
        generated = [token.id async for token in session.generate(tokens)]
    ended = session.last_result is not None and session.last_result.stop_reason is StopReason.EOS
    return len(generated) - ended


async def through_http(address: str, job: Job, model: str) -> Timing:
    """Streamed completions, each on a connection of its own that is open before the clock starts."""
    connections = [await _Connection.open(address) for _ in job.prompts]
    try:
        began = time.perf_counter()
        pairs = zip(connections, job.prompts, strict=True)
        counts = await asyncio.gather(
            *(connection.complete(model, prompt, job.tokens) for connection, prompt in pairs)
        )
        return job.timing(counts, time.perf_counter() - began)
    finally:
        for connection in connections:
            connection.close()


class _Connection:
    """Just enough HTTP/1.1 to post one completion and read its events."""

    def __init__(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._address = address
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: str) -> "_Connection":
        host, port = address.rsplit(":", 1)
        try:
            return cls(address, *await asyncio.open_connection(host, int(port)))
        except OSError as error:
            raise RemoteError(f"no HTTP connection to {address}: {error}") from error

    def close(self) -> None:
        self._writer.close()

    async def complete(self, model: str, prompt: Sequence[int], tokens: int) -> int:
        """Ask and read to the end; how many tokens came. Raises RemoteError unless it is a whole stream."""
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            self._send(json.dumps(body).encode())
            await self._expect_success()
            return await self._count()
        except (OSError, EOFError, ValueError) as error:
            raise RemoteError(f"the HTTP stream broke off: {error}") from error

    async def _count(self) -> int:
        """The completion's tokens by its usage, which comes last."""
        count = None
        async for event in self._events():
            if event != "[DONE]":
                count = _tokens_so_far(json.loads(event), count)
            elif count is not None:
                return count
        raise RemoteError("the HTTP stream ended without its usage")

    def _send(self, body: bytes) -> None:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._address}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._writer.write(head.encode() + body)

    async def _expect_success(self) -> None:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = head.split(" ", 2)[1]
        if status != "200" or "transfer-encoding: chunked" not in head:
            said = (await self._reader.read(500)).decode("utf-8", "replace")
            raise RemoteError(f"POST /v1/completions was answered {status}: {said}")

    async def _events(self) -> AsyncIterator[str]:
        """The data of each server-sent event, until the server has no more."""
        pending = b""
        while size := int((await self._reader.readline()).strip() or b"0", 16):
            pending += await self._reader.readexactly(size)
            await self._reader.readexactly(2)
            *whole, pending = pending.split(b"\n\n")
            for event in whole:
                yield event.removeprefix(b"data: ").decode()


def _tokens_so_far(chunk: dict[str, Any], count: int | None) -> int | None:
    if "error" in chunk:
        raise RemoteError(f"the HTTP stream failed: {chunk['error'].get('message')}")
    usage = chunk.get("usage")
    return count if usage is None else int(usage["completion_tokens"])
