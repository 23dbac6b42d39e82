"""`kakeya bench capacity`: ever more agents at once, each with its own channel and session, all checked.

An agent is an ordinary user of the SDK. Its output must be, token for token, that of its solo run.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from kakeya.bench.benchmark import EngineBenchmark, Results, Run, numbers
from kakeya.bench.machine import memory_bytes
from kakeya.bench.processes import (
    ServerProcess,
    raise_descriptor_limit,
    resident_bytes,
    server_facts,
    server_process,
)
from kakeya.bench.report import Gate, at_least, at_most
from kakeya.bench.stats import known, percentile, ratio
from kakeya.bench.tables import MIB, MS, Chart, Column, Table, figure, figures, listing, over
from kakeya.bench.text import prose, stretch
from kakeya.client import AsyncClient, AsyncSession, ServerInfo
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError, KakeyaError
from kakeya.options import NumericMode, flags
from kakeya.types import Numerics

# Solo outputs that are all alike could not tell one agent's output from another's.
DISTINCT_NEEDED = 0.5
ALL_LEVELS = "all levels were run"
SAMPLE_EVERY_S = 0.5
# Waiting is part of what is measured: a limit only keeps a server that hangs from hanging us.
CALL_TIMEOUT_S = 600.0
GENERATE_TIMEOUT_S = 7200.0

_ramp = partial(typer.Option, rich_help_panel="The ramp")


class Preset(StrEnum):
    """How far to go: 256 agents with windows as they are, or 2,048 with small ones."""

    LIGHT = "light"
    STRESS = "stress"


# What a preset says where the command line says nothing.
PRESETS: dict[Preset, dict[str, Any]] = {
    Preset.LIGHT: {"levels": "1,16,64,256"},
    Preset.STRESS: {"levels": "256,512,1024,2048", "window": 64, "prompt_len": 8, "gen_tokens": 8},
}


@dataclass(frozen=True)
class Level:
    """So many agents at once, in numbers. Walls are from the first agent's start to the last one's end."""

    level: int
    created_ok: int
    generate_ok: int
    wrong_outputs: int
    errors: dict[str, int]
    first_errors: list[dict[str, Any]]
    """One example of each class of error."""
    create_p50_s: float | None
    create_p95_s: float | None
    generate_p50_s: float | None
    generate_p95_s: float | None
    tokens_per_s: float | None
    per_session_kv_bytes: int | None
    server_rss_bytes: int | None
    create_wall_s: float
    fill_wall_s: float
    turn_wall_s: float
    wall_s: float

    def is_clean(self) -> bool:
        """Whether every agent got a session and the right output."""
        return self.generate_ok == self.level and not self.wrong_outputs and not self.errors

    def error_counts(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(self.errors.items()))

    def stop(self) -> str:
        """Why the ramp should not go on after this level; nothing when it should."""
        if self.is_clean():
            return ""
        reasons = [f"{self.wrong_outputs} wrong outputs"] if self.wrong_outputs else []
        reasons += [f"errors: {self.error_counts()}"] if self.errors else []
        return f"level {self.level}: {'; '.join(reasons) or 'agents without an output'}"


@dataclass(frozen=True)
class Summary:
    """The ramp in numbers, beside what the server announced and the machine has."""

    max_concurrent_agents_clean: int
    outputs_checked: int
    wrong_outputs: int
    errors: int
    distinct_solo_outputs: int
    solo_outputs: int
    per_session_kv_bytes: int | None
    announced_kv_bytes_per_session: int
    node_kv_upper_bound: int
    node_kv_share_of_memory: float | None
    server_rss_when_ready: int | None
    server_peak_rss: int | None
    stopped_by: str
    levels_run: int = 0

    @property
    def peak_over_ready(self) -> float | None:
        return ratio(self.server_peak_rss, self.server_rss_when_ready)


@dataclass(frozen=True)
class CapacityResults(Results):
    """The levels that were run."""

    summary: Summary
    levels: list[Level]


@dataclass(frozen=True)
class Capacity(EngineBenchmark[CapacityResults]):
    """The levels of the ramp and what each agent does. Without `context_len` its window is filled."""

    kind = "capacity"
    title = "Capacity benchmark"
    help = "How many agents at once, every output checked against its solo run."
    results = CapacityResults

    numerics: NumericMode = Numerics.EXACT
    preset: Annotated[Preset, _ramp(help="light: to 256 agents; stress: to 2,048, small windows.")] = (
        Preset.LIGHT
    )
    levels: Annotated[str, _ramp(help="Numbers of agents, rising, with commas.")] = PRESETS[Preset.LIGHT][
        "levels"
    ]
    context_len: Annotated[
        int | None, _ramp(help="Tokens each holds first; what fills the window when left out.")
    ] = None
    prompt_len: Annotated[int, _ramp(help="Tokens each then says.")] = 16
    gen_tokens: Annotated[int, _ramp(help="Tokens each is answered.")] = 16
    capacity: Annotated[
        int | None, _ramp(help="The server's; as many as the highest level when left out.")
    ] = None
    seed: Annotated[int, _ramp(help="Which texts and answers.")] = 0
    rss_limit: Annotated[
        float, typer.Option(help="Gate: the server's peak memory over when it was ready.")
    ] = 1.10

    def __post_init__(self) -> None:
        levels = self.ramp()
        if not levels or min(levels) < 1 or list(levels) != sorted(set(levels)):
            raise ConfigError(f"levels must be rising numbers from 1 on, got {list(levels)}")
        for name, least in (("context_len", 0), ("prompt_len", 1), ("gen_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name.replace('_', '-')} must be at least {least}, got {value}")

    def presets(self) -> dict[str, Any]:
        return PRESETS[self.preset]

    def check(self, *, picture: bool) -> None:
        self.engine_config(capacity=self.sessions())

    def ramp(self) -> tuple[int, ...]:
        return numbers("levels", self.levels)

    def sessions(self) -> int:
        """The server's capacity."""
        return max(self.ramp()) if self.capacity is None else self.capacity

    def context_tokens(self) -> int:
        return self.sink + self.window if self.context_len is None else self.context_len

    def server_flags(self) -> list[str]:
        """Room for every agent's calls; the engine takes so many generates at once, others queue for them."""
        top = max(self.ramp())
        return flags(
            {
                "max-concurrent-rpcs": 4 * top + 64,
                "max-concurrent": min(top, EngineConfig.max_waiting),
                "admission": "queue",
                "queue-depth": 2 * top,
                "queue-max-wait-s": 0,
            }
        )

    def run(self, run: Run[CapacityResults]) -> CapacityResults:
        """Climb the levels until one is not clean, or until a signal. Raises the limit of open files."""
        return run.asynchronously(self._run(run))

    async def _run(self, run: Run[CapacityResults]) -> CapacityResults:
        descriptors = raise_descriptor_limit(8 * max(self.ramp()) + 512)
        async with server_process(self, self.sessions(), self.server_flags()) as (server, info):
            run.facts |= {
                "sampling": "temperature 1, a seed for each agent",
                "open_files": descriptors,
                "server": server_facts(info),
                "server_flags": " ".join(self.server_flags()),
            }
            async with AsyncClient(server.address) as client:
                text = (await client.tokenizer).encode(prose())
            ramp = _Ramp(self, run, server, info, text)
            with run.watching([os.getpid(), server.pid]):
                await ramp.climb()
            return ramp.results()

    def gates(self, results: CapacityResults) -> list[Gate]:
        """All levels clean, every output right, and memory as announced."""
        total, nobody = results.summary, "no agent got an output"
        kept = ratio(total.per_session_kv_bytes, total.announced_kv_bytes_per_session)
        errors = float(total.errors) if total.levels_run else None
        clean, peak = float(total.max_concurrent_agents_clean), total.peak_over_ready
        unseen = "the server's memory was not seen"
        return [
            at_least("agents at once, all clean", clean, max(self.ramp()), absent=nobody),
            at_most("errors", errors, 0, absent="no level was run"),
            _wrong_gate(total),
            at_most("KV bytes of a session over the announced ones", kept, 1.0, absent=nobody),
            at_most("server memory, peak over when it was ready", peak, self.rss_limit, absent=unseen),
        ]

    @staticmethod
    def show(results: CapacityResults) -> list[Table | Chart]:
        shown: list[Table | Chart] = [
            Table("Agents at once", LEVEL_COLUMNS, results.levels),
            *_charts(results.levels),
            listing("Summary", ("what", "value"), _summary_rows(results), labels=1),
        ]
        errors = [(each.level, *_example(error)) for each in results.levels for error in each.first_errors]
        if errors:
            headings = ("agents", "class", "part", "message")
            shown.append(listing("An example of each error", headings, errors))
        return shown


def _wrong_gate(total: Summary) -> Gate:
    """Judged only when outputs differ enough from agent to agent for a mix-up to be seen."""
    name, wrong = "wrong outputs", float(total.wrong_outputs)
    distinct, solo = total.distinct_solo_outputs, total.solo_outputs
    if not total.outputs_checked:
        return at_most(name, None, 0, absent="no output was checked")
    if not wrong and solo > 1 and distinct < DISTINCT_NEEDED * solo:
        alike = f"only {distinct} of {solo} solo outputs are distinct, so a mix-up could not be seen"
        return at_most(name, None, 0, absent=alike)
    return at_most(name, wrong, 0, absent="")


LEVEL_COLUMNS = [
    Column("agents", "level"),
    Column("created", "created_ok"),
    Column("answered", "generate_ok"),
    Column("wrong", "wrong_outputs"),
    Column("errors", lambda level: level.error_counts() or "0"),
    Column(
        "create p50 / p95, ms",
        lambda level: figures(level.create_p50_s, level.create_p95_s, scale=MS, form=",.1f"),
    ),
    Column(
        "turn p50 / p95, s", lambda level: figures(level.generate_p50_s, level.generate_p95_s, form=",.2f")
    ),
    Column("tokens/s", "tokens_per_s"),
    Column("KV MiB each", "per_session_kv_bytes", MIB, ",.2f"),
    Column("RSS MiB", "server_rss_bytes", MIB),
    Column("wall, s", "wall_s", form=",.1f"),
]


def _summary_rows(results: CapacityResults) -> list[tuple[str, str]]:
    """The ramp in words, and how busy others kept the machine: its speeds are judged by nobody."""
    total = results.summary
    kept = (total.per_session_kv_bytes, total.announced_kv_bytes_per_session)
    bound, share = figure(total.node_kv_upper_bound, MIB), figure(total.node_kv_share_of_memory, form=".1%")
    rss = (total.server_rss_when_ready, total.server_peak_rss)
    return [
        ("most agents at once, all clean", figure(total.max_concurrent_agents_clean)),
        ("outputs compared with solo runs", figure(total.outputs_checked)),
        ("of these wrong", figure(total.wrong_outputs)),
        ("distinct solo outputs", f"{total.distinct_solo_outputs:,} of {total.solo_outputs:,}"),
        ("KV MiB a session, seen / announced", figures(*kept, scale=MIB, form=",.2f")),
        ("KV MiB of the node at most", f"{bound} ({share} of the memory)"),
        ("server RSS MiB, ready / peak", figures(*rss, scale=MIB)),
        ("share of the machine that others used", figure(results.bystanders_share, form=".1%")),
        ("the ramp ended", total.stopped_by or "not yet"),
    ]


def _example(error: dict[str, Any]) -> tuple[str, str, str]:
    return error["class"], error["phase"], error["message"]


def _charts(levels: Sequence[Level]) -> list[Chart]:
    labels = [f"{each.level:,}" for each in levels]

    def chart(title: str, unit: str, series: dict[str, str], scale: float = 1, **how: bool) -> Chart:
        return over(title, unit, "agents", labels, levels, series, scale, **how)

    speed, turn = {"all agents together": "tokens_per_s"}, {"p50": "generate_p50_s", "p95": "generate_p95_s"}
    opening = {"p50": "create_p50_s", "p95": "create_p95_s"}
    return [
        chart("Generated tokens a second", "tokens/s", speed, picture=True),
        chart("A turn", "s", turn),
        chart("Opening a session", "ms", opening, MS),
        chart("Memory", "MiB", {"server resident memory": "server_rss_bytes"}, MIB),
    ]


@dataclass(frozen=True)
class Work:
    """What one agent says: a context that fills its memory, then a prompt to be answered.

    Answers are sampled by the agent's own seed, so that no two agents are expected to say the same.
    """

    context: Sequence[int]
    prompt: Sequence[int]
    gen_tokens: int
    seed: int

    @property
    def turn_tokens(self) -> int:
        return len(self.prompt) + self.gen_tokens


def work_of(bench: Capacity, agent: int, text: Sequence[int]) -> Work:
    """The same for the same agent and seed, whatever the level: other places of the text for others."""
    dice = random.Random(f"{bench.seed}/{agent}")
    return Work(
        context=stretch(text, dice.randrange(len(text)), bench.context_tokens()),
        prompt=stretch(text, dice.randrange(len(text)), bench.prompt_len),
        gen_tokens=bench.gen_tokens,
        seed=dice.randrange(2**32),
    )


@dataclass
class Agent:
    """One agent's life at one level. The first error ends it: later parts are left out.

    What it did not come to is None. `correct`: its output is that of its solo run. An error names the part in
    which it happened.
    """

    number: int
    work: Work
    client: AsyncClient
    session: AsyncSession | None = None
    output: list[int] = field(default_factory=list)
    create_s: float | None = None
    generate_s: float | None = None
    correct: bool | None = None
    kv_live_bytes: int | None = None
    error_phase: str | None = None
    error_class: str | None = None
    error_str: str | None = None

    async def do(self, part: str) -> None:
        """`create` a session, `fill` it, take the `turn`, or `look` at what it holds."""
        if self.error_class is not None:
            return
        try:
            await getattr(self, f"_{part}")()
        except KakeyaError as error:
            self.error_phase, self.error_class, self.error_str = part, type(error).__name__, str(error)

    async def leave(self) -> None:
        """Close the session and the connection, whatever happened."""
        try:
            if self.session is not None:
                await self.session.close()
        except KakeyaError:
            pass  # the error is told already, or the session went with its server
        finally:
            await self.client.close()

    def check(self, expected: Sequence[int]) -> None:
        """Compare the answer, if there is one, with that of the solo run."""
        if self.generate_s is not None:
            self.correct = list(expected) == self.output

    async def _create(self) -> None:
        began = time.perf_counter()
        self.session = await self.client.create_session(label="bench capacity", ignore_eos=True)
        self.create_s = time.perf_counter() - began

    async def _fill(self) -> None:
        if self.work.context:
            await self._said(self.work.context, 1)  # appended tokens wait until a generate computes them

    async def _turn(self) -> None:
        began = time.perf_counter()
        self.output = await self._said(self.work.prompt, self.work.gen_tokens)
        self.generate_s = time.perf_counter() - began

    async def _look(self) -> None:
        assert self.session is not None
        self.kv_live_bytes = (await self.session.info()).kv_live_bytes

    async def _said(self, tokens: Sequence[int], answer: int) -> list[int]:
        assert self.session is not None
        await self.session.append(tokens)
        stream = self.session.generate(
            answer, temperature=1.0, seed=self.work.seed, timeout=GENERATE_TIMEOUT_S
        )
        return [token.id async for token in stream]


@dataclass
class _Ramp:
    """The levels that were climbed, the solo runs they were checked against, and the memory it took."""

    bench: Capacity
    run: Run[CapacityResults]
    server: ServerProcess
    info: ServerInfo
    text: Sequence[int]
    solo: list[list[int]] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    stopped: str = ""
    computed: int = 0

    def __post_init__(self) -> None:
        self.ready_rss = self.peak_rss = resident_bytes(self.server.pid)
        each = self.bench.context_tokens() + self.bench.prompt_len + self.bench.gen_tokens
        self.to_compute = each * (max(self.bench.ramp()) + sum(self.bench.ramp()))

    async def climb(self) -> None:
        """Level after level until one is not clean or somebody asks for the end."""
        watch = asyncio.create_task(self._watch_memory())
        try:
            for level in self.bench.ramp():
                row = await self.run.interruption.unless_asked(self._level(level))
                if row is not None:
                    self.levels.append(row)
                    self.stopped = row.stop()
                elif not self.stopped:
                    self.stopped = f"aborted by {self.run.interruption.reason} at level {level}"
                self.run.checkpoint(self.results())
                if self.stopped:
                    return
            self.stopped = ALL_LEVELS
        finally:
            watch.cancel()

    def results(self) -> CapacityResults:
        """As they are now."""
        rows, announced = self.levels, self.info.kv_bytes_per_session
        kept = [row.per_session_kv_bytes for row in rows if row.per_session_kv_bytes is not None]
        bound = self.info.capacity * announced
        summary = Summary(
            levels_run=len(rows),
            max_concurrent_agents_clean=max((row.level for row in rows if row.is_clean()), default=0),
            outputs_checked=sum(row.generate_ok for row in rows),
            wrong_outputs=sum(row.wrong_outputs for row in rows),
            errors=sum(sum(row.errors.values()) for row in rows),
            distinct_solo_outputs=len({tuple(tokens) for tokens in self.solo}),
            solo_outputs=len(self.solo),
            per_session_kv_bytes=max(kept, default=None),
            announced_kv_bytes_per_session=announced,
            node_kv_upper_bound=bound,
            node_kv_share_of_memory=ratio(bound, memory_bytes()),
            server_rss_when_ready=self.ready_rss,
            server_peak_rss=self.peak_rss,
            stopped_by=self.stopped,
        )
        return CapacityResults(summary, list(rows))

    async def _level(self, level: int) -> Level | None:
        """Run one level and tell it; None, with `stopped` set, when a solo run of it failed."""
        if not await self._solo_up_to(level):
            return None
        began = time.perf_counter()
        async with self._agents(level) as agents:
            create = await self._together(agents, "create")
            fill = await self._together(agents, "fill", len(agents[0].work.context))
            turn = await self._together(agents, "turn", agents[0].work.turn_tokens)
            await self._together(agents, "look")
            rss = self._sample()
            for agent, expected in zip(agents, self.solo, strict=False):
                agent.check(expected)
        wall = time.perf_counter() - began
        return level_row(level, agents, (create, fill, turn, wall), rss)

    async def _together(self, agents: Sequence[Agent], part: str, tokens: int = 0) -> float:
        """The barrier: all begin a part together, and the next one when the last has ended. Its seconds."""

        async def one(agent: Agent) -> None:
            await agent.do(part)
            self._show(tokens, f"{len(agents):,} agents")

        began = time.perf_counter()
        await asyncio.gather(*map(one, agents))
        return time.perf_counter() - began

    async def _solo_up_to(self, level: int) -> bool:
        """Have every agent's output when it is alone on the server; False when one cannot be had."""
        while len(self.solo) < level:
            number = len(self.solo)
            self._show(0, f"agent {number + 1:,} alone")
            async with self._agents(1, first=number) as (agent,):
                for part in ("create", "fill", "turn"):
                    await agent.do(part)
            if agent.error_class is not None:
                reason = f"{agent.error_class}: {agent.error_str}"
                self.stopped = f"the solo run of agent {number} failed: {reason}"
                return False
            self.solo.append(agent.output)
            self._show(len(agent.work.context) + agent.work.turn_tokens, f"{level:,} agents")
        return True

    @asynccontextmanager
    async def _agents(self, count: int, first: int = 0) -> AsyncIterator[list[Agent]]:
        """Agents that leave at the end, whatever happens."""
        address = self.server.address
        agents = [
            Agent(
                number, work_of(self.bench, number, self.text), AsyncClient(address, timeout=CALL_TIMEOUT_S)
            )
            for number in range(first, first + count)
        ]
        try:
            yield agents
        finally:
            await asyncio.gather(*(agent.leave() for agent in agents))

    def _show(self, tokens: int, what: str) -> None:
        self.computed += tokens
        self.run.progress(min(1.0, self.computed / self.to_compute), what)

    def _sample(self) -> int | None:
        seen = resident_bytes(self.server.pid)
        self.peak_rss = max(filter(None, (self.peak_rss, seen)), default=None)
        return seen

    async def _watch_memory(self) -> None:
        while True:
            self._sample()
            await asyncio.sleep(SAMPLE_EVERY_S)


def level_row(
    level: int, agents: Sequence[Agent], walls: tuple[float, float, float, float], rss: int | None
) -> Level:
    """One level in numbers. `walls` are the seconds of creating, filling, the turn, and all together."""
    failed = [agent for agent in agents if agent.error_class is not None]
    create, fill, turn, wall = walls
    created, answered = (known(getattr(agent, of) for agent in agents) for of in ("create_s", "generate_s"))
    spreads = {"create": created, "generate": answered}
    return Level(
        level=level,
        created_ok=len(created),
        generate_ok=len(answered),
        wrong_outputs=sum(agent.correct is False for agent in agents),
        errors=dict(Counter(str(agent.error_class) for agent in failed)),
        first_errors=_first_errors(failed),
        **{f"{of}_p{rank}_s": percentile(all_, rank) for of, all_ in spreads.items() for rank in (50, 95)},
        tokens_per_s=ratio(sum(len(agent.output) for agent in agents), turn),
        per_session_kv_bytes=max(
            (a.kv_live_bytes for a in agents if a.kv_live_bytes is not None), default=None
        ),
        server_rss_bytes=rss,
        create_wall_s=create,
        fill_wall_s=fill,
        turn_wall_s=turn,
        wall_s=wall,
    )


def _first_errors(failed: Sequence[Agent]) -> list[dict[str, Any]]:
    firsts = {agent.error_class: agent for agent in reversed(failed)}
    return [
        {"class": name, "phase": agent.error_phase, "agent": agent.number, "message": agent.error_str}
        for name, agent in reversed(firsts.items())
    ]
