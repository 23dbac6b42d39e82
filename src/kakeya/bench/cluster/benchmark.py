"""`kakeya bench cluster`: its flags, the run, the gates and the tables."""

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kakeya.bench.benchmark import EngineBenchmark, Repeats, Run
from kakeya.bench.cluster.fleet import Fleet, Size
from kakeya.bench.cluster.rows import DRAIN, HEAD, KILLS, ClusterResults, Speed
from kakeya.bench.cluster.speed import Race
from kakeya.bench.cluster.storm import Storm
from kakeya.bench.report import Gate, at_least, at_most, busy, bystanders_gate
from kakeya.bench.stats import percentile
from kakeya.bench.tables import MS, Chart, Table, figure, figures, listing
from kakeya.bench.witnesses import Witnesses
from kakeya.errors import ConfigError
from kakeya.options import NumericMode, Threads
from kakeya.types import Numerics

NOT_ASKED = "not in this run"
_storm = partial(typer.Option, rich_help_panel="The storm")
_speed = partial(typer.Option, rich_help_panel="The speed")


class Part(StrEnum):
    """What can be run by itself: a storm takes long, speed needs a quiet machine."""

    STORM = "storm"
    SPEED = "speed"


@dataclass(frozen=True)
class ClusterBench(EngineBenchmark[ClusterResults]):
    """How large the cluster is, who uses it, and what happens to it."""

    kind = "cluster"
    title = "Cluster benchmark"
    help = (
        "A cluster on Ray: what it keeps when parts of it die and are drained, and what its front end costs."
    )
    results = ClusterResults

    numerics: NumericMode = Numerics.EXACT
    threads: Threads = 1
    window: Annotated[int, typer.Option(help="Most recent tokens kept.")] = 64
    part: Annotated[
        Part | None,
        typer.Option(
            help="`storm`: kills and drains; `speed`: what the front end costs; both when left out."
        ),
    ] = None
    nodes: Annotated[int, typer.Option(help="Nodes, each with one home.")] = 3
    seed: Annotated[int, typer.Option(help="Which texts, and which moments.")] = 0
    agents: Annotated[int, _storm(help="Agents at once, each with one session at a time.")] = 12
    slabs: Annotated[int, _storm(help="Each home's capacity.")] = 8
    kills: Annotated[
        int, _storm(help="Kills: of homes, their actors, nodes, the front end and Ray's head, in turns.")
    ] = 10
    drains: Annotated[int, _storm(help="Nodes that are drained, one after another.")] = 5
    pause_s: Annotated[float, _storm(help="Seconds between two of these.")] = 0.5
    talkers: Annotated[int, _speed(help="Agents that talk at once.")] = 96
    turn_tokens: Annotated[int, _speed(help="Tokens of each answer.")] = 24
    stream_tokens: Annotated[int, _speed(help="Tokens of a stream that is alone.")] = 96
    repeats: Repeats = 7

    def __post_init__(self) -> None:
        self.require_least(nodes=2, agents=1, slabs=1, kills=0, drains=0, pause_s=0)
        self.require_least(talkers=1, turn_tokens=1, stream_tokens=2, repeats=1)

    def check(self, *, picture: bool) -> None:
        super().check(picture=picture)
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("the package ray is not installed: pip install 'kakeya[cluster]'")

    def run(self, run: Run[ClusterResults]) -> ClusterResults:
        """Measure speed, while nobody computes anything else. Then let agents talk while things happen."""
        results = ClusterResults()
        if self.part is not Part.STORM:
            results = self._race(run)
            run.checkpoint(results)
        if self.part is not Part.SPEED and run.interruption.reason is None:
            results = self._rage(run, results)
        return results

    def _race(self, run: Run[ClusterResults]) -> ClusterResults:
        slabs = -(-self.talkers // self.nodes) * 5 // 4 + 1  # no session sleeps where placement is uneven
        with self._fleet(Size(self.nodes, slabs, slabs, 4 * self.talkers)) as fleet:
            done = run.asynchronously(Race(self, run, fleet).measure())
        return ClusterResults(speed=done.results(self._wrong(run, done.told)))

    def _rage(self, run: Run[ClusterResults], before: ClusterResults) -> ClusterResults:
        # Appends and forks need slabs beside those that generate, also while a node is empty.
        with self._fleet(Size(self.nodes, self.slabs, max(1, self.slabs // 2), 4 * self.agents)) as fleet:
            done = run.asynchronously(Storm(self, run, fleet, before).rage())
        return done.results(self._wrong(run, done.told))

    @contextmanager
    def _fleet(self, size: Size) -> Iterator[Fleet]:
        with tempfile.TemporaryDirectory() as directory, Fleet(self, size, Path(directory)) as fleet:
            yield fleet

    def _wrong(self, run: Run[ClusterResults], told: Witnesses) -> int:
        """How many generates a server of its own answers differently, whose threads change no bits."""
        from kakeya.runtime import Runtime  # torch takes a second to import

        wrong, sessions = 0, len(told.ledgers)
        with Runtime.open(self.model, replace(self, threads=None).engine_config(capacity=1)) as runtime:
            for place in range(sessions):
                run.progress(place / sessions, "checking sessions")
                wrong += told.wrong_generates(runtime, place)
        return wrong

    def gates(self, results: ClusterResults) -> list[Gate]:
        return [*self._storm_gates(results), *_speed_gates(results)]

    def _storm_gates(self, results: ClusterResults) -> list[Gate]:
        out = NOT_ASKED if self.part is Part.SPEED else ""
        nothing = out or ("" if results.generates else "nothing was generated")
        unchecked = out or ("" if results.checked_lengths else "no session was checked")
        kills, drains = (len(results.of(*kinds)) for kinds in (KILLS, (DRAIN,)))
        answered = min((event.answered for event in results.of(HEAD)), default=0)
        headless = "" if results.of(HEAD) else out or "Ray's head was not killed"
        return [
            at_least("kills", _judged(kills, out), self.kills, absent=out),
            at_least("drains", _judged(drains, out), self.drains, absent=out),
            at_most("sessions that lost tokens", _judged(results.lost, unchecked), 0, absent=unchecked),
            at_most("wrong generates", _judged(results.wrong, nothing), 0, absent=nothing),
            at_most("sessions at two homes", _judged(results.twice, unchecked), 0, absent=unchecked),
            at_most("errors that agents saw", _judged(len(results.errors), nothing), 0, absent=nothing),
            at_least("least generates without Ray's head", _judged(answered, headless), 1, absent=headless),
        ]

    @staticmethod
    def show(results: ClusterResults) -> list[Table | Chart]:
        return [
            *([] if results.speed is None else _shown_speed(results.speed, results.bystanders_share)),
            *(_shown_storm(results) if results.events or results.sessions else ()),
        ]


def _judged(count: int, absent: str) -> float | None:
    return None if absent else float(count)


def _speed_gates(results: ClusterResults) -> list[Gate]:
    speed, share = results.speed, results.bystanders_share
    if speed is None:
        speed, absent = Speed(), NOT_ASKED
    else:
        absent = "" if speed.generates else "nothing was generated"
    untold = "" if share is not None else "nobody knows how busy others were"
    noise = absent or busy(share) or untold
    gates = [
        at_most("wrong answers of talkers", _judged(speed.wrong, absent), 0, absent=absent),
        at_least(
            "tokens a second through the front end over the homes alone",
            None if noise else speed.kept,
            0.95,
            absent=noise or NOT_ASKED,
        ),
        at_most(
            "a token's time through the front end over a home's",
            None if noise else speed.overhead,
            1.1,
            absent=noise or NOT_ASKED,
        ),
    ]
    return gates if results.speed is None else [*gates, bystanders_gate(share)]


def _shown_speed(speed: Speed, share: float | None) -> list[Table | Chart]:
    rates = [figure(each.median, form=",.1f") for each in (speed.through, speed.direct)]
    times = [figure(each.median, MS, ".2f") for each in (speed.through_token, speed.direct_token)]
    rows = [
        (f"{speed.agents} agents, tokens/s", *rates, figure(speed.kept, form=".3f")),
        ("one stream, ms a token", *times, figure(speed.overhead, form=".3f")),
    ]
    facts = [
        ("agents of each home", figures(*speed.homes)),
        ("answers compared with solo runs", figure(speed.generates)),
        ("wrong answers", figure(speed.wrong)),
        ("share of the machine that others used", figure(share, form=".1%")),
    ]
    columns = ("medians", "through the front end", "straight to the homes", "ratio")
    return [
        listing("Speed", columns, rows, labels=1),
        listing("The agents of the speed", ("what", "value"), facts, labels=1),
    ]


def _shown_storm(results: ClusterResults) -> list[Table | Chart]:
    rows = [
        ("sessions", figure(results.sessions)),
        ("forks", figure(results.forks)),
        ("tokens appended", figure(results.appended_tokens)),
        ("tokens generated", figure(results.generated_tokens)),
        ("lengths checked", figure(results.checked_lengths)),
        ("sessions that lost tokens", figure(results.lost)),
        ("wrong generates", figure(results.wrong)),
        ("sessions at two homes", figure(results.twice)),
        ("errors that agents saw", figure(len(results.errors))),
        ("generates without Ray's head", figure(sum(event.answered for event in results.of(HEAD)))),
    ]
    happened = [
        (
            kind,
            figure(len(events)),
            figure(percentile([event.seconds for event in events], 50), form=".2f"),
            figure(percentile([event.seconds for event in events], 95), form=".2f"),
            figure(sum(event.sessions for event in events)),
            figure(sum(event.bytes for event in events)),
        )
        for kind in (*KILLS, DRAIN)
        if (events := results.of(kind))
    ]
    columns = ("what", "times", "p50 s", "p95 s", "sessions moved", "bytes moved")
    errors = [listing("Errors", ("error",), [(each,) for each in results.errors[:20]])]
    return [
        listing("The storm", ("what", "value"), rows, labels=1),
        listing("What happened", columns, happened, labels=1),
        *(errors if results.errors else ()),
    ]
