"""`kakeya bench hibernate`: many more sessions than slabs. They sleep and wake, beside streams that go on.

Every session says something, sleeps, and says something again. Both answers are compared with those of a
session that never slept. In between, sessions are woken in turn while streams run, whose pace is measured.
"""

import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from kakeya.bench.benchmark import EngineBenchmark, Results, Run
from kakeya.bench.report import Gate, at_most
from kakeya.bench.stats import percentile, ratio
from kakeya.bench.streams import streaming, tokens_of
from kakeya.bench.tables import MIB, MS, Chart, Table, figure, figures, listing
from kakeya.bench.usage import resident_bytes
from kakeya.config import RuntimeConfig, StateConfig
from kakeya.errors import KakeyaError
from kakeya.metrics import Metrics
from kakeya.options import NumericMode
from kakeya.types import Durability, Numerics, SamplingParams

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

_sleep = partial(typer.Option, rich_help_panel="The sleepers")
_HOST_LIMIT_S, _DISK_LIMIT_S, _PACE_LIMIT = 0.020, 0.060, 1.2
_MARGIN_BYTES = 2**29
# Snapshots are still written when first turns are over; what is quiet must not be measured beside that.
_QUIET_S, _PATIENCE_S = 2.0, 900.0
_LOOK_EVERY_S = 0.5
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class HibernateResults(Results):
    """How sessions woke, and what became of them and of the others."""

    sessions: int = 0
    outputs_checked: int = 0
    wrong_outputs: int = 0
    errors: tuple[str, ...] = ()
    host_wakes: int = 0
    host_wake_p50_s: float | None = None
    host_wake_p95_s: float | None = None
    disk_wakes: int = 0
    disk_wake_p50_s: float | None = None
    disk_wake_p95_s: float | None = None
    quiet_gap_p95_s: float | None = None
    storm_gap_p95_s: float | None = None
    host_bytes: int = 0
    """The most that sleepers took in host memory."""
    disk_bytes: int = 0
    process_bytes: int = 0
    """The most that the process took beyond what it took when its model was loaded."""
    first_turns_s: float = 0.0
    second_turns_s: float = 0.0


class WakeTimes(Metrics):
    """Keeps how long each session took to wake, by where it slept."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, list[float]] = {"host": [], "disk": []}

    def session_woken(self, place: str, seconds: float) -> None:
        self.seconds[place].append(seconds)


@dataclass(frozen=True)
class Hibernate(EngineBenchmark[HibernateResults]):
    """How many sessions share how many slabs, and what each of them says."""

    kind = "hibernate"
    title = "Hibernation benchmark"
    help = "More sessions than slabs: how fast they wake, and whether others notice."
    results = HibernateResults

    numerics: NumericMode = Numerics.EXACT
    sessions: Annotated[int, _sleep(help="Sessions.")] = 400
    slabs: Annotated[int, _sleep(help="Slabs that they share.")] = 16
    streams: Annotated[int, _sleep(help="Streams that go on while others wake.")] = 2
    wakes_per_s: Annotated[float, _sleep(help="How often one is woken meanwhile.")] = 5.0
    storm_s: Annotated[float, _sleep(help="For how long, and as long without.")] = 30.0
    prompt_len: Annotated[int, _sleep(help="Tokens that each holds first: fill the window.")] = 1100
    family: Annotated[
        int, _sleep(help="Sessions that fork one prefix, seven eighths of what they hold first.")
    ] = 1
    gen_tokens: Annotated[int, _sleep(help="Tokens of each answer.")] = 4
    host_tier_bytes: Annotated[int, _sleep(help="The host tier.")] = StateConfig.host_tier_bytes
    disk_tier_bytes: Annotated[int, _sleep(help="The disk tier.")] = StateConfig.disk_tier_bytes
    durability: Annotated[Durability, _sleep(help="What sessions survive.")] = Durability.PROCESS
    seed: Annotated[int, _sleep(help="Which texts.")] = 0

    def __post_init__(self) -> None:
        least = {"sessions": 1, "streams": 1, "prompt_len": 1, "family": 1, "gen_tokens": 1}
        self.require_least(slabs=self.streams + 1, **least)

    def run(self, run: Run[HibernateResults]) -> HibernateResults:
        with tempfile.TemporaryDirectory() as directory:
            return _Night(self, run, Path(directory)).pass_()

    def state(self, directory: Path) -> StateConfig:
        return StateConfig(directory, self.durability, self.host_tier_bytes, self.disk_tier_bytes)

    def gates(self, results: HibernateResults) -> list[Gate]:
        pace = ratio(results.storm_gap_p95_s, results.quiet_gap_p95_s)
        checked = None if not results.outputs_checked else float(results.wrong_outputs)
        failed = None if not results.sessions else float(len(results.errors))
        nobody = "no session slept there"
        host, disk = results.host_wake_p50_s, results.disk_wake_p50_s
        return [
            at_most("wrong outputs", checked, 0, absent="no output was checked"),
            at_most("errors", failed, 0, absent="there was no session"),
            at_most("wake from host memory p50, s", host, _HOST_LIMIT_S, absent=nobody),
            at_most("wake from disk p50, s", disk, _DISK_LIMIT_S, absent=nobody),
            at_most("gap p95 of streams, storm over quiet", pace, _PACE_LIMIT, absent="no stream ran"),
            at_most("host tier bytes", float(results.host_bytes), self.host_tier_bytes, absent=nobody),
            at_most("disk tier bytes", float(results.disk_bytes), self.disk_tier_bytes, absent=nobody),
            at_most("process bytes", float(results.process_bytes), self._most_process_bytes, absent=nobody),
        ]

    @property
    def _most_process_bytes(self) -> int:
        """What sleepers may take, and a margin: weights are read late, and files are mapped."""
        return self.host_tier_bytes + _MARGIN_BYTES

    @staticmethod
    def show(results: HibernateResults) -> list[Table | Chart]:
        host = (results.host_wake_p50_s, results.host_wake_p95_s)
        disk = (results.disk_wake_p50_s, results.disk_wake_p95_s)
        gaps = (results.quiet_gap_p95_s, results.storm_gap_p95_s)
        rows = [
            ("sessions", figure(results.sessions)),
            ("outputs compared with solo runs", figure(results.outputs_checked)),
            ("of these wrong", figure(results.wrong_outputs)),
            ("errors", figure(len(results.errors))),
            ("woken from host memory", figure(results.host_wakes)),
            ("that took p50 / p95, ms", figures(*host, scale=MS, form=",.1f")),
            ("woken from disk", figure(results.disk_wakes)),
            ("that took p50 / p95, ms", figures(*disk, scale=MS, form=",.1f")),
            ("gap of streams p95, quiet / storm, ms", figures(*gaps, scale=MS, form=",.1f")),
            ("host tier, MiB at most", figure(results.host_bytes, MIB)),
            ("disk tier, MiB at most", figure(results.disk_bytes, MIB)),
            ("process beyond its start, MiB at most", figure(results.process_bytes, MIB)),
            ("first turns / second turns, s", figures(results.first_turns_s, results.second_turns_s)),
            ("share of the machine that others used", figure(results.bystanders_share, form=".1%")),
        ]
        return [listing("Sleepers", ("what", "value"), rows, labels=1)]


@dataclass(frozen=True)
class Family:
    """Sessions that begin alike, and what each goes on with."""

    prefix: list[int]
    texts: list[list[int]]


class _Night:
    """One run: first turns, streams alone, streams beside wakes, second turns, and solo runs."""

    def __init__(self, bench: Hibernate, run: Run[HibernateResults], directory: Path) -> None:
        self._bench, self._run, self._directory = bench, run, directory
        self._chance = random.Random(bench.seed)
        self._times = WakeTimes()
        self._errors: list[str] = []
        self._host_bytes = self._disk_bytes = 0
        self._first_bytes = self._most_bytes = 0
        self._next_look = 0.0

    def pass_(self) -> HibernateResults:
        from kakeya.runtime import Runtime  # torch takes a second to import

        bench = self._bench
        settings = RuntimeConfig(session_idle_ttl_s=None, state=bench.state(self._directory))
        config = bench.engine_config(capacity=bench.slabs)
        with Runtime.open(bench.model, config, settings, self._times) as runtime:
            self._first_bytes = resident_bytes() or 0
            families = self._families(runtime.model_config.vocab_size)
            began = time.monotonic()
            sessions, first = self._first_turns(runtime, families)
            first_s = time.monotonic() - began
            self._settle(runtime)
            self._forget_times()
            quiet, storm = self._storm(runtime, sessions)
            began = time.monotonic()
            second = self._second_turns(runtime, sessions)
            second_s = time.monotonic() - began
        said = list(zip(first, second, strict=True))
        return self._results(said, self._solo(families), quiet, storm, first_s, second_s)

    def _families(self, vocabulary: int) -> list[Family]:
        """Texts for all sessions."""
        bench = self._bench
        own = bench.prompt_len if bench.family == 1 else max(1, bench.prompt_len // 8)

        def text(length: int) -> list[int]:
            return [self._chance.randrange(vocabulary) for _ in range(length)]

        sizes = [
            min(bench.family, bench.sessions - first) for first in range(0, bench.sessions, bench.family)
        ]
        return [Family(text(bench.prompt_len - own), [text(own) for _ in range(size)]) for size in sizes]

    def _settle(self, runtime: "Runtime") -> None:
        """Wait until nothing is written any more."""
        end, written, since = time.monotonic() + _PATIENCE_S, -1, 0.0
        while time.monotonic() < end:
            self._look(runtime)
            tiers = runtime.tiers()
            now = 0 if tiers is None else tiers.disk_bytes
            if now != written:
                written, since = now, time.monotonic()
            elif time.monotonic() - since >= _QUIET_S:
                return
            time.sleep(0.1)

    def _forget_times(self) -> None:
        """What first turns took is not of interest: nobody slept for long."""
        for seconds in self._times.seconds.values():
            seconds.clear()

    def _first_turns(
        self, runtime: "Runtime", families: Sequence[Family]
    ) -> tuple[list[str], list[list[int]]]:
        def turns(family: Family) -> list[tuple[str, list[int]]]:
            with _prefix(runtime, family) as begin:
                sessions = ((begin(), text) for text in family.texts)
                return [(session, self._say(runtime, session, text)) for session, text in sessions]

        done = [each for turned in self._all(turns, families, runtime, "first turns") for each in turned]
        return [session for session, _ in done], [said for _, said in done]

    def _second_turns(self, runtime: "Runtime", sessions: Sequence[str]) -> list[list[int]]:
        order = list(range(len(sessions)))
        self._chance.shuffle(order)
        turns = [lambda session=sessions[place]: self._say(runtime, session, [2, 3]) for place in order]
        said = self._all(lambda turn: turn(), turns, runtime, "second turns")
        return [answer for _, answer in sorted(zip(order, said, strict=True))]

    def _say(self, runtime: "Runtime", session: str, tokens: list[int]) -> list[int]:
        try:
            runtime.append(session, tokens)
            sampling = SamplingParams(temperature=1.0, seed=1)
            return tokens_of(runtime.generate(session, self._bench.gen_tokens, sampling))
        except KakeyaError as error:
            self._errors.append(f"{type(error).__name__}: {error}")
            return []

    def _all(
        self, work: "Callable[[T], R_]", items: Sequence[T], runtime: "Runtime", label: str
    ) -> "list[R_]":
        """The work on all items, a few at once, fewer than there are slabs."""
        done: list[R_] = []
        with ThreadPoolExecutor(max(1, min(8, self._bench.slabs // 2))) as pool:
            for result in pool.map(work, items):
                done.append(result)
                self._look(runtime)
                self._run.progress(len(done) / len(items), label)
        return done

    def _look(self, runtime: "Runtime") -> None:
        """Note the most that is taken, now and then: to count thousands of sessions holds up the others."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_EVERY_S
        self._most_bytes = max(self._most_bytes, resident_bytes() or 0)
        tiers = runtime.tiers()
        if tiers is not None:
            self._host_bytes = max(self._host_bytes, tiers.host_bytes)
            self._disk_bytes = max(self._disk_bytes, tiers.disk_bytes)

    def _storm(self, runtime: "Runtime", sessions: Sequence[str]) -> tuple[list[float], list[float]]:
        """Gaps between tokens of streams, alone and while others wake."""
        prompts = [[2, 3, 4]] * self._bench.streams
        with streaming(runtime, prompts) as gaps:
            began = time.perf_counter()
            time.sleep(self._bench.storm_s)
            self._run.progress(0.5, "others wake")
            middle = time.perf_counter()
            while time.perf_counter() < middle + self._bench.storm_s:
                runtime.append(self._chance.choice(sessions), [])
                self._look(runtime)
                time.sleep(1 / self._bench.wakes_per_s)
            end = time.perf_counter()
        return gaps(began, middle), gaps(middle, end)

    def _solo(self, families: Sequence[Family]) -> Iterator[tuple[list[int], list[int]]]:
        """What sessions say that never sleep and have no company."""
        from kakeya.runtime import Runtime  # torch takes a second to import

        bench = self._bench
        with Runtime.open(bench.model, bench.engine_config(capacity=2)) as runtime:
            for place, family in enumerate(families):
                self._run.progress(place / len(families), "solo runs")
                with _prefix(runtime, family) as begin:
                    for text in family.texts:
                        session = begin()
                        yield self._say(runtime, session, text), self._say(runtime, session, [2, 3])
                        runtime.close_session(session)

    def _results(
        self,
        said: "Sequence[tuple[list[int], list[int]]]",
        solo: "Iterable[tuple[list[int], list[int]]]",
        quiet: list[float],
        storm: list[float],
        first_s: float,
        second_s: float,
    ) -> HibernateResults:
        wrong = sum(mine != alone for mine, alone in zip(said, solo, strict=True))
        host, disk = self._times.seconds["host"], self._times.seconds["disk"]
        return HibernateResults(
            sessions=len(said),
            outputs_checked=2 * len(said),
            wrong_outputs=wrong,
            errors=tuple(self._errors),
            host_wakes=len(host),
            host_wake_p50_s=percentile(host, 50),
            host_wake_p95_s=percentile(host, 95),
            disk_wakes=len(disk),
            disk_wake_p50_s=percentile(disk, 50),
            disk_wake_p95_s=percentile(disk, 95),
            quiet_gap_p95_s=percentile(quiet, 95),
            storm_gap_p95_s=percentile(storm, 95),
            host_bytes=self._host_bytes,
            disk_bytes=self._disk_bytes,
            process_bytes=max(0, self._most_bytes - self._first_bytes),
            first_turns_s=first_s,
            second_turns_s=second_s,
        )


R_ = TypeVar("R_")


@contextmanager
def _prefix(runtime: "Runtime", family: Family) -> Iterator[Callable[[], str]]:
    """The function makes a session that begins as the family does, which is computed once."""
    if not family.prefix:
        yield lambda: runtime.create_session(eos_token_ids=())
        return
    first = runtime.create_session(eos_token_ids=())
    runtime.append(first, family.prefix)
    list(runtime.generate(first, 1, SamplingParams(seed=1)))
    yield lambda: runtime.fork(first)[0]
    runtime.close_session(first)
