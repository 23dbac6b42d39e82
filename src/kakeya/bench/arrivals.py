"""Chats that arrive when a schedule says, whatever the server does, and what came of each: an open loop.

A plain socket reads the streams: client and server share the machine, and httpx would use four times the CPU
a token.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kakeya.bench.stats import known, percentile
from kakeya.bench.text import Messages
from kakeya.bench.ways import Message
from kakeya.errors import KakeyaError, RemoteError

if TYPE_CHECKING:
    from kakeya.client import AsyncClient

PATH = "/v1/chat/completions"
UNFINISHED = "not finished in time"
# What a server may use of one core while the other one is timed.
QUIET_LIMIT = 0.05
# How long a server that was left with work may take to be quiet again, and how long each look at it takes.
SETTLE_S, LOOK_S = 60.0, 0.5


@dataclass(frozen=True)
class Arrival:
    """A chat: when it is due, what it says, how long its answer may be, and more fields of the request."""

    at_s: float
    messages: Sequence[Message]
    max_tokens: int
    fields: Mapping[str, Any] = field(default_factory=dict)

    def request(self, address: str, model: str) -> bytes:
        """As it goes over the wire."""
        wanted = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        asked = {"model": model, "messages": self.messages, "max_tokens": self.max_tokens}
        body = json.dumps({**asked, **wanted, **self.fields}).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


class Texts:
    """Passages of the prose, so many tokens long. No two begin alike, so no server has one in its cache."""

    def __init__(
        self, encode: Callable[[str], Sequence[int]], decode: Callable[[Sequence[int]], str], seed: int
    ) -> None:
        self._encode, self._decode, self._seed = encode, decode, seed
        self._passages: dict[int, Messages] = {}
        self._count = 0

    def next_text(self, tokens: int) -> str:
        if tokens not in self._passages:
            self._passages[tokens] = Messages(self._encode, tokens, self._seed)
        passages = self._passages[tokens]
        self._count += 1
        return self._decode(passages.encoded(f"{self._count}. {passages.next_text()}"))


@dataclass(frozen=True)
class Mix:
    """How long messages and answers are, in tokens, each length equally often; what all chats begin with."""

    prompts: Sequence[int]
    answers: Sequence[int]
    system: str | None = None


def schedule(mix: Mix, rate: float, seconds: float, texts: Texts, seed: int) -> list[Arrival]:
    """Poisson arrivals, given their number, which is what the rate says: so the load offered is exact."""
    dice = random.Random(f"{seed}/{rate:g}")
    system = [] if mix.system is None else [{"role": "system", "content": mix.system}]
    times = sorted(dice.uniform(0, seconds) for _ in range(max(1, round(rate * seconds))))
    return [
        Arrival(
            at,
            [*system, {"role": "user", "content": texts.next_text(dice.choice(mix.prompts))}],
            dice.choice(mix.answers),
        )
        for at in times
    ]


@dataclass
class Outcome:
    """What came of a chat. Seconds count from when it was due; `ended_s` also when it was given up.

    Tokens are as the server counts them; of an answer without end they are its pieces. Accepted and rejected
    are those of drafts, where a server tells of them.
    """

    pieces_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failure: str | None = UNFINISHED
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    text: str = ""
    finish_reason: str | None = None

    @property
    def first_token_s(self) -> float | None:
        """Also of an answer without text; of one given up, how long it was waited for; None for an error."""
        if self.pieces_s:
            return self.pieces_s[0]
        return self.ended_s if self.failure in (None, UNFINISHED) else None

    @property
    def gaps_s(self) -> list[float]:
        """Between pieces of text: who sends several tokens at a time has longer ones."""
        return [later - earlier for earlier, later in pairwise(self.pieces_s)]


@dataclass(frozen=True)
class Bounds:
    """When an answer is good: its first token by then, and 95 % of its gaps no longer than this."""

    first_token_s: float
    gap_s: float

    def hold(self, outcome: Outcome) -> bool:
        first, gap = outcome.first_token_s, percentile(outcome.gaps_s, 95)
        in_time = first is not None and first <= self.first_token_s and (gap or 0.0) <= self.gap_s
        return in_time and outcome.failure is None


@dataclass(frozen=True)
class Step:
    """One side at one rate for `seconds`. Percentiles of gaps are over those of all chats together.

    `idle_share` is what the other server used of one core meanwhile.
    """

    side: str
    system: str
    rate: float
    seconds: float
    wall_s: float
    idle_share: float | None
    sent: int
    finished: int
    good: int
    failures: dict[str, int]
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    first_token_p50_s: float | None
    first_token_p95_s: float | None
    gap_p50_s: float | None
    gap_p95_s: float | None

    @property
    def goodput(self) -> float:
        """Good chats a second, of those that the rate says."""
        return self.rate * self.good_share

    @property
    def good_share(self) -> float:
        return self.good / self.sent

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def tokens_each(self) -> float:
        return self.tokens / self.sent

    @property
    def cached_share(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def errors(self) -> int:
        """Chats that failed otherwise than by taking too long."""
        return sum(count for failure, count in self.failures.items() if failure != UNFINISHED)


def measured(outcomes: Sequence[Outcome], bounds: Bounds) -> dict[str, Any]:
    """What came of all chats together, as fields of a Step."""
    firsts = known(outcome.first_token_s for outcome in outcomes)
    gaps = [gap for outcome in outcomes for gap in outcome.gaps_s]
    totals = ("tokens", "prompt_tokens", "cached_tokens")
    return {
        "sent": len(outcomes),
        "finished": sum(outcome.failure is None for outcome in outcomes),
        "good": sum(map(bounds.hold, outcomes)),
        "failures": dict(Counter(outcome.failure for outcome in outcomes if outcome.failure is not None)),
        **{name: sum(getattr(outcome, name) for outcome in outcomes) for name in totals},
        **{f"first_token_p{rank}_s": percentile(firsts, rank) for rank in (50, 95)},
        **{f"gap_p{rank}_s": percentile(gaps, rank) for rank in (50, 95)},
    }


async def play(address: str, model: str, arrivals: Sequence[Arrival], until_s: float) -> list[Outcome]:
    """Send each chat when it is due. What has not ended `until_s` after the start is given up."""
    requests = {id(each): each.request(address, model) for each in arrivals}

    async def answered(arrival: Arrival, outcome: Outcome, due: float) -> None:
        await _answered(address, requests[id(arrival)], outcome, due)

    return await _each(arrivals, until_s, answered)


async def play_sessions(
    client: "AsyncClient", at_once: int, arrivals: Sequence[Arrival], until_s: float
) -> list[Outcome]:
    """The same over gRPC: each chat on a session of its own, with the words of the SDK.

    A server refuses sessions that it has no room for. So who comes when there are `at_once` waits here.
    """
    places = asyncio.Semaphore(at_once)

    async def answered(arrival: Arrival, outcome: Outcome, due: float) -> None:
        async with places:
            try:
                await _talked(client, arrival, outcome, due)
            except KakeyaError as error:
                raise RemoteError(f"the call failed: {error}") from error

    return await _each(arrivals, until_s, answered)


@dataclass(frozen=True)
class Side:
    """A server: where it is, what it calls its model, and its processes. With a `client` chats go over gRPC,
    `at_once` of them."""

    name: str
    address: str
    model: str
    pids: tuple[int, ...]
    client: "AsyncClient | None" = None
    at_once: int = 1

    async def play(self, arrivals: Sequence[Arrival], until_s: float) -> list[Outcome]:
        """What came of these chats."""
        if self.client is None:
            return await play(self.address, self.model, arrivals, until_s)
        return await play_sessions(self.client, self.at_once, arrivals, until_s)

    def cpu_s(self) -> float:
        """What it has computed so far; 0 once a process is gone."""
        import psutil

        try:
            times = [psutil.Process(pid).cpu_times() for pid in self.pids]
        except psutil.NoSuchProcess:
            return 0.0
        return float(sum(each.user + each.system for each in times))

    async def settle(self) -> None:
        """Wait until it does nothing, but not for ever."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            before = self.cpu_s()
            await asyncio.sleep(LOOK_S)
            if self.cpu_s() - before <= QUIET_LIMIT * LOOK_S:
                return


async def _each(
    arrivals: Sequence[Arrival],
    until_s: float,
    answered: Callable[[Arrival, Outcome, float], Awaitable[None]],
) -> list[Outcome]:
    """Have each answered when it is due, and note how that ended."""
    began = time.perf_counter()

    async def one(arrival: Arrival) -> Outcome:
        outcome, due = Outcome(), began + arrival.at_s
        try:
            await asyncio.sleep(due - time.perf_counter())
            async with asyncio.timeout(began + until_s - time.perf_counter()):
                await answered(arrival, outcome, due)
            outcome.failure = None
        except TimeoutError:
            pass  # which is what the failure says already
        except RemoteError as error:
            outcome.failure = str(error)
        outcome.ended_s = time.perf_counter() - due
        return outcome

    return await asyncio.gather(*map(one, arrivals))


async def _talked(client: "AsyncClient", arrival: Arrival, outcome: Outcome, due: float) -> None:
    """Ask on a new session and read to the end. It is closed whatever happens."""
    system = next((each["content"] for each in arrival.messages if each["role"] == "system"), None)
    async with await client.create_session(system=system) as session:
        said = arrival.messages[-1]["content"]
        stream = session.chat(said, max_tokens=arrival.max_tokens, temperature=0)
        async for piece in stream:
            outcome.pieces_s.append(time.perf_counter() - due)
            outcome.tokens += 1
            outcome.text += piece
        assert stream.result is not None, "it was read to its end"
        outcome.tokens = stream.result.generated_token_count
        outcome.cached_tokens = stream.result.cached_token_count
        outcome.prompt_tokens = (await session.info()).history_length - outcome.tokens


async def _answered(address: str, request: bytes, outcome: Outcome, due: float) -> None:
    """Ask and read to the end. Raises RemoteError unless it is a whole stream."""
    host, port = address.rsplit(":", 1)
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request)
            await _read(reader, outcome, due)
        finally:
            writer.close()
    except TimeoutError:
        raise  # an OSError too, but ours
    except (OSError, EOFError, ValueError, LookupError) as error:
        raise RemoteError(f"the stream broke off: {type(error).__name__}") from error


async def _read(reader: asyncio.StreamReader, outcome: Outcome, due: float) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    chunked, status = "transfer-encoding: chunked" in head, int(head.split(" ", 2)[1])
    if status != 200:
        said = b"".join([part async for part in _parts(reader, chunked=chunked)])
        raise RemoteError(f"answered {status}: {said[:200].decode('utf-8', 'replace')}")
    usage: Mapping[str, Any] | None = None
    async for event in _events(reader, chunked=chunked):
        if "error" in event:
            raise RemoteError(f"the stream failed: {event['error'].get('message')}")
        for choice in event["choices"]:
            outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
            if said := choice["delta"].get("content"):
                outcome.pieces_s.append(time.perf_counter() - due)
                outcome.tokens += 1
                outcome.text += said
        usage = event.get("usage") or usage
    if usage is None:
        raise RemoteError("the stream ended without its usage")
    outcome.tokens, outcome.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
    outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    drafts = usage.get("completion_tokens_details") or {}
    outcome.accepted_tokens = drafts.get("accepted_prediction_tokens") or 0
    outcome.rejected_tokens = drafts.get("rejected_prediction_tokens") or 0


async def _events(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncIterator[dict[str, Any]]:
    """The server-sent events of a body that are JSON, put together across its parts."""
    pending = b""
    async for part in _parts(reader, chunked=chunked):
        *lines, pending = (pending + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


async def _parts(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncIterator[bytes]:
    """The body as it comes, with or without HTTP's chunks around it."""
    if not chunked:
        while part := await reader.read(2**16):
            yield part
        return
    while size := int(await reader.readline(), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
