"""The ramp of `bench capacity`: agents that live level after level, and what that comes to.

An agent is an ordinary user of the SDK. Its output must be, token for token, that of its solo run.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kakeya.bench.benchmark import Results, Run
from kakeya.bench.machine import memory_bytes
from kakeya.bench.processes import Server
from kakeya.bench.stats import known, percentile, ratio
from kakeya.bench.text import stretch
from kakeya.client import AsyncClient, AsyncSession
from kakeya.errors import KakeyaError

if TYPE_CHECKING:
    from kakeya.bench.capacity import Capacity

ALL_LEVELS = "all levels were run"
SAMPLE_EVERY_S = 0.5
# Waiting is part of what is measured: a limit only keeps a server that hangs from hanging us.
CALL_TIMEOUT_S = 600.0
GENERATE_TIMEOUT_S = 7200.0


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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


@dataclass
class Agent:
    """One agent's life at one level: a context that fills its memory, then a prompt to be answered.

    The first error ends it: later parts are left out, and what it did not come to is None.
    """

    number: int
    client: AsyncClient
    context: Sequence[int]
    prompt: Sequence[int]
    gen_tokens: int
    seed: int
    """Its own, so that no two agents are expected to say the same."""
    session: AsyncSession | None = None
    output: list[int] = field(default_factory=list)
    create_s: float | None = None
    generate_s: float | None = None
    kv_live_bytes: int | None = None
    error: KakeyaError | None = None
    error_phase: str | None = None

    def tokens(self, part: str) -> int:
        """How many it has computed in a part."""
        return {"fill": len(self.context), "turn": len(self.prompt) + self.gen_tokens}.get(part, 0)

    async def do(self, part: str) -> None:
        """`create` a session, `fill` it, take the `turn`, or `look` at what it holds."""
        if self.error is None:
            try:
                await getattr(self, part)()
            except KakeyaError as error:
                self.error, self.error_phase = error, part

    async def create(self) -> None:
        began = time.perf_counter()
        self.session = await self.client.create_session(label="bench capacity", ignore_eos=True)
        self.create_s = time.perf_counter() - began

    async def fill(self) -> None:
        if self.context:
            await self._say(self.context, 1)  # appended tokens wait until a generate computes them

    async def turn(self) -> None:
        began = time.perf_counter()
        self.output = await self._say(self.prompt, self.gen_tokens)
        self.generate_s = time.perf_counter() - began

    async def look(self) -> None:
        assert self.session is not None
        self.kv_live_bytes = (await self.session.info()).kv_live_bytes

    async def _say(self, tokens: Sequence[int], count: int) -> list[int]:
        assert self.session is not None
        await self.session.append(tokens)
        stream = self.session.generate(count, temperature=1.0, seed=self.seed, timeout=GENERATE_TIMEOUT_S)
        return [token.id async for token in stream]

    async def leave(self) -> None:
        """Close the session and the connection, whatever happened."""
        async with self.client:
            if self.session is not None:
                # The error is told already, or the session went with its server.
                with suppress(KakeyaError):
                    await self.session.close()


def agent_of(bench: "Capacity", number: int, text: Sequence[int], address: str) -> Agent:
    """The same for the same number and seed, whatever the level: other places of the text for others."""
    dice = random.Random(f"{bench.seed}/{number}")
    context = stretch(text, dice.randrange(len(text)), bench.context_tokens())
    prompt = stretch(text, dice.randrange(len(text)), bench.prompt_len)
    client = AsyncClient(address, timeout=CALL_TIMEOUT_S)
    return Agent(number, client, context, prompt, bench.gen_tokens, dice.randrange(2**32))


def level_of(
    agents: Sequence[Agent], solo: Sequence[Sequence[int]], walls: Sequence[float], rss: int | None
) -> Level:
    """`walls` are the seconds of creating, filling, the turn, and all together."""
    failed = [agent for agent in agents if agent.error is not None]
    answered = [agent for agent in agents if agent.generate_s is not None]
    firsts = {type(agent.error).__name__: agent for agent in reversed(failed)}
    spreads = {of: known(getattr(agent, f"{of}_s") for agent in agents) for of in ("create", "generate")}
    create, fill, turn, wall = walls
    return Level(
        level=len(agents),
        created_ok=len(spreads["create"]),
        generate_ok=len(answered),
        wrong_outputs=sum(agent.output != solo[agent.number] for agent in answered),
        errors=dict(Counter(type(agent.error).__name__ for agent in failed)),
        first_errors=[
            {"class": name, "phase": each.error_phase, "agent": each.number, "message": str(each.error)}
            for name, each in sorted(firsts.items(), key=lambda item: item[1].number)
        ],
        **{f"{of}_p{rank}_s": percentile(all_, rank) for of, all_ in spreads.items() for rank in (50, 95)},
        tokens_per_s=ratio(sum(len(agent.output) for agent in agents), turn),
        per_session_kv_bytes=_most(agent.kv_live_bytes for agent in agents),
        server_rss_bytes=rss,
        create_wall_s=create,
        fill_wall_s=fill,
        turn_wall_s=turn,
        wall_s=wall,
    )


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


class Ramp:
    """The levels that were climbed, the solo runs they were checked against, and the memory it took."""

    def __init__(
        self, bench: "Capacity", run: Run[CapacityResults], server: Server, text: Sequence[int]
    ) -> None:
        self._bench, self._run, self._server, self._text = bench, run, server, text
        self.ready_rss = self.peak_rss = server.resident_bytes()
        self.solo: list[list[int]] = []
        self.levels: list[Level] = []
        self.stopped = ""
        each = bench.context_tokens() + bench.prompt_len + bench.gen_tokens
        self._work = run.work(each * (max(bench.ramp()) + sum(bench.ramp())))

    async def climb(self) -> None:
        """Level after level until one is not clean or somebody asks for the end."""
        watch = asyncio.create_task(self._watch_memory())
        try:
            for level in self._bench.ramp():
                stop = await self._run.interruption.unless_asked(self._level(level))
                aborted = f"aborted by {self._run.interruption.reason} at level {level}"
                self.stopped = aborted if stop is None else stop
                self._run.checkpoint(self.results())
                if self.stopped:
                    return
            self.stopped = ALL_LEVELS
        finally:
            watch.cancel()

    def results(self) -> CapacityResults:
        """As they are now."""
        rows, info = self.levels, self._server.info
        bound = info.capacity * info.kv_bytes_per_session
        summary = Summary(
            levels_run=len(rows),
            max_concurrent_agents_clean=max((row.level for row in rows if row.is_clean()), default=0),
            outputs_checked=sum(row.generate_ok for row in rows),
            wrong_outputs=sum(row.wrong_outputs for row in rows),
            errors=sum(sum(row.errors.values()) for row in rows),
            distinct_solo_outputs=len({tuple(tokens) for tokens in self.solo}),
            solo_outputs=len(self.solo),
            per_session_kv_bytes=_most(row.per_session_kv_bytes for row in rows),
            announced_kv_bytes_per_session=info.kv_bytes_per_session,
            node_kv_upper_bound=bound,
            node_kv_share_of_memory=ratio(bound, memory_bytes()),
            server_rss_when_ready=self.ready_rss,
            server_peak_rss=self.peak_rss,
            stopped_by=self.stopped,
        )
        return CapacityResults(summary, list(rows))

    async def _level(self, level: int) -> str:
        """Run one level and keep its numbers; why the ramp should not go on, nothing when it should."""
        while len(self.solo) < level:
            if failure := await self._alone(len(self.solo)):
                return failure
        self._work.begin(f"{level:,} agents")
        began = time.perf_counter()
        async with self._agents(range(level)) as agents:
            walls = [await self._together(agents, part) for part in ("create", "fill", "turn")]
            await self._together(agents, "look")
            rss = self._sample()
        wall = time.perf_counter() - began
        self.levels.append(level_of(agents, self.solo, [*walls, wall], rss))
        return self.levels[-1].stop()

    async def _alone(self, number: int) -> str:
        """Keep what an agent says when it is alone on the server; what went wrong, or nothing."""
        self._work.begin(f"agent {number + 1:,} alone")
        async with self._agents(range(number, number + 1)) as (agent,):
            for part in ("create", "fill", "turn"):
                await self._together([agent], part)
        if agent.error is not None:
            return f"the solo run of agent {number} failed: {type(agent.error).__name__}: {agent.error}"
        self.solo.append(agent.output)
        return ""

    async def _together(self, agents: Sequence[Agent], part: str) -> float:
        """The barrier: all begin a part together, and the next one when the last has ended. Its seconds."""

        async def one(agent: Agent) -> None:
            await agent.do(part)
            self._work.advance(agent.tokens(part))

        began = time.perf_counter()
        await asyncio.gather(*map(one, agents))
        return time.perf_counter() - began

    @asynccontextmanager
    async def _agents(self, numbers: Iterable[int]) -> AsyncIterator[list[Agent]]:
        """Agents that leave at the end, whatever happens."""
        agents = [agent_of(self._bench, number, self._text, self._server.address) for number in numbers]
        try:
            yield agents
        finally:
            await asyncio.gather(*(agent.leave() for agent in agents))

    def _sample(self) -> int | None:
        seen = self._server.resident_bytes()
        self.peak_rss = _most((self.peak_rss, seen))
        return seen

    async def _watch_memory(self) -> None:
        while True:
            self._sample()
            await asyncio.sleep(SAMPLE_EVERY_S)
