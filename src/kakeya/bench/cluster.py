"""`kakeya bench cluster`: homes, machines and front ends of a cluster on Ray die and are drained under load.

Ray's nodes are processes of this machine. Agents talk to a front end through the SDK. In the end every
session's history is compared with that of a session on a server of its own.
"""

import asyncio
import importlib.util
import os
import random
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kakeya.bench.benchmark import EngineBenchmark, Results, Run
from kakeya.bench.processes import KAKEYA, ChildProcess, clean_environment, serve_flags
from kakeya.bench.report import Gate, at_least, at_most
from kakeya.bench.stats import percentile
from kakeya.bench.tables import Chart, Table, figure, listing
from kakeya.bench.witnesses import Witnesses
from kakeya.dialing import Retry
from kakeya.errors import ConfigError, KakeyaError, PeerFailed
from kakeya.options import NumericMode, flags
from kakeya.types import Numerics

if TYPE_CHECKING:
    from kakeya.client import AsyncClient
    from kakeya.cluster.on_ray import RayCluster

_storm = partial(typer.Option, rich_help_panel="The cluster")
# Agents must not give up before a home is back, however busy the machine is.
_RETRY = Retry(attempts=4000, first_delay=0.05, longest_delay=0.5)
# A node is known to be dead after a few seconds. Ray's own defaults take half a minute.
_HEALTH = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 4,
}
HOME, ACTOR, NODE, FRONT, DRAIN = "home", "actor", "node", "front end", "drain"
KILLS = (HOME, ACTOR, NODE, FRONT)


@dataclass(frozen=True)
class Event:
    """What was done to the cluster. `seconds` until a session that it met answered again; of a drain, until
    the node was empty, with the sessions and bytes that moved."""

    kind: str
    seconds: float
    sessions: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ClusterResults(Results):
    """What the agents did, and what was wrong with it."""

    events: tuple[Event, ...] = ()
    sessions: int = 0
    forks: int = 0
    appended_tokens: int = 0
    generated_tokens: int = 0
    generates: int = 0
    checked_lengths: int = 0
    lost: int = 0
    """Sessions whose history has another length than their client was told."""
    wrong: int = 0
    """Generates whose tokens a session on a server of its own does not say."""
    twice: int = 0
    """Sessions that two homes had at the end."""
    errors: tuple[str, ...] = ()

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]


@dataclass(frozen=True)
class ClusterBench(EngineBenchmark[ClusterResults]):
    """How large the cluster is, who uses it, and what happens to it."""

    kind = "cluster"
    title = "Cluster benchmark"
    help = "Kill and drain homes of a cluster on Ray under load: nothing is lost, and sessions go on exactly."
    results = ClusterResults

    numerics: NumericMode = Numerics.EXACT
    window: Annotated[int, _storm(help="Most recent tokens kept.")] = 64
    nodes: Annotated[int, _storm(help="Nodes, each with one home.")] = 3
    agents: Annotated[int, _storm(help="Agents at once, each with one session at a time.")] = 24
    slabs: Annotated[int, _storm(help="Each home's capacity.")] = 8
    kills: Annotated[int, _storm(help="Kills: of homes, their actors, nodes and the front end.")] = 12
    drains: Annotated[int, _storm(help="Nodes that are drained, one after another.")] = 6
    pause_s: Annotated[float, _storm(help="Seconds between two of these.")] = 2.0
    seed: Annotated[int, _storm(help="Which texts, and which moments.")] = 0

    def __post_init__(self) -> None:
        self.require_least(nodes=2, agents=1, slabs=1, kills=0, drains=0, pause_s=0)

    def check(self, *, picture: bool) -> None:
        super().check(picture=picture)
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("the package ray is not installed: pip install 'kakeya[cluster]'")

    def run(self, run: Run[ClusterResults]) -> ClusterResults:
        """Let agents talk while things happen. Then check every session."""
        from kakeya.runtime import Runtime  # torch takes a second to import

        with tempfile.TemporaryDirectory() as directory, Fleet(self, Path(directory)) as fleet:
            done = run.asynchronously(_Storm(self, run, fleet).rage())
        wrong = 0
        with Runtime.open(self.model, self.engine_config(capacity=1)) as runtime:
            sessions = len(done.told.ledgers)
            for place in range(sessions):
                run.progress(place / sessions, "checking sessions")
                wrong += done.told.wrong_generates(runtime, place)
        return done.results(wrong)

    def gates(self, results: ClusterResults) -> list[Gate]:
        nothing = "nothing was generated" if not results.generates else ""
        unchecked = "no session was checked" if not results.checked_lengths else ""
        return [
            at_least("kills", float(len(results.of(*KILLS))), self.kills, absent="nothing was killed"),
            at_least("drains", float(len(results.of(DRAIN))), self.drains, absent="nothing was drained"),
            at_most("sessions that lost tokens", _judged(results.lost, unchecked), 0, absent=unchecked),
            at_most("wrong generates", _judged(results.wrong, nothing), 0, absent=nothing),
            at_most("sessions at two homes", _judged(results.twice, unchecked), 0, absent=unchecked),
            at_most("errors that agents saw", _judged(len(results.errors), nothing), 0, absent=nothing),
        ]

    @staticmethod
    def show(results: ClusterResults) -> list[Table | Chart]:
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
            listing("The cluster", ("what", "value"), rows, labels=1),
            listing("What happened", columns, happened, labels=1),
            *(errors if results.errors else ()),
        ]


def _judged(count: int, absent: str) -> float | None:
    return None if absent else float(count)


class Fleet:
    """Ray's head and nodes as processes of this machine, the homes on them, and a front end."""

    def __init__(self, bench: ClusterBench, directory: Path) -> None:
        self._bench = bench
        self._shared = directory / "shared"
        self._stack = ExitStack()
        self._port = _free_port()
        self._front: ChildProcess | None = None
        self._nodes: list[Any] = []

    @property
    def address(self) -> str:
        """Of the front end. It stays the same when that is started again."""
        return f"127.0.0.1:{self._port}"

    def __enter__(self) -> "Fleet":
        from ray.cluster_utils import Cluster

        from kakeya.cluster.members import make_secret
        from kakeya.cluster.on_ray import connected

        try:
            head = {"num_cpus": 0, "include_dashboard": False, "_system_config": _HEALTH}
            # Its hooks for the end want the main thread, and nodes come from others.
            self._ray = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
            self._stack.callback(self._ray.shutdown)
            for _ in range(self._bench.nodes):
                self.add_node()
            self.cluster: RayCluster = self._stack.enter_context(connected(self._ray.address))
            self.secret = make_secret(self._shared / "secret")
            self.settle()
            self.start_front()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._front is not None:
            self._front.kill()
            self._front.close()
        self._stack.close()

    def add_node(self) -> None:
        """One more node, with room for its own home and for one that had to leave another node."""
        self._nodes.append(self._ray.add_node(num_cpus=2))

    def settle(self) -> None:
        """Start the homes that do not live."""
        from kakeya.cluster.on_ray import Group

        bench = self._bench
        # Appends and forks need slabs beside those that generate, also while a node is empty.
        at_once = max(1, bench.slabs // 2)
        settings = {
            "shared": self._shared,
            "log-level": "error",
            "max-concurrent": at_once,
            "queue-depth": 4 * bench.agents,
            "queue-max-wait-s": 0,
            "shutdown-grace-s": 5,
        }
        arguments = [*serve_flags(bench, bench.slabs), *flags(settings)]
        self.cluster.up(Group("home", bench.nodes, tuple(arguments), host="127.0.0.1"), self.secret)

    def start_front(self) -> None:
        """Raises PeerFailed when it does not come."""
        if self._front is not None:
            self._front.close()
        serve = ("serve", "--cluster", self._ray.address, "--bind", self.address, "--http", "off")
        self._front = ChildProcess(["-c", KAKEYA, *serve, "--log-level", "error"], env=clean_environment())
        deadline = time.monotonic() + 120
        while "serves a cluster" not in self._front.said():
            if not self._front.running or time.monotonic() > deadline:
                raise PeerFailed(f"the front end does not start: {self._front.last_words()}")
            time.sleep(0.05)

    def kill(self, kind: str, home: Any) -> None:
        """End something at once, and see to it that there is a next one where nobody else does."""
        if kind == FRONT:
            assert self._front is not None
            self._front.kill()
            self.start_front()
        elif kind == NODE:
            node = next(each for each in self._nodes if each.node_id.startswith(home.node))
            self._nodes.remove(node)
            self._ray.remove_node(node, allow_graceful=False)
            self.add_node()
        else:
            pid = self.cluster.process_of(home.name)
            assert pid is not None
            if kind == ACTOR:
                import psutil

                pid = psutil.Process(pid).ppid()
            os.kill(pid, signal.SIGKILL)


class _Storm:
    """The agents, and what happens to the cluster meanwhile."""

    def __init__(self, bench: ClusterBench, run: Run[ClusterResults], fleet: Fleet) -> None:
        self._bench, self._run, self._fleet = bench, run, fleet
        self._chance = random.Random(bench.seed)
        self._events: list[Event] = []
        self._twice = 0
        self.told = Witnesses()

    async def rage(self) -> "_Storm":
        from kakeya.client import AsyncClient

        async with AsyncClient(self._fleet.address, timeout=600.0, retry=_RETRY) as client:
            vocabulary = (await client.server_info()).vocab_size
            agents = [
                asyncio.create_task(
                    self.told.live(client, random.Random(f"{self._bench.seed} {number}"), vocabulary)
                )
                for number in range(self._bench.agents)
            ]
            await self._happen(client)
            self.told.over.set()
            await asyncio.gather(*agents)
            self._twice = await asyncio.to_thread(self._found_twice)
        return self

    async def _happen(self, client: "AsyncClient") -> None:
        bench = self._bench
        kills = [KILLS[number % len(KILLS)] for number in range(bench.kills)]
        plan = [*kills, *[DRAIN] * bench.drains]
        self._chance.shuffle(plan)
        for number, kind in enumerate(plan):
            await asyncio.sleep(bench.pause_s)
            if self._run.interruption.reason is not None:
                return
            self._run.progress(number / len(plan), f"{number + 1} of {len(plan)}: {kind}")
            happen: Callable[..., Awaitable[Event]] = self._drain if kind == DRAIN else self._kill
            self._events.append(await happen(client, kind))
            self._run.checkpoint(self.results(0))

    async def _kill(self, client: "AsyncClient", kind: str) -> Event:
        """Kill it, and wait for an answer about a session that it had."""
        home = await asyncio.to_thread(self._some_home)
        met = await asyncio.to_thread(self._sessions_at, home)
        began = time.monotonic()
        killing = asyncio.create_task(asyncio.to_thread(self._fleet.kill, kind, home))
        if kind != FRONT:
            await asyncio.sleep(0.05)
        with suppress(KakeyaError):  # one that its agent has closed is answered as well
            await client.session(met[0] if met else "home-1.unknown").info()
        seconds = time.monotonic() - began
        await killing
        return Event(kind, seconds)

    async def _drain(self, client: "AsyncClient", kind: str) -> Event:
        while True:
            home = await asyncio.to_thread(self._some_home)
            try:
                drained, _ = await asyncio.to_thread(self._fleet.cluster.drain, home.node)
                break
            except ConfigError:  # killed just now, it has come back at another node
                continue
        await asyncio.to_thread(self._fleet.settle)
        return Event(DRAIN, drained.seconds, drained.sessions, drained.bytes)

    def _some_home(self) -> Any:
        """A home that is there, once all are."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            homes = list(self._fleet.cluster.view().homes)
            if len(homes) >= self._bench.nodes and not any(home.silent for home in homes):
                return self._chance.choice(homes)
            time.sleep(0.1)
        raise PeerFailed("the homes of the cluster do not come back")

    def _sessions_at(self, home: Any) -> list[str]:
        from kakeya.cluster.calling import HomeCalls

        with suppress(KakeyaError), HomeCalls(home.address, self._fleet.secret) as calls:
            return list(calls.movable())
        return []

    def _found_twice(self) -> int:
        """Sessions that more than one home has, once all are there again."""
        self._some_home()
        homes = self._fleet.cluster.view().homes
        found = Counter(session for home in homes for session in self._sessions_at(home))
        return sum(times > 1 for times in found.values())

    def results(self, wrong: int) -> ClusterResults:
        told = self.told
        return ClusterResults(
            events=tuple(self._events),
            sessions=len(told.ledgers),
            forks=told.forks,
            appended_tokens=told.appended_tokens,
            generated_tokens=told.generated_tokens,
            generates=told.generates,
            checked_lengths=told.checked,
            lost=told.lost,
            wrong=wrong,
            twice=self._twice,
            errors=tuple(told.errors),
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
