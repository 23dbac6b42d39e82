"""`kakeya bench speculation --rtt-sweep`: what a remote proposer gains at growing distances.

A `kakeya propose` guesses for two servers through a relay that holds back every message: for one ahead of
what is verified, for the other only when guesses are needed. A third one decodes plainly, and a fourth has
the same proposer in its own process. Servers have one half of the cores and the remote proposer the other
one, as if they were two machines.
"""

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from kakeya.bench.contest import Chats, Played, contest
from kakeya.bench.processes import Server, proposer_process, server_process
from kakeya.bench.relay import Relay, relay_to
from kakeya.bench.report import Gate, at_least
from kakeya.bench.stats import Samples, known, median_of_ratios
from kakeya.bench.tables import Chart, Column, Series, Table
from kakeya.config import NO_PROPOSER, REMOTE
from kakeya.options import EngineOptions

PLAIN, AHEAD, WHEN_NEEDED, CO_LOCATED = "plain", "ahead", "when needed", "co-located"
# What the distance may cost.
WORST = 0.97
NEAR_MS, NEAR_SHARE = 5, 0.9
FAR_MS = 100.0


@dataclass(frozen=True)
class Distance:
    """Chats at one distance. Tokens a second of all four servers; `same` is the share of equal answers."""

    proposer: str
    chats: str
    rtt_ms: int
    plain: Samples
    ahead: Samples
    when_needed: Samples
    accepted: int
    proposed: int
    tokens: int
    same: float
    co_located: Samples = field(default_factory=Samples)

    @classmethod
    def of(cls, proposer: str, chats: Chats, rtt_ms: int, played: Played) -> "Distance":
        speeds = {name: Samples.of(values) for name, values in played.speeds.items()}
        return cls(
            proposer,
            chats.label(),
            rtt_ms,
            speeds[PLAIN],
            speeds[AHEAD],
            speeds[WHEN_NEEDED],
            accepted=played.accepted(AHEAD),
            proposed=played.proposed(AHEAD),
            tokens=played.tokens(AHEAD),
            same=min(played.same(PLAIN, other) for other in (AHEAD, WHEN_NEEDED, CO_LOCATED)),
            co_located=speeds[CO_LOCATED],
        )

    @property
    def speedup_ahead(self) -> float | None:
        return median_of_ratios(self.ahead.samples, self.plain.samples)

    @property
    def speedup_when_needed(self) -> float | None:
        return median_of_ratios(self.when_needed.samples, self.plain.samples)

    @property
    def speedup_co_located(self) -> float | None:
        return median_of_ratios(self.co_located.samples, self.plain.samples)

    @property
    def of_co_located(self) -> float | None:
        """What asking ahead keeps of the speed that the proposer gives in the server's own process."""
        return median_of_ratios(self.ahead.samples, self.co_located.samples)

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None

    @property
    def tokens_a_step(self) -> float:
        return self.tokens / (self.tokens - self.accepted)


@dataclass(frozen=True)
class Curve:
    """One proposer and one kind of chats over all distances."""

    rows: Sequence[Distance]

    @property
    def name(self) -> str:
        return f"{self.rows[0].proposer}, {self.rows[0].chats}"

    @property
    def break_even_ms(self) -> float | None:
        """Where it ceases to gain, between two distances linearly.

        The farthest one if it gains there too, and None where it gains nowhere.
        """
        points = [(row.rtt_ms, row.speedup_ahead) for row in self.rows if row.speedup_ahead is not None]
        if not points or points[0][1] < 1.0:
            return None
        for (near, fast), (far, slow) in pairwise(points):
            if slow < 1.0:
                return near + (far - near) * (fast - 1.0) / (fast - slow)
        return float(points[-1][0])


def curves(rows: Sequence[Distance]) -> list[Curve]:
    names = dict.fromkeys((row.proposer, row.chats) for row in rows)
    return [Curve([row for row in rows if (row.proposer, row.chats) == name]) for name in names]


def gates(
    rows: Sequence[Distance], noise: str | None, absent: str, ties: str | None = None
) -> Iterator[Gate]:
    """Near it is nearly as good as in the server's process, far it still does no harm, and answers are the
    same, but for `ties`, if any are told of."""
    judged = [] if noise else curves(rows)
    near = known(row.of_co_located for curve in judged for row in curve.rows if row.rtt_ms == NEAR_MS)
    worst = min(known(row.speedup_ahead for curve in judged for row in curve.rows), default=None)
    even = min(known(curve.break_even_ms for curve in judged), default=None)
    same = min((row.same for row in rows if not ties), default=None)
    why = noise or absent
    nearest = min(near, default=None)
    yield at_least(
        f"speed at {NEAR_MS} ms over that in the server's process", nearest, NEAR_SHARE, absent=why
    )
    yield at_least("the least speed over plain decoding at any distance", worst, WORST, absent=why)
    yield at_least("break-even in ms, asking ahead", even, FAR_MS, absent=noise or "it gains nowhere")
    yield at_least("answers that are the same at every distance", same, 1.0, absent=ties or absent)


def show(rows: Sequence[Distance]) -> list[Table | Chart]:
    parts: list[Table | Chart] = [Table("Speed over plain decoding by distance", _COLUMNS, rows, labels=2)]
    for place, curve in enumerate(curves(rows)):
        ahead = Series("asking ahead", [row.speedup_ahead for row in curve.rows])
        needed = Series("asking when needed", [row.speedup_when_needed for row in curve.rows])
        even = curve.break_even_ms
        mark = None if even is None else (even, f"break-even {even:.0f} ms")
        distances = [float(row.rtt_ms) for row in curve.rows]
        chart = Chart(curve.name, "times plain decoding", "round trip, ms", distances, [ahead, needed])
        parts.append(replace(chart, mark=mark, picture=place == 0))
    return parts


_COLUMNS = [
    Column("proposer", "proposer"),
    Column("chats", "chats"),
    Column("round trip, ms", "rtt_ms"),
    Column("plain, tokens/s", "plain.median", form=",.1f"),
    Column("ahead, tokens/s", "ahead.median", form=",.1f"),
    Column("when needed, tokens/s", "when_needed.median", form=",.1f"),
    Column("ahead over plain", "speedup_ahead", form=".2f"),
    Column("when needed over plain", "speedup_when_needed", form=".2f"),
    Column("co-located over plain", "speedup_co_located", form=".2f"),
    Column("accepted", "acceptance", form=".0%"),
    Column("tokens a step", "tokens_a_step", form=".2f"),
    Column("same answers", "same", form=".0%"),
]


@dataclass(frozen=True)
class Scene:
    """The processes: four servers, and the relay between two of them and the proposer."""

    servers: dict[str, Server]
    relay: Relay
    proposer_pid: int
    facts: dict[str, Any]

    @property
    def pids(self) -> list[int | None]:
        return [os.getpid(), self.proposer_pid, *(server.pid for server in self.servers.values())]

    async def measure(self, proposer: str, chats: Chats, rtt_ms: int, repeats: int) -> Distance:
        """Raises RemoteError when a server fails to answer."""
        self.relay.delay_s = rtt_ms / 2000
        return Distance.of(proposer, chats, rtt_ms, await contest(self.servers, chats, repeats))


@asynccontextmanager
async def scene(engine: EngineOptions, proposer: str, capacity: int) -> AsyncIterator[Scene]:
    """Start everything. Raises ConfigError for what cannot start."""
    near, far = _halves()
    async with AsyncExitStack() as stack:
        guessing = replace(engine, proposer=proposer, threads=engine.threads or len(far))
        process = await stack.enter_async_context(proposer_process(guessing, capacity, far))
        relay = await stack.enter_async_context(relay_to(process.address))
        remote = f"{REMOTE}:{relay.address}"
        verifying = replace(engine, threads=engine.threads or len(near))
        options = {
            PLAIN: replace(verifying, proposer=NO_PROPOSER),
            AHEAD: replace(verifying, proposer=remote),
            WHEN_NEEDED: replace(verifying, proposer=remote, draft_ahead=0),
            CO_LOCATED: replace(verifying, proposer=proposer),
        }
        servers = {
            name: await stack.enter_async_context(server_process(each, capacity, (), http=True, cores=near))
            for name, each in options.items()
        }
        facts = {"server": servers[PLAIN].facts, "cores": {"servers": near, "proposer": far}}
        yield Scene(servers, relay, process.pid, facts)


def _halves() -> tuple[list[int], list[int]]:
    """Cores for the servers and for the proposer: one half each, or all for both where there is one core."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return (cores[:half], cores[half:]) if half else (cores, cores)
