"""`kakeya bench overhead`: the same streams on the engine directly, by gRPC and by HTTP, in turns.

Every side gets the same prompts and must give the same number of tokens; less is an error, not a speed.
Run as a program this is the engine in a process of its own, without a front end: what the others are held to.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kakeya.bench.benchmark import EngineBenchmark, Repeats, Results, Run
from kakeya.bench.processes import LineProcess, answer_lines, server_process
from kakeya.bench.report import Gate, as_json, at_least, busy, bystanders_gate, from_json
from kakeya.bench.stats import Samples, ratio
from kakeya.bench.tables import Chart, Column, Table, listing, over
from kakeya.bench.text import prose, stretch
from kakeya.client import AsyncClient, AsyncSession
from kakeya.errors import ConfigError, RemoteError
from kakeya.options import EngineOptions
from kakeya.types import Event, StopReason, TokenEvent

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

ENGINE, GRPC, HTTP = "engine", "gRPC", "HTTP"
# A turn goes on from a history that is computed already; a request begins with nothing, prompt and all.
TURN, REQUEST = "turn", "request"
# Who can do which work: completions over HTTP know no session that could hold a history.
FRONT_ENDS = ((GRPC, TURN), (GRPC, REQUEST), (HTTP, REQUEST))
# A request over gRPC opens and closes a session besides, by calls that an agent makes once in its life: its
# row is there to be seen, and is not judged.
JUDGED = ((GRPC, TURN), (HTTP, REQUEST))
# Candidates for prompts begin this many tokens apart.
SEARCH_STEP = 29
SPEED = "tokens/s"

Speeds = Mapping[tuple[str, str], Sequence[float]]
Sides = dict[tuple[str, str], Callable[[], Coroutine[Any, Any, float]]]


@dataclass(frozen=True)
class FrontEnd:
    """One front end at one kind of work, beside the engine called directly."""

    front_end: str
    work: str
    tokens_per_second: Samples
    engine_tokens_per_second: Samples

    @property
    def kept(self) -> float | None:
        return ratio(self.tokens_per_second.median, self.engine_tokens_per_second.median)


@dataclass(frozen=True)
class OverheadResults(Results):
    """Every front end, and which of them was not there, with the reason."""

    front_ends: tuple[FrontEnd, ...] = ()
    absent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Overhead(EngineBenchmark[OverheadResults]):
    """How many streams of how many tokens, after how much history."""

    kind = "overhead"
    title = "Overhead benchmark"
    help = "What gRPC and HTTP keep of the engine's speed."
    results = OverheadResults

    streams: Annotated[int, typer.Option(help="Streams at once.")] = 16
    tokens: Annotated[int, typer.Option(help="Tokens of each stream.")] = 96
    history: Annotated[int, typer.Option(help="Tokens of history before them.")] = 64
    repeats: Repeats = 21
    limit: Annotated[float, typer.Option(help="Gate: the share of the engine's speed to keep.")] = 0.95

    def __post_init__(self) -> None:
        self.require_least(streams=1, tokens=1, history=1, repeats=1)

    def run(self, run: Run[OverheadResults]) -> OverheadResults:
        """Measure every side once for each repetition. HTTP may be absent, with the reason."""
        return run.asynchronously(self._run(run))

    async def _run(self, run: Run[OverheadResults]) -> OverheadResults:
        # Sessions of one repetition may still be closing when the next one opens its own.
        capacity = 2 * self.streams
        async with server_process(self, capacity, http=True) as server:
            run.facts |= {"sampling": "greedy", "server": server.facts}
            text = (await server.client.tokenizer).encode(prose())
            prompts = await endless_prompts(server.client, text, self.streams, self.history, self.tokens)
            job = Job(prompts, self.tokens)
            with DirectEngine(self, capacity, job) as engine:
                sides: Sides = {
                    (ENGINE, TURN): partial(engine.measure, TURN),
                    (GRPC, TURN): partial(through_grpc, server.client, job, TURN),
                    (ENGINE, REQUEST): partial(engine.measure, REQUEST),
                    (GRPC, REQUEST): partial(through_grpc, server.client, job, REQUEST),
                    (HTTP, REQUEST): partial(through_http, server.http_address, job, server.info.model_id),
                }
                results = OverheadResults(absent=await _warm_up(sides))
                with run.watching([os.getpid(), server.pid, engine.pid]):
                    async for speeds in _in_turns(sides, self.repeats, run):
                        results = OverheadResults(_rows(speeds), results.absent)
                        run.checkpoint(results)
        return results

    def gates(self, results: OverheadResults) -> list[Gate]:
        """What front ends must keep of the engine's speed at their own kind of work, on a quiet machine."""
        noise = busy(results.bystanders_share)
        kept = [
            at_least(
                f"{row.front_end} over the engine, {row.work}",
                None if noise else row.kept,
                self.limit,
                absent=noise or results.absent.get(row.front_end, "not measured in this run"),
            )
            for row in results.front_ends
            if (row.front_end, row.work) in JUDGED
        ]
        return [*kept, bystanders_gate(results.bystanders_share)]

    @staticmethod
    def show(results: OverheadResults) -> list[Table | Chart]:
        rows = results.front_ends
        columns = [
            Column("front end", "front_end"),
            Column("work", "work"),
            Column(SPEED, "tokens_per_second.median"),
            Column(f"{ENGINE} {SPEED}", "engine_tokens_per_second.median"),
            Column("kept", "kept", form=".3f"),
        ]
        series = {ENGINE: "engine_tokens_per_second.median", "front end": "tokens_per_second.median"}
        labels = [f"{row.front_end}, {row.work}" for row in rows]
        title, x_title = "Speed beside the engine", "front end and work"
        absent = listing("Not measured", ("front end", "why"), list(results.absent.items()))
        return [
            Table("Streams at once, medians", columns, rows, labels=2),
            over(title, SPEED, x_title, labels, rows, series, bars=True, picture=True),
            *([absent] if results.absent else ()),
        ]


def _rows(speeds: Speeds) -> tuple[FrontEnd, ...]:
    """Those of a side that is absent have no samples."""
    samples = {key: Samples.of(values) for key, values in speeds.items()}
    return tuple(
        FrontEnd(name, work, samples.get((name, work), Samples()), samples.get((ENGINE, work), Samples()))
        for name, work in FRONT_ENDS
    )


async def _warm_up(sides: Sides) -> dict[str, str]:
    """Run every side once, uncounted. Takes out those HTTP cannot do here; returns who is absent, and why."""
    absent = {}
    for (side, work), measure in list(sides.items()):
        try:
            await measure()
        except RemoteError as error:
            if side != HTTP:
                raise
            absent[side] = str(error)
            del sides[side, work]
    return absent


async def _in_turns(sides: Sides, repeats: int, run: Run[OverheadResults]) -> AsyncIterator[Speeds]:
    """All speeds so far, after each repetition that is whole; every one begins with another side."""
    speeds: dict[tuple[str, str], list[float]] = {key: [] for key in sides}
    order = list(sides)
    for repetition in range(repeats):
        found: dict[tuple[str, str], float] = {}
        for place, key in enumerate(order):
            run.progress((repetition + place / len(order)) / repeats, " ".join(key))
            speed = await run.interruption.unless_asked(sides[key]())
            if speed is None:
                return
            found[key] = speed
        for key, speed in found.items():
            speeds[key].append(speed)
        order.append(order.pop(0))
        yield speeds


@dataclass(frozen=True)
class Job:
    """A prompt for each stream, and how many tokens each must give."""

    prompts: Sequence[Sequence[int]]
    tokens: int

    def speed(self, counts: Sequence[int], seconds: float) -> float:
        """All streams together, from the first call to the last token.

        Raises RemoteError when a stream gave fewer tokens than asked for: the work was not the same.
        """
        if set(counts) != {self.tokens}:
            raise RemoteError(f"streams gave {sorted(set(counts))} tokens instead of {self.tokens}")
        return sum(counts) / seconds


class DirectEngine(LineProcess):
    """The parent's end of the engine's process. Raises PeerFailed when it broke."""

    name = "the engine's process"

    def __init__(self, engine: EngineOptions, capacity: int, job: Job) -> None:
        super().__init__(("-m", "kakeya.bench.overhead"), own_session=True)
        settings = {each.name: getattr(engine, each.name) for each in fields(EngineOptions)}
        self.open({"engine": as_json(settings), "capacity": capacity, "job": asdict(job)})

    async def measure(self, work: str) -> float:
        """One repetition. A thread waits for it, so that nothing here is busy meanwhile."""
        return float(await asyncio.to_thread(self.ask, work))


def main() -> None:
    """The engine's process: the first request opens it, each further one is measured once."""
    from kakeya.runtime import Runtime

    with ExitStack() as stack:
        measure: Callable[[str], float] | None = None

        def answer(request: Any) -> Any:
            nonlocal measure
            if measure is not None:
                return measure(request)
            options = from_json(EngineOptions, request["engine"])
            config = options.engine_config(capacity=request["capacity"])
            runtime = stack.enter_context(Runtime.open(options.model, config))
            measure = partial(through_engine, runtime, Job(**request["job"]))
            return "ready"

        answer_lines(answer)


def through_engine(runtime: "Runtime", job: Job, work: str) -> float:
    """The runtime in this process, read by one thread."""
    sessions: list[str] = []
    began = time.perf_counter()
    try:
        for prompt in job.prompts:
            sessions.append(runtime.create_session(client_label="bench", eos_token_ids=[]))
            runtime.append(sessions[-1], prompt)
        if work == TURN:
            _read([runtime.generate(session, 1) for session in sessions])
            began = time.perf_counter()
        counts = _read([runtime.generate(session, job.tokens) for session in sessions])
        return job.speed(counts, time.perf_counter() - began)
    finally:
        for session in sessions:
            runtime.close_session(session)


def _read(streams: Sequence[Iterable[Event]]) -> list[int]:
    """Take from all streams in turn until all have ended; how many tokens each gave."""
    by_stream = zip(*zip_longest(*streams), strict=True)
    return [sum(isinstance(event, TokenEvent) for event in events) for events in by_stream]


async def through_grpc(client: AsyncClient, job: Job, work: str) -> float:
    """The SDK: one client, a session for each stream."""
    sessions: list[AsyncSession] = []
    began = time.perf_counter()
    try:
        sessions += await asyncio.gather(*(_opened(client, prompt) for prompt in job.prompts))
        if work == TURN:
            await asyncio.gather(*(_counted(session, 1) for session in sessions))
            began = time.perf_counter()
        counts = await asyncio.gather(*(_counted(session, job.tokens) for session in sessions))
        return job.speed(counts, time.perf_counter() - began)
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
        count = await _counted(session, tokens)
    ended = session.last_result is not None and session.last_result.stop_reason is StopReason.EOS
    return count - ended


async def through_http(address: str, job: Job, model: str) -> float:
    """Streamed completions, each on a connection of its own that is open before the clock starts.

    A plain socket reads them. The client shares the machine, and httpx would use four times the CPU a token:
    230 microseconds instead of 55, a good part of what is measured.
    """
    host, port = address.rsplit(":", 1)
    try:
        connections = [await asyncio.open_connection(host, int(port)) for _ in job.prompts]
    except OSError as error:
        raise RemoteError(f"no HTTP connection to {address}: {error}") from error
    try:
        began = time.perf_counter()
        pairs = zip(connections, job.prompts, strict=True)
        counts = await asyncio.gather(
            *(_completed(*pair, _request(address, model, prompt, job.tokens)) for pair, prompt in pairs)
        )
        return job.speed(counts, time.perf_counter() - began)
    finally:
        for _, writer in connections:
            writer.close()


def _request(address: str, model: str, prompt: Sequence[int], tokens: int) -> bytes:
    usage = {"include_usage": True}
    settings = {"max_tokens": tokens, "temperature": 0, "stream": True, "stream_options": usage}
    body = json.dumps({"model": model, "prompt": list(prompt), **settings}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def _completed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> int:
    """Ask and read to the end; how many tokens came. Raises RemoteError unless it is a whole stream."""
    count = None
    try:
        writer.write(request)
        status = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split(" ", 2)[1]
        if status != "200":
            said = (await reader.read(500)).decode("utf-8", "replace")
            raise RemoteError(f"POST /v1/completions was answered {status}: {said}")
        async for event in _events(reader):
            if event == b"[DONE]" and count is not None:
                return int(count)
            chunk = {} if event == b"[DONE]" else json.loads(event)
            if "error" in chunk:
                raise RemoteError(f"the HTTP stream failed: {chunk['error'].get('message')}")
            count = (chunk.get("usage") or {}).get("completion_tokens", count)
    except (OSError, EOFError, ValueError) as error:
        raise RemoteError(f"the HTTP stream broke off: {error}") from error
    raise RemoteError("the HTTP stream ended without its usage")


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event, put together across chunks."""
    pending = b""
    while size := int((await reader.readline()).strip() or b"0", 16):
        pending += await reader.readexactly(size)
        await reader.readexactly(2)
        *whole, pending = pending.split(b"\n\n")
        for event in whole:
            yield event.removeprefix(b"data: ")


if __name__ == "__main__":
    main()
