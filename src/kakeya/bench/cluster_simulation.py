"""`kakeya bench cluster-simulate`: placement, drains, deaths and scaling of a cluster, in virtual time.

The planner is the real one, and the wall time that it takes is measured. Everything else is played with costs
that were measured on single servers; each flag says where its figure comes from, or that it is assumed.
"""

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any

import typer

from kakeya.bench.benchmark import Benchmark, Quick, Results, Run
from kakeya.bench.report import Gate, at_most, busy, bystanders_gate
from kakeya.bench.stats import percentile
from kakeya.bench.tables import MS, Chart, Column, Table, figure, figures, listing, over
from kakeya.cluster.simulated.costs import Costs, Spread
from kakeya.cluster.simulated.scenario import Look, Outcome, Scenario
from kakeya.cluster.simulation import Simulation
from kakeya.errors import ConfigError
from kakeya.options import build

# What the planner may take. A home that is chosen holds up a client, a plan for one node that node's drain.
_LIMITS_S = {
    "choose_home": 0.005,
    "drain": 0.1,
    "wanted_replicas": 0.01,
    "node_to_remove": 2.0,
    "rebalance": 10.0,
    "place_all": 30.0,
}
_NOT_ASKED = "it was not asked in this run"
_NO_RUN = "nothing was simulated"
# What `--quick` says where the command line says nothing.
QUICK = {
    "nodes": 20,
    "sessions": 4000,
    "places": 250,
    "seconds": 300.0,
    "node_life_s": 1800.0,
    "spare_nodes": 2,
    "lifetime_s": 3600.0,
}
_GB, _TB = 1e-9, 1e-12

_cluster = partial(typer.Option, rich_help_panel="The cluster")
_life = partial(typer.Option, rich_help_panel="What happens")
_cost = partial(typer.Option, rich_help_panel="What things take")


@dataclass(frozen=True)
class Planner:
    """How long one of the planner's functions took: wall time, and the processor's, whatever others do."""

    call: str
    calls: int
    p50_s: float
    p95_s: float
    max_s: float
    processor_p95_s: float


@dataclass(frozen=True)
class Times:
    """How something that happened often was spread."""

    count: int
    p50: float | None
    p95: float | None
    max: float | None


def _times(values: Sequence[float]) -> Times:
    return Times(len(values), percentile(values, 50), percentile(values, 95), max(values, default=None))


_NEVER = Times(0, None, None, None)


@dataclass(frozen=True, kw_only=True)
class ClusterSimulationResults(Results):
    """What became of sessions and nodes. Times are virtual seconds, but for the planner's and `wall_s`."""

    sessions_placed: int = 0
    sessions_refused: int = 0
    sessions_refused_with_room: int = 0
    sessions_unplaced: int = 0
    sessions_unplaced_with_room: int = 0
    sessions_closed: int = 0
    lost: int = 0
    two_homes: int = 0
    homes_overfull: int = 0
    violations: tuple[str, ...] = ()
    checks: int = 0
    audits: int = 0
    turns: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    wakes: dict[str, int] | None = None
    busy_share: float = 0.0
    queued: Times = _NEVER
    moves: int = 0
    moves_broken_by_deaths: int = 0
    moved_bytes: int = 0
    move_pause_s: Times = _NEVER
    turns_that_met_a_move_s: Times = _NEVER
    drain_s: Times = _NEVER
    drain_bytes: Times = _NEVER
    drain_sessions: Times = _NEVER
    drains_put_off: int = 0
    rebalanced: int = 0
    deaths: int = 0
    cut_off: int = 0
    fenced_writes: int = 0
    stored_while_cut_off: int = 0
    waited_for_a_node: int = 0
    recovery_s: Times = _NEVER
    turns_that_met_a_death_s: Times = _NEVER
    nodes_added: int = 0
    nodes_removed: int = 0
    planner: tuple[Planner, ...] = ()
    looks: tuple[Look, ...] = ()
    wall_s: float = 0.0

    @property
    def fullest_over_mean(self) -> float | None:
        """The 95th percentile of all moments: how much fuller the fullest home is than the mean one."""
        return percentile([each.fullest / each.mean for each in self.looks if each.mean], 95)

    @property
    def most_down(self) -> int:
        return max((each.down for each in self.looks), default=0)


@dataclass(frozen=True)
class ClusterSimulation(Benchmark[ClusterSimulationResults]):
    """The cluster, what happens to it, and what things take."""

    kind = "cluster-simulate"
    title = "Simulated cluster"
    help = "Placement, drains and deaths of 1,000 nodes in virtual time, with measured costs."
    results = ClusterSimulationResults

    quick: Quick = False
    nodes: Annotated[int, _cluster(help="Nodes, one home each.")] = 1000
    spare_nodes: Annotated[int, _cluster(help="Nodes that wait for the homes of dead ones.")] = 10
    sessions: Annotated[int, _cluster(help="Sessions at the beginning.")] = 1_000_000
    places: Annotated[
        int, _cluster(help="Sessions that a home may hold, awake and asleep; its disk tier decides.")
    ] = 1250
    slabs: Annotated[int, _cluster(help="Slabs of a home. 256: evidence capacity-light, 6.2 GB.")] = 256
    host_places: Annotated[int, _cluster(help="Sessions in a home's host tier: 1 GiB, the default.")] = 44
    moves_at_once: Annotated[int, _cluster(help="Sessions that a home sends, and receives, at once.")] = 4
    seconds: Annotated[float, _life(help="Virtual seconds.")] = 900.0
    turn_every_s: Annotated[float, _life(help="A session's turns are so far apart on average. Assumed.")] = (
        900.0
    )
    prompt_tokens: Annotated[float, _life(help="Tokens of a message, mean. 158: evidence load-cpu.")] = 158.0
    answer_tokens: Annotated[float, _life(help="Tokens of an answer, mean. 57: evidence load-cpu.")] = 57.0
    history_tokens: Annotated[float, _life(help="Tokens that a session begins with, mean. Assumed.")] = 2000.0
    lifetime_s: Annotated[float, _life(help="How long a session lives, mean. Assumed: a day.")] = 86400.0
    surge: Annotated[
        float, _life(help="Sessions come so many times as fast as they end, until half of the time is over.")
    ] = 2.0
    node_life_s: Annotated[
        float, _life(help="How long a node lives, mean, exponential. Assumed, and far too short: five hours.")
    ] = 18000.0
    cut_off_share: Annotated[
        float, _life(help="The share of deaths where a node lives on, unheard, and reaches the storage.")
    ] = 0.2
    drain_every_s: Annotated[float, _life(help="So often the next node is drained and starts anew.")] = 15.0
    rebalance_every_s: Annotated[float, _life(help="So often load is spread.")] = 120.0
    scale_every_s: Annotated[float, _life(help="So often the autoscaler looks.")] = 30.0
    seed: Annotated[int, _life(help="Which chances.")] = 0
    bytes_per_token: Annotated[
        int, _cost(help="KV bytes of a token. 23,040: SmolLM2-135M in bfloat16, evidence capacity-light.")
    ] = 23_040
    slots: Annotated[int, _cost(help="Tokens in a full slab, sink and window.")] = 1028
    host_wake_ms: Annotated[str, _cost(help="Wake from host memory, p50,p95. Evidence hibernate-cpu.")] = (
        "2.8,29.6"
    )
    disk_wake_ms: Annotated[str, _cost(help="Wake from disk, p50,p95. Evidence hibernate-cpu.")] = "18.7,66.6"
    restart_ms: Annotated[
        str, _cost(help="From a kill until the server is ready, p50,p95. Evidence crash-cpu.")
    ] = "1560,2657"
    move_ms: Annotated[
        str,
        _cost(
            help="Hand over and take in a full window without a network, p50,p95. Log 2026-11-18-simulation."
        ),
    ] = "105,353"
    call_ms: Annotated[float, _cost(help="One call between homes. 2: a Ray actor call, ADR 41.")] = 2.0
    prompt_tokens_per_s: Annotated[
        float, _cost(help="A node's speed with prompts. 1,386: evidence engine-cpu, prompt of 512.")
    ] = 1386.0
    decode: Annotated[
        str, _cost(help="A node's tokens/s for so many sessions. Evidence engine-cpu, history 1,024.")
    ] = "1:150,8:501,16:684,32:1050"
    detection_s: Annotated[
        float, _cost(help="Until a death is seen. Assumed: Ray gives up a silent node after 15 s or so.")
    ] = 15.0
    node_start_s: Annotated[float, _cost(help="Until a new node is there. Assumed.")] = 120.0
    link_bytes_per_s: Annotated[float, _cost(help="A node's network, each way. Assumed: 10 Gbit/s.")] = 1.25e9

    def presets(self) -> dict[str, float]:
        return dict(QUICK) if self.quick else {}

    def check(self, *, picture: bool) -> None:
        self.scenario()
        self.costs()

    def scenario(self) -> Scenario:
        return build(Scenario, vars(self))

    def costs(self) -> Costs:
        """Raises ConfigError for a flag that cannot be read."""
        spreads = ("host_wake", "disk_wake", "restart", "move")
        read = {name: _spread(f"{name}_ms", getattr(self, f"{name}_ms")) for name in spreads}
        decode = _speeds(self.decode)
        return build(Costs, {**vars(self), **read, "decode": decode, "call_s": self.call_ms / MS})

    def run(self, run: Run[ClusterSimulationResults]) -> ClusterSimulationResults:
        simulation = Simulation(self.scenario(), self.costs())
        began = time.monotonic()
        gc.disable()  # it would look through a million sessions in the middle of a plan, and find nothing
        try:
            with run.watching([os.getpid()]):
                outcome = simulation.run(
                    lambda done: run.progress(done, f"{done * self.seconds:,.0f} virtual s")
                )
        finally:
            gc.enable()
        return _results(outcome, self.seconds, time.monotonic() - began)

    def gates(self, results: ClusterSimulationResults) -> list[Gate]:
        checked = results.checks > 0
        counts = {
            "sessions lost": results.lost,
            "sessions with two homes": results.two_homes,
            "homes with more sessions than places": results.homes_overfull,
            "new sessions refused while there was room": results.sessions_refused_with_room,
            "sessions without a place while there was room": results.sessions_unplaced_with_room,
        }
        wall = {each.call: each.p95_s for each in results.planner}
        processor = {each.call: each.processor_p95_s for each in results.planner}
        noisy = busy(results.bystanders_share, "wall times")
        return [
            *(at_most(name, value if checked else None, 0, absent=_NO_RUN) for name, value in counts.items()),
            *(
                at_most(f"{call} p95, processor s", processor.get(call), limit, absent=_NOT_ASKED)
                for call, limit in _LIMITS_S.items()
            ),
            *(
                at_most(
                    f"{call} p95, wall s",
                    None if noisy else wall.get(call),
                    limit,
                    absent=noisy or _NOT_ASKED,
                )
                for call, limit in _LIMITS_S.items()
            ),
            bystanders_gate(results.bystanders_share),
        ]

    @staticmethod
    def show(results: ClusterSimulationResults) -> list[Table | Chart]:
        return [
            listing("Sessions", ("what", "value"), _session_rows(results), labels=1),
            listing("Nodes", ("what", "value"), _node_rows(results), labels=1),
            listing(
                "Times and sizes", ("what", "times", "p50", "p95", "max"), _spread_rows(results), labels=1
            ),
            Table(
                "The planner, real time",
                [
                    Column("call", "call"),
                    Column("calls", "calls"),
                    Column("p50, ms", "p50_s", MS, ",.2f"),
                    Column("p95, ms", "p95_s", MS, ",.2f"),
                    Column("max, ms", "max_s", MS, ",.1f"),
                    Column("p95 of the processor, ms", "processor_p95_s", MS, ",.2f"),
                ],
                results.planner,
            ),
            *_charts(results.looks),
        ]


def _session_rows(results: ClusterSimulationResults) -> list[tuple[str, str]]:
    wakes = results.wakes or {}
    return [
        ("placed", figure(results.sessions_placed)),
        (
            "refused / of these while there was room",
            figures(results.sessions_refused, results.sessions_refused_with_room),
        ),
        (
            "without a place / of these while there was room",
            figures(results.sessions_unplaced, results.sessions_unplaced_with_room),
        ),
        ("closed", figure(results.sessions_closed)),
        ("lost / with two homes", figures(results.lost, results.two_homes)),
        ("homes with more than they have places", figure(results.homes_overfull)),
        ("checks of one session / of all", figures(results.checks, results.audits)),
        ("turns", figure(results.turns)),
        ("tokens a second", figure(results.tokens_per_s)),
        (
            "awake already / from host memory / from disk",
            figures(*(wakes.get(each, 0) for each in ("slab", "host", "disk"))),
        ),
        ("moves / broken by a death", figures(results.moves, results.moves_broken_by_deaths)),
        ("moved, TB", figure(results.moved_bytes, _TB, ",.2f")),
        ("of these planned by rebalancing", figure(results.rebalanced)),
    ]


def _node_rows(results: ClusterSimulationResults) -> list[tuple[str, str]]:
    return [
        ("deaths / of these only cut off", figures(results.deaths, results.cut_off)),
        (
            "stored while cut off / refused by the fence",
            figures(results.stored_while_cut_off, results.fenced_writes),
        ),
        ("homes that waited for a node", figure(results.waited_for_a_node)),
        ("down at once, at most", figure(results.most_down)),
        ("drains / put off for want of room", figures(results.drain_s.count, results.drains_put_off)),
        ("added / removed by the autoscaler", figures(results.nodes_added, results.nodes_removed)),
        ("busy", figure(results.busy_share, form=".1%")),
        ("fullest over mean, p95", figure(results.fullest_over_mean, form=".3f")),
        ("wall time, s", figure(results.wall_s)),
    ]


def _spread_rows(results: ClusterSimulationResults) -> list[list[str]]:
    rows = [
        ("pause of a move, ms", results.move_pause_s, MS, ",.0f"),
        ("turns that met a move, ms to the answer", results.turns_that_met_a_move_s, MS, ",.0f"),
        ("a drain, s", results.drain_s, 1, ",.1f"),
        ("a drain, GB", results.drain_bytes, _GB, ",.2f"),
        ("a drain, sessions", results.drain_sessions, 1, ",.0f"),
        ("recovery of a home, s", results.recovery_s, 1, ",.1f"),
        ("turns that met a death, s to the answer", results.turns_that_met_a_death_s, 1, ",.1f"),
        ("turns that waited for a slab, s", results.queued, 1, ",.2f"),
    ]
    return [
        [
            name,
            figure(times.count),
            *(figure(each, scale, form) for each in (times.p50, times.p95, times.max)),
        ]
        for name, times, scale, form in rows
    ]


def _charts(looks: Sequence[Look]) -> list[Chart]:
    if not looks:
        return []
    at = [each.at_s for each in looks]
    fills = {"fullest": "fullest", "mean": "mean", "emptiest": "emptiest"}
    nodes = {"down": "down", "draining": "draining"}
    where = "virtual seconds"
    return [
        over("Sessions of a home that takes new ones", "sessions", where, at, looks, fills, picture=True),
        over("Homes that are down or draining", "homes", where, at, looks, nodes),
    ]


def _planner(call: str, took: Sequence[tuple[float, float]]) -> Planner:
    wall, processor = [each[0] for each in took], [each[1] for each in took]
    middle, late, spent = percentile(wall, 50), percentile(wall, 95), percentile(processor, 95)
    return Planner(call, len(took), middle or 0.0, late or 0.0, max(wall), spent or 0.0)


# Results under other names than the simulation has for them: as they are, and how they were spread.
_COUNTS = {
    "sessions_placed": "placed",
    "sessions_refused": "refused",
    "sessions_refused_with_room": "refused_with_room",
    "sessions_unplaced": "unplaced",
    "sessions_unplaced_with_room": "unplaced_with_room",
    "sessions_closed": "closed",
    "two_homes": "doubled",
    "homes_overfull": "overfull",
    "moves_broken_by_deaths": "broken_moves",
    "fenced_writes": "fenced",
    "stored_while_cut_off": "stored_by_cut_off",
    "waited_for_a_node": "waited_for_node",
}
_SPREADS = {
    "queued": "queued_s",
    "move_pause_s": "pauses_s",
    "turns_that_met_a_move_s": "waits_for_move_s",
    "drain_s": "drain_s",
    "drain_bytes": "drain_bytes",
    "drain_sessions": "drain_sessions",
    "recovery_s": "recovery_s",
    "turns_that_met_a_death_s": "waits_after_death_s",
}


def _results(outcome: Outcome, seconds: float, wall_s: float) -> ClusterSimulationResults:
    told = {each.name: getattr(outcome, each.name) for each in fields(outcome)}
    found: dict[str, Any] = {
        **told,
        **{name: told[theirs] for name, theirs in _COUNTS.items()},
        **{name: _times(told[theirs]) for name, theirs in _SPREADS.items()},
        "tokens_per_s": outcome.tokens / seconds,
        "wakes": dict(sorted(outcome.wakes.items())),
        "planner": tuple(_planner(call, took) for call, took in outcome.planner_s.items()),
        "looks": tuple(outcome.looks),
        "wall_s": wall_s,
    }
    return build(ClusterSimulationResults, found)


def _spread(name: str, text: str) -> Spread:
    try:
        p50, p95 = (float(part) / MS for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{name.replace('_', '-')} must be a median and a 95th percentile, such as 10,20, got {text!r}"
        ) from None
    return Spread(p50, p95)


def _speeds(text: str) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return tuple((int(sessions), float(speed)) for sessions, speed in pairs)
    except ValueError:
        raise ConfigError(
            f"decode must be sessions and tokens/s with colons, such as 1:150,8:501, got {text!r}"
        ) from None
