"""`kakeya bench crash`: a server is killed again and again under load, and nothing that it said may be lost.

Agents append, generate, leave streams early, fork and close through the SDK, which tries again what a crash
cut off. They only see pauses. In the end every session's history is compared with that of a session that
nobody interrupted.
"""

import asyncio
import random
import socket
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from kakeya.bench.benchmark import EngineBenchmark, Results, Run
from kakeya.bench.processes import ServerProcess
from kakeya.bench.report import Gate, at_least, at_most
from kakeya.bench.stats import percentile
from kakeya.bench.tables import Chart, Table, figure, listing
from kakeya.bench.witnesses import Witnesses
from kakeya.dialing import Retry
from kakeya.options import NumericMode, flags
from kakeya.types import Durability, Numerics

_crash = partial(typer.Option, rich_help_panel="The crashes")
# A server is there again after some seconds, and on a busy machine its lives may be too short for a call.
# Agents must not give up before it is answered.
_RETRY = Retry(attempts=100_000, first_delay=0.05, longest_delay=0.5)
_PATIENCE_S = 3600.0
_LONGEST_LIFE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class CrashResults(Results):
    """What the agents did, and what was wrong with it."""

    kills: int = 0
    sessions: int = 0
    forks: int = 0
    appended_tokens: int = 0
    generated_tokens: int = 0
    generates: int = 0
    checked_lengths: int = 0
    lost: int = 0
    """Sessions whose history has another length than their client was told."""
    wrong: int = 0
    """Generates whose tokens an uninterrupted session does not say."""
    errors: tuple[str, ...] = ()
    recalling: int = 0
    """Sessions that may see tokens again that left their window."""
    recalled: int = 0
    """Answers that saw some again."""
    left: int = 0
    """Streams that an agent left before their end, to append at once."""
    recovery_s: tuple[float, ...] = ()
    """From each kill until the next server was ready."""


@dataclass(frozen=True)
class Crash(EngineBenchmark[CrashResults]):
    """How often the server dies, and who uses it meanwhile."""

    kind = "crash"
    title = "Crash benchmark"
    help = "Kill a server under load: nothing acknowledged is lost, and every session goes on exactly."
    results = CrashResults

    numerics: NumericMode = Numerics.EXACT
    window: Annotated[int, _crash(help="Most recent tokens kept.")] = 64
    recall: Annotated[int, _crash(help="Slots for recall of half of the sessions; 0 for none at all.")] = 16
    kills: Annotated[int, _crash(help="How often the server is killed.")] = 200
    agents: Annotated[int, _crash(help="Agents at once, each with one session at a time.")] = 12
    slabs: Annotated[
        int, _crash(help="The server's capacity: fewer than agents, so that sessions sleep.")
    ] = 4
    host_tier_bytes: Annotated[int, _crash(help="The server's host tier.")] = 4 * 2**20
    durability: Annotated[Durability, _crash(help="The server's durability.")] = Durability.PROCESS
    seed: Annotated[int, _crash(help="Which texts, and which moments.")] = 0

    def __post_init__(self) -> None:
        self.require_least(kills=1, agents=1, slabs=1, host_tier_bytes=0)

    def run(self, run: Run[CrashResults]) -> CrashResults:
        """Kill the server at random moments. Then check every session."""
        from kakeya.runtime import Runtime  # torch takes a second to import

        with tempfile.TemporaryDirectory() as directory:
            done = run.asynchronously(_Storm(self, run, directory).rage())
        wrong = 0
        with Runtime.open(self.model, self.engine_config(capacity=1)) as runtime:
            sessions = len(done.told.ledgers)
            for place in range(sessions):
                run.progress(place / sessions, "checking sessions")
                wrong += done.told.wrong_generates(runtime, place)
        return done.results(wrong)

    def server_flags(self, directory: str, port: int) -> list[str]:
        state = {
            "state-dir": directory,
            "durability": self.durability.value,
            "host-tier-bytes": self.host_tier_bytes,
            "bind": f"127.0.0.1:{port}",
            "max-concurrent": self.slabs,
            "queue-depth": 4 * self.agents,
            "queue-max-wait-s": 0,
        }
        return flags(state)

    def gates(self, results: CrashResults) -> list[Gate]:
        nothing = "nothing was generated" if not results.generates else ""
        unchecked = "no session was checked" if not results.checked_lengths else ""
        seen = at_least(
            "answers that recalled something", _judged(results.recalled, nothing), 1, absent=nothing
        )
        return [
            at_least("kills", float(results.kills), self.kills, absent="the server was not killed"),
            at_most("sessions that lost tokens", _judged(results.lost, unchecked), 0, absent=unchecked),
            at_most("wrong generates", _judged(results.wrong, nothing), 0, absent=nothing),
            at_most("errors that agents saw", _judged(len(results.errors), nothing), 0, absent=nothing),
            at_least("streams left early", _judged(results.left, nothing), 1, absent=nothing),
            *([seen] if self.recall else ()),
        ]

    @staticmethod
    def show(results: CrashResults) -> list[Table | Chart]:
        times = results.recovery_s
        rows = [
            ("kills", figure(results.kills)),
            ("sessions", figure(results.sessions)),
            ("forks", figure(results.forks)),
            ("sessions with recall", figure(results.recalling)),
            ("answers that recalled something", figure(results.recalled)),
            ("tokens appended", figure(results.appended_tokens)),
            ("tokens generated", figure(results.generated_tokens)),
            ("streams left early", figure(results.left)),
            ("lengths checked", figure(results.checked_lengths)),
            ("sessions that lost tokens", figure(results.lost)),
            ("wrong generates", figure(results.wrong)),
            ("errors that agents saw", figure(len(results.errors))),
            ("ready again p50, s", figure(percentile(times, 50), form=".2f")),
            ("ready again, longest, s", figure(max(times, default=None), form=".2f")),
        ]
        errors = [listing("Errors", ("error",), [(each,) for each in results.errors[:20]])]
        return [listing("Crashes", ("what", "value"), rows, labels=1), *(errors if results.errors else ())]


def _judged(count: int, absent: str) -> float | None:
    return None if absent else float(count)


class _Storm:
    """The agents, the server, and who kills it."""

    def __init__(self, bench: Crash, run: Run[CrashResults], directory: str) -> None:
        self._bench, self._run, self._directory = bench, run, directory
        self._chance = random.Random(bench.seed)
        self._kills = 0
        self._recovery: list[float] = []
        self.told = Witnesses(bench.engine_config(capacity=1).cache)

    async def rage(self) -> "_Storm":
        from kakeya.client import AsyncClient

        port = _free_port()
        server = await self._start(port)
        try:
            async with AsyncClient(f"127.0.0.1:{port}", timeout=_PATIENCE_S, retry=_RETRY) as client:
                vocabulary = (await client.server_info()).vocab_size
                agents = [
                    asyncio.create_task(
                        self.told.live(client, random.Random(f"{self._bench.seed} {number}"), vocabulary)
                    )
                    for number in range(self._bench.agents)
                ]
                server = await self._kill_often(server, port)
                self.told.over.set()
                await asyncio.gather(*agents)
        finally:
            await asyncio.to_thread(server.close)
        return self

    async def _start(self, port: int) -> ServerProcess:
        extra = self._bench.server_flags(self._directory, port)
        server = ServerProcess(self._bench, self._bench.slabs, extra)
        try:
            await server.ready()
        except BaseException:
            await asyncio.to_thread(server.close)
            raise
        return server

    async def _kill_often(self, server: ServerProcess, port: int) -> ServerProcess:
        while self._kills < self._bench.kills and self._run.interruption.reason is None:
            await asyncio.sleep(self._chance.uniform(0.02, _LONGEST_LIFE_S))
            self._run.progress(self._kills / self._bench.kills, f"kill {self._kills + 1}")
            began = time.monotonic()
            server.kill()
            await asyncio.to_thread(server.close)
            server = await self._start(port)
            self._recovery.append(time.monotonic() - began)
            self._kills += 1
            self._run.checkpoint(self.results(0))
        return server

    def results(self, wrong: int) -> CrashResults:
        told = self.told
        return CrashResults(
            kills=self._kills,
            sessions=len(told.ledgers),
            forks=told.forks,
            appended_tokens=told.appended_tokens,
            generated_tokens=told.generated_tokens,
            generates=told.generates,
            checked_lengths=told.checked,
            lost=told.lost,
            wrong=wrong,
            errors=tuple(told.errors),
            recalling=sum(each.recall > 0 for each in told.ledgers),
            recalled=told.recalled,
            left=told.left,
            recovery_s=tuple(self._recovery),
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
