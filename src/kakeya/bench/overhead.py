"""`kakeya bench overhead`: the same streams on the engine directly, by gRPC and by HTTP, in turns."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from kakeya.bench.direct import DirectEngine
from kakeya.bench.machine import Bystanders, machine_facts, public_name
from kakeya.bench.overhead_results import (
    ENGINE,
    GRPC,
    HTTP,
    KEPT_LIMIT,
    REQUEST,
    TURN,
    Timing,
    Timings,
    overhead_gates,
    overhead_rows,
)
from kakeya.bench.processes import share_of
from kakeya.bench.prose import prose
from kakeya.bench.report import Report, now
from kakeya.bench.server_process import ServerProcess, server_process
from kakeya.bench.streams import Job, endless_prompts, through_grpc, through_http
from kakeya.client import AsyncClient, ServerInfo
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError, RemoteError

Progress = Callable[[float, str], None]
Checkpoint = Callable[[Report], object]
Sides = dict[tuple[str, str], Callable[[], Awaitable[Timing]]]


@dataclass(frozen=True)
class OverheadBench:
    """How many streams of how many tokens, after how much history. Raises ConfigError."""

    model: str
    config: EngineConfig
    streams: int = 16
    tokens: int = 96
    history: int = 64
    repeats: int = 21
    limit: float = KEPT_LIMIT

    def __post_init__(self) -> None:
        for name in ("streams", "tokens", "history", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


def run(bench: OverheadBench, progress: Progress, checkpoint: Checkpoint) -> Report:
    """Measure every side once for each repetition, and return the finished report.

    Where HTTP does not answer it is reported as absent, with the reason. `checkpoint` gets a partial report
    after each repetition. Raises ConfigError when the server cannot start, PeerFailed when the engine's
    own process breaks, and what the client raises when gRPC does.
    """
    return asyncio.run(_run(bench, progress, checkpoint))


async def _run(bench: OverheadBench, progress: Progress, checkpoint: Checkpoint) -> Report:
    progress(0.0, "starting")
    # Sessions of one repetition may still be closing when the next one opens its own.
    config = replace(bench.config, capacity=2 * bench.streams)
    async with (
        server_process(bench.model, config, http=True) as (server, info),
        AsyncClient(server.address) as client,
    ):
        text = (await client.tokenizer).encode(prose())
        prompts = await endless_prompts(client, text, bench.streams, bench.history, bench.tokens)
        job = Job(prompts, bench.tokens)
        with DirectEngine(bench.model, config, job) as engine:
            sides = _sides(engine, client, server, job, info.model_id)
            absent = await _warm_up(sides)
            report = Report("overhead", _settings(replace(bench, config=config), info), machine_facts())
            bystanders = Bystanders([os.getpid(), server.pid, engine.pid])
            async for timings in _in_turns(sides, bench.repeats, progress):
                report = replace(report, results=_results(timings, absent, bystanders))
                checkpoint(report)
        return replace(report, gates=overhead_gates(report.results, bench.limit), finished_at=now())


def _sides(
    engine: DirectEngine, client: AsyncClient, server: ServerProcess, job: Job, model_id: str
) -> Sides:
    """Who does what. A thread waits for the engine's process, so that nothing here is busy meanwhile."""
    assert server.http_address is not None
    return {
        (ENGINE, TURN): partial(asyncio.to_thread, engine.measure, TURN),
        (GRPC, TURN): partial(through_grpc, client, job, TURN),
        (ENGINE, REQUEST): partial(asyncio.to_thread, engine.measure, REQUEST),
        (GRPC, REQUEST): partial(through_grpc, client, job, REQUEST),
        (HTTP, REQUEST): partial(through_http, server.http_address, job, model_id),
    }


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


async def _in_turns(sides: Sides, repeats: int, progress: Progress) -> AsyncIterator[Timings]:
    """All timings so far, after each repetition; every repetition begins with another side."""
    timings: dict[tuple[str, str], list[Timing]] = {key: [] for key in sides}
    order = list(sides)
    for repetition in range(repeats):
        for place, key in enumerate(order):
            progress((repetition + place / len(order)) / repeats, " ".join(key))
            timings[key].append(await sides[key]())
        order.append(order.pop(0))
        yield timings


def _results(timings: Timings, absent: dict[str, str], bystanders: Bystanders) -> dict[str, Any]:
    return {
        "front_ends": overhead_rows(timings),
        "absent": absent,
        "bystanders_share": share_of(bystanders),
    }


def _settings(bench: OverheadBench, info: ServerInfo) -> dict[str, Any]:
    settings = asdict(replace(bench, model=public_name(bench.model)))
    server = {**asdict(info), "model_id": public_name(info.model_id)}
    return {**settings, "sampling": "greedy", "server": server}
