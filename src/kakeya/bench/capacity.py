"""`kakeya bench capacity`: ever more agents at once, each with its own channel and session, all checked."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from kakeya.bench.agents import Agent, Work, work_of
from kakeya.bench.capacity_results import (
    ALL_LEVELS,
    RSS_LIMIT,
    Announced,
    LevelTimes,
    capacity_gates,
    capacity_summary,
    level_row,
    stopped_by,
)
from kakeya.bench.interrupts import Interruption, interruptible
from kakeya.bench.machine import Bystanders, machine_facts, public_name
from kakeya.bench.processes import raise_descriptor_limit, resident_bytes_of, share_of
from kakeya.bench.prose import prose
from kakeya.bench.report import Report, now
from kakeya.bench.server_process import ServerProcess, server_process
from kakeya.client import AsyncClient, ServerInfo
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError

SAMPLE_EVERY_S = 0.5

Progress = Callable[[float, str], None]
Checkpoint = Callable[[Report], object]


@dataclass(frozen=True)
class CapacityBench:
    """The levels of the ramp and what each agent does. `config.capacity` is the server's.

    `context_len` None fills the window. Raises ConfigError.
    """

    model: str
    config: EngineConfig
    levels: tuple[int, ...]
    context_len: int | None = None
    prompt_len: int = 16
    gen_tokens: int = 16
    seed: int = 0
    rss_limit: float = RSS_LIMIT

    def __post_init__(self) -> None:
        if not self.levels or min(self.levels) < 1 or list(self.levels) != sorted(set(self.levels)):
            raise ConfigError(f"levels must be rising numbers from 1 on, got {list(self.levels)}")
        for name, least in (("context_len", 0), ("prompt_len", 1), ("gen_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name.replace('_', '-')} must be at least {least}, got {value}")
        if self.context_len is None:
            object.__setattr__(self, "context_len", self.config.cache.capacity)

    @property
    def tokens_to_compute(self) -> int:
        """Of the whole ramp, solo runs included: what the progress bar counts."""
        assert self.context_len is not None
        each = self.context_len + self.prompt_len + self.gen_tokens
        return each * (max(self.levels) + sum(self.levels))

    def server_flags(self) -> list[str]:
        """Room for every agent's calls; the engine takes so many generates at once, others queue for them."""
        top = max(self.levels)
        flags = {
            "max-concurrent-rpcs": 4 * top + 64,
            "max-concurrent": min(top, self.config.max_waiting),
            "admission": "queue",
            "queue-depth": 2 * top,
            "queue-max-wait-s": 0,
        }
        return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


def run(bench: CapacityBench, progress: Progress, checkpoint: Checkpoint) -> Report:
    """Climb the levels until one is not clean, or until SIGINT or SIGTERM; return the finished report.

    Raises the limit of open files of this process first. `progress` is told how far the ramp is, 0 to 1;
    `checkpoint` gets a partial report after each level. Raises ConfigError when the server cannot start.
    """
    return asyncio.run(_run(bench, progress, checkpoint))


async def _run(bench: CapacityBench, progress: Progress, checkpoint: Checkpoint) -> Report:
    progress(0.0, "starting")
    descriptors = raise_descriptor_limit(8 * max(bench.levels) + 512)
    async with server_process(bench.model, bench.config, bench.server_flags()) as (server, info):
        machine = machine_facts()
        report = Report("capacity", _settings(bench, info, descriptors), machine)
        async with AsyncClient(server.address) as client:
            text = (await client.tokenizer).encode(prose())
        with interruptible() as interruption:
            ramp = _Ramp(bench, server, _announced(info, machine, server), text, interruption)
            async for findings in ramp.climb(progress):
                report = replace(report, **findings)
                checkpoint(report)
        return replace(report, **ramp.findings(), finished_at=now())


def _settings(bench: CapacityBench, info: ServerInfo, descriptors: dict[str, int]) -> dict[str, Any]:
    settings = asdict(replace(bench, model=public_name(bench.model)))
    server = {**asdict(info), "model_id": public_name(info.model_id)}
    return {
        **settings,
        "sampling": "temperature 1, a seed for each agent",
        "open_files": descriptors,
        "server": server,
        "server_flags": " ".join(bench.server_flags()),
    }


def _announced(info: ServerInfo, machine: dict[str, Any], server: ServerProcess) -> Announced:
    memory: int = machine["memory_bytes"]
    return Announced(info.capacity, info.kv_bytes_per_session, memory, resident_bytes_of(server.pid))


class _Ramp:
    """The levels that were climbed, the solo runs they were checked against, and the memory it took."""

    def __init__(
        self,
        bench: CapacityBench,
        server: ServerProcess,
        announced: Announced,
        text: Sequence[int],
        interruption: Interruption,
    ) -> None:
        self._bench = bench
        self._server = server
        self._announced = announced
        self._text = text
        self._interruption = interruption
        self._solo: list[list[int]] = []
        self._rows: list[dict[str, Any]] = []
        self._stopped = ""
        self._peak = announced.rss_when_ready
        self._computed = 0
        self._bystanders = Bystanders([os.getpid(), server.pid])

    async def climb(self, progress: Progress) -> AsyncIterator[dict[str, Any]]:
        """The findings after each level, until one is not clean or somebody asks for the end."""
        watch = asyncio.create_task(self._watch_memory())
        try:
            for level in self._bench.levels:
                row = await self._interruption.unless_asked(self._level(level, progress))
                if row is not None:
                    self._rows.append(row)
                    self._stopped = stopped_by(row) or ""
                elif not self._stopped:
                    self._stopped = f"aborted by {self._interruption.reason} at level {level}"
                yield self.findings()
                if self._stopped:
                    return
            self._stopped = ALL_LEVELS
        finally:
            watch.cancel()

    def findings(self) -> dict[str, Any]:
        """The report's results and gates as they are now."""
        summary = capacity_summary(self._rows, self._announced, self._peak, self._solo, self._stopped)
        results = {
            "summary": summary,
            "levels": list(self._rows),
            "abort_reason": self._interruption.reason,
            "bystanders_share": share_of(self._bystanders),
        }
        gates = capacity_gates(summary, self._bench.levels, self._bench.rss_limit)
        return {"results": results, "gates": gates}

    async def _level(self, level: int, progress: Progress) -> dict[str, Any] | None:
        """Run one level and tell it; None, with `_stopped` set, when a solo run of it failed."""
        if not await self._solo_up_to(level, progress):
            return None
        progress(self._done, f"{level:,} agents")
        began = time.perf_counter()
        async with self._agents(level) as agents:
            create = await self._together(agents, Agent.create)
            fill = await self._together(agents, Agent.fill, lambda work: len(work.context), progress)
            turn = await self._together(agents, Agent.turn, _new_tokens, progress)
            await self._together(agents, Agent.look)
            rss = self._sample()
            for agent, expected in zip(agents, self._solo, strict=False):
                agent.check(expected)
        times = LevelTimes(create, fill, turn, time.perf_counter() - began)
        return level_row(level, [agent.run for agent in agents], times, rss)

    async def _together(
        self,
        agents: Sequence[Agent],
        part: Callable[[Agent], Any],
        tokens: Callable[[Work], int] = lambda work: 0,
        progress: Progress | None = None,
    ) -> float:
        """The barrier: all begin a part together, and the next one when the last has ended. Its seconds."""

        async def one(agent: Agent) -> None:
            await part(agent)
            self._computed += tokens(agent.work)
            if progress is not None:
                progress(self._done, f"{len(agents):,} agents")

        began = time.perf_counter()
        await asyncio.gather(*map(one, agents))
        return time.perf_counter() - began

    async def _solo_up_to(self, level: int, progress: Progress) -> bool:
        """Have every agent's output when it is alone on the server; False when one cannot be had."""
        while len(self._solo) < level:
            number = len(self._solo)
            progress(self._done, f"agent {number + 1:,} alone")
            async with self._agents(1, first=number) as (agent,):
                for part in (agent.create, agent.fill, agent.turn):
                    await part()
            if agent.run.error_class is not None:
                reason = f"{agent.run.error_class}: {agent.run.error_str}"
                self._stopped = f"the solo run of agent {number} failed: {reason}"
                return False
            self._solo.append(agent.output)
            self._computed += agent.work.tokens
        return True

    @asynccontextmanager
    async def _agents(self, count: int, first: int = 0) -> AsyncIterator[list[Agent]]:
        """Agents that leave at the end, whatever happens."""
        numbers = range(first, first + count)
        agents = [Agent(number, self._server.address, self._work(number)) for number in numbers]
        try:
            yield agents
        finally:
            await asyncio.gather(*(agent.leave() for agent in agents))

    def _work(self, agent: int) -> Work:
        bench = self._bench
        assert bench.context_len is not None
        return work_of(
            agent,
            self._text,
            context=bench.context_len,
            prompt=bench.prompt_len,
            gen=bench.gen_tokens,
            seed=bench.seed,
        )

    @property
    def _done(self) -> float:
        return min(1.0, self._computed / self._bench.tokens_to_compute)

    def _sample(self) -> int | None:
        seen = resident_bytes_of(self._server.pid)
        self._peak = max(filter(None, (self._peak, seen)), default=None)
        return seen

    async def _watch_memory(self) -> None:
        while True:
            self._sample()
            await asyncio.sleep(SAMPLE_EVERY_S)


def _new_tokens(work: Work) -> int:
    return len(work.prompt) + work.gen_tokens
