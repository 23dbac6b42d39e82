"""`kakeya bench speculation`: what proposers gain over plain decoding.

Two servers with the same model, one of which drafts, answer the same chats in turns: by kind of text,
temperature and number of sessions. With `--rtt-sweep` the proposer is another process at growing distances.
With `--acceptances` it is one that is right as often as it is told to, on random weights.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Annotated, Any

import typer

from kakeya.bench import acceptance_curve, rtt_sweep
from kakeya.bench.benchmark import EngineBenchmark, Quick, Repeats, Results, Run, numbers
from kakeya.bench.contest import Chats, Played, contest, of_each
from kakeya.bench.machine import public_proposers
from kakeya.bench.processes import Server, server_process
from kakeya.bench.report import Gate, at_least, busy, bystanders_gate
from kakeya.bench.stats import Samples, known, median_of_ratios
from kakeya.bench.tables import Chart, Column, Series, Table
from kakeya.bench.texts_to_draft import KINDS
from kakeya.config import DEFAULT_MODEL, DRAFTER, MODEL, NGRAM, NO_PROPOSER, parse_proposers
from kakeya.errors import ConfigError
from kakeya.types import BackendChoice, KernelChoice, Numerics

# What a proposer must gain over plain decoding: one session, greedy.
GAINS = {NGRAM: ("copy", 1.6), MODEL: ("code", 1.3)}
# What a drafter must gain on a GPU: by kind of text, temperature and sessions. The package has one for the
# default model; for others one was trained.
DRAFTER_GAINS = {
    ("chat", 0.0, 1): 2.5,
    ("chat", 0.7, 1): 1.8,
    ("chat", 0.0, 16): 1.8,
    ("chat", 0.0, 256): 1.0,
}
TRAINED_GAINS = {("code", 0.0, 1): 2.5}
# The same over answers that end by themselves: those that do not go round in circles.
ENDED_GAIN = 2.2
WORST = 0.97
NOT_MEASURED = "not measured in this run"
TIES = "fast numerics round otherwise in longer steps, so tokens that are nearly alike may change places"
QUICK = {"kinds": "chat,copy", "sessions": "1,2", "temperatures": "0", "max_tokens": 16, "repeats": 1}
RTTS = "0,1,5,15,30,60,100,150"
SWEEP = {"kinds": "code", "sessions": "1", "temperatures": "0"}
QUICK_SWEEP = {"rtts": "0,15"}
SHAPE = "smollm2-135m"
_PLAIN, _DRAFTING = "plain", "drafting"

_drafts = partial(typer.Option, rich_help_panel="The drafts")


@dataclass(frozen=True)
class Speedup:
    """One kind of text, at one temperature, in so many sessions: both servers' tokens a second.

    `ended` is the share of answers that ended by themselves, and `plain_ended` and `drafted_ended` are the
    speeds of these alone. Greedy answers of small models go round in circles, which looking up likes. `same`
    is the share of answers that both servers gave alike.
    """

    proposer: str
    kind: str
    temperature: float
    sessions: int
    plain: Samples
    drafted: Samples
    tokens: int
    proposed: int
    accepted: int
    ended: float
    same: float
    plain_ended: Samples = field(default_factory=Samples)
    drafted_ended: Samples = field(default_factory=Samples)

    @property
    def speedup(self) -> float | None:
        return median_of_ratios(self.drafted.samples, self.plain.samples)

    @property
    def ended_speedup(self) -> float | None:
        return median_of_ratios(self.drafted_ended.samples, self.plain_ended.samples)

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None

    @property
    def tokens_a_step(self) -> float:
        return self.tokens / (self.tokens - self.accepted)

    def label(self) -> str:
        return _label(self.proposer, self.kind, self.temperature, self.sessions)


def _label(proposer: str, kind: str, temperature: float, sessions: int) -> str:
    plural = "session" if sessions == 1 else "sessions"
    return f"{proposer}, {kind}, temperature {temperature:g}, {sessions} {plural}"


@dataclass(frozen=True)
class SpeculationResults(Results):
    """The rows, in the order in which they were measured."""

    rows: list[Speedup] = field(default_factory=list)
    distances: list[rtt_sweep.Distance] = field(default_factory=list)
    gains: list[acceptance_curve.Gain] = field(default_factory=list)


@dataclass(frozen=True)
class Speculation(EngineBenchmark[SpeculationResults]):
    """Which proposers draft what."""

    kind = "speculation"
    title = "Speculation benchmark"
    help = "What drafting gains over plain decoding: by proposer, kind of text, temperature and sessions."
    results = SpeculationResults

    proposers: Annotated[str, _drafts(help="Proposers to compare with none, with commas.")] = NGRAM
    kinds: Annotated[str, _drafts(help="Kinds of text, with commas.")] = ",".join(KINDS)
    temperatures: Annotated[str, _drafts(help="With commas; 0 is greedy.")] = "0,0.7,1"
    sessions: Annotated[str, _drafts(help="Sessions that answer at once, with commas.")] = "1,4,16"
    max_tokens: Annotated[int, _drafts(help="The most tokens of an answer.")] = 128
    rtt_sweep: Annotated[
        bool,
        _drafts(
            "--rtt-sweep",
            help="Run the proposers in a process of their own, at growing distances; code, greedy and one "
            "session unless told.",
        ),
    ] = False
    rtts: Annotated[str, _drafts(help="The distances: round trips in ms, with commas.")] = RTTS
    acceptances: Annotated[
        str,
        _drafts(
            help="Measure a proposer that costs nothing and is right so often, such as 0,0.5,0.8,1: "
            "it knows what plain decoding says. On random weights of --shape."
        ),
    ] = ""
    shape: Annotated[str, _drafts(help="The sizes of a model for --acceptances.")] = SHAPE
    repeats: Repeats = 3
    quick: Quick = False

    def __post_init__(self) -> None:
        self.require_least(max_tokens=2, repeats=1)
        if self.rtt_sweep and self.acceptances:
            raise ConfigError("--rtt-sweep and --acceptances are runs of their own: leave one of them out")
        if not all(0 <= chance <= 1 for chance in self.chances()):
            raise ConfigError(f"acceptances must be between 0 and 1, got {self.acceptances!r}")
        unknown = [name for name in self.kinds.split(",") if name not in KINDS]
        if unknown:
            raise ConfigError(f"kinds must be some of {', '.join(KINDS)}, got {unknown[0]!r}")
        numbers("sessions", self.sessions)
        if min(numbers("rtts", self.rtts)) < 0:
            raise ConfigError(f"rtts must not be below 0, got {self.rtts!r}")
        self.warmth()
        for written in self.drafting():
            if not parse_proposers(written):
                raise ConfigError(f"proposers are compared with none: leave {written!r} out")

    def presets(self) -> dict[str, Any]:
        sweep = SWEEP if self.rtt_sweep else {}
        return (QUICK if self.quick else {}) | sweep | (QUICK_SWEEP if sweep and self.quick else {})

    def drafting(self) -> list[str]:
        return self.proposers.split(",")

    def warmth(self) -> list[float]:
        return _fractions("temperatures", self.temperatures)

    def chances(self) -> list[float]:
        return _fractions("acceptances", self.acceptances) if self.acceptances else []

    @property
    def model_to_fetch(self) -> str | None:
        return None if self.acceptances else super().model_to_fetch

    def check(self, *, picture: bool) -> None:
        super().check(picture=picture)
        if self.acceptances:
            from kakeya.bench.gpu.shapes import SHAPES

            if self.shape not in SHAPES:
                raise ConfigError(f"shape must be one of {', '.join(SHAPES)}, got {self.shape!r}")

    def cells(self) -> Iterator[Chats]:
        for cell in product(self.kinds.split(","), self.warmth(), numbers("sessions", self.sessions)):
            yield Chats(*cell, self.max_tokens)

    def run(self, run: Run[SpeculationResults]) -> SpeculationResults:
        if self.acceptances:
            return self._curve(run)
        return run.asynchronously(self._sweep(run) if self.rtt_sweep else self._run(run))

    async def _sweep(self, run: Run[SpeculationResults]) -> SpeculationResults:
        results, cells = SpeculationResults(), list(product(self.cells(), numbers("rtts", self.rtts)))
        work = run.work(len(self.drafting()) * len(cells))
        for written in self.drafting():
            async with rtt_sweep.scene(self, written, self._capacity()) as scene:
                run.facts |= scene.facts
                with run.watching(scene.pids):
                    for chats, rtt_ms in cells:
                        work.piece(f"{written} at {rtt_ms} ms: {chats.label()}")
                        measuring = scene.measure(public_proposers(written), chats, rtt_ms, self.repeats)
                        row = await run.interruption.unless_asked(measuring)
                        if row is None:
                            return results
                        results = SpeculationResults(distances=[*results.distances, row])
                        run.checkpoint(results)
        return results

    def _curve(self, run: Run[SpeculationResults]) -> SpeculationResults:
        from kakeya.bench.gpu.foretold import measured_gains

        counts, results = numbers("sessions", self.sessions), SpeculationResults()
        work = run.work(len(counts) * len(self.chances()))
        config = self.engine_config(capacity=self._capacity())
        with run.watching([os.getpid()]):
            work.begin(f"{self.shape}: acceptances {self.acceptances}")
            for row in measured_gains(
                self.shape, config, counts, self.chances(), self.max_tokens, self.repeats
            ):
                results = SpeculationResults(gains=[*results.gains, row])
                run.checkpoint(results)
                work.advance(1)
        return results

    async def _run(self, run: Run[SpeculationResults]) -> SpeculationResults:
        results = SpeculationResults()
        cells = list(self.cells())
        work = run.work(len(self.drafting()) * len(cells))
        for written in self.drafting():
            async with AsyncExitStack() as stack:
                plain = await self._server(stack, NO_PROPOSER)
                drafting = await self._server(stack, written)
                run.facts |= {"server": plain.facts}
                with run.watching([os.getpid(), plain.pid, drafting.pid]):
                    for chats in cells:
                        work.piece(f"{written}: {chats.label()}")
                        pair = contest({_PLAIN: plain, _DRAFTING: drafting}, chats, self.repeats)
                        played = await run.interruption.unless_asked(pair)
                        if played is None:
                            return results
                        row = _speedup(public_proposers(written), chats, played)
                        results = SpeculationResults([*results.rows, row])
                        run.checkpoint(results)
        return results

    async def _server(self, stack: AsyncExitStack, proposer: str) -> Server:
        engine = replace(self, proposer=proposer)
        return await stack.enter_async_context(server_process(engine, self._capacity(), (), http=True))

    def _capacity(self) -> int:
        return max(numbers("sessions", self.sessions))

    def gates(self, results: SpeculationResults) -> list[Gate]:
        """What each proposer is for, nothing made slower, and the same answers."""
        noise, ties = busy(results.bystanders_share), None if self._has_same_bits else TIES
        if self.rtt_sweep:
            judged = rtt_sweep.gates(results.distances, noise, NOT_MEASURED, ties)
            return [*judged, bystanders_gate(results.bystanders_share)]
        if self.acceptances:
            judged = acceptance_curve.gates(results.gains, noise, NOT_MEASURED)
            return [*judged, bystanders_gate(results.bystanders_share)]
        rows = {row.label(): row for row in results.rows if not noise}
        worst = min(known(row.speedup for row in rows.values()), default=None)
        same = min((row.same for row in results.rows if not ties), default=None)
        return [
            *self._gain_gates(rows, noise or NOT_MEASURED),
            at_least("the least speed over plain decoding", worst, WORST, absent=noise or NOT_MEASURED),
            at_least("answers that are the same", same, 1.0, absent=ties or NOT_MEASURED),
            bystanders_gate(results.bystanders_share),
        ]

    @property
    def _has_same_bits(self) -> bool:
        """Whether a draft does not change what is rounded: so it is with our kernels on a CPU, too."""
        by_kernels = self.backend is not BackendChoice.CUDA and self.kernels is not KernelChoice.TORCH
        return by_kernels or self.numerics is Numerics.EXACT

    def _gain_gates(self, rows: dict[str, Speedup], absent: str) -> Iterator[Gate]:
        for written in self.drafting():
            proposer, limits = public_proposers(written), self._limits(written)
            for cell, limit in limits.items():
                label = _label(proposer, *cell)
                found = rows[label].speedup if label in rows else None
                yield at_least(f"{label}: speed over plain", found, limit, absent=absent)
            if limits.keys() >= DRAFTER_GAINS.keys():
                label = _label(proposer, "chat", 0.0, 1)
                found = rows[label].ended_speedup if label in rows else None
                why = "no answer ended by itself" if label in rows else absent
                name = f"{label}: speed of answers that end by themselves"
                yield at_least(name, found, ENDED_GAIN, absent=why)

    def _limits(self, written: str) -> dict[tuple[str, float, int], float]:
        """What these proposers must gain: by kind of text, temperature and sessions."""
        kinds = {choice.kind for choice in parse_proposers(written)}
        limits = {(kind, 0.0, 1): limit for each, (kind, limit) in GAINS.items() if each in kinds}
        if DRAFTER in kinds and self.backend is BackendChoice.CUDA:
            limits |= DRAFTER_GAINS if self.model == DEFAULT_MODEL else TRAINED_GAINS
        return limits

    @staticmethod
    def show(results: SpeculationResults) -> list[Table | Chart]:
        if results.distances:
            return rtt_sweep.show(results.distances)
        if results.gains:
            return acceptance_curve.show(results.gains)
        charts = [
            _chart(results.rows, proposer, temperature)
            for proposer in dict.fromkeys(row.proposer for row in results.rows)
            for temperature in dict.fromkeys(row.temperature for row in results.rows)
        ]
        charts[:1] = [replace(chart, picture=True) for chart in charts[:1]]
        return [Table("Speed over plain decoding", _COLUMNS, results.rows, labels=2), *charts]


def _fractions(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} must be numbers with commas, such as 0,0.7, got {text!r}") from None


_COLUMNS = [
    Column("proposer", "proposer"),
    Column("text", "kind"),
    Column("temperature", "temperature", form="g"),
    Column("sessions", "sessions"),
    Column("plain, tokens/s", "plain.median"),
    Column("drafting, tokens/s", "drafted.median"),
    Column("speed over plain", "speedup", form=".2f"),
    Column("accepted", "acceptance", form=".0%"),
    Column("tokens a step", "tokens_a_step", form=".2f"),
    Column("ended by themselves", "ended", form=".0%"),
    Column("speed of these over plain", "ended_speedup", form=".2f"),
    Column("same answers", "same", form=".0%"),
]


def _chart(rows: Sequence[Speedup], proposer: str, temperature: float) -> Chart:
    chosen = [row for row in rows if row.proposer == proposer and row.temperature == temperature]
    kinds = list(dict.fromkeys(row.kind for row in chosen))
    series = []
    for sessions in dict.fromkeys(row.sessions for row in chosen):
        found = {row.kind: row.speedup for row in chosen if row.sessions == sessions}
        series.append(Series(f"{sessions} at once", [found.get(kind) for kind in kinds]))
    title = f"{proposer}, temperature {temperature:g}"
    return Chart(title, "times plain decoding", "kind of text", kinds, series, bars=True)


def _speedup(proposer: str, chats: Chats, played: Played) -> Speedup:
    ended = played.ended(_DRAFTING)
    return Speedup(
        proposer,
        chats.kind,
        chats.temperature,
        chats.sessions,
        Samples.of(played.speeds[_PLAIN]),
        Samples.of(played.speeds[_DRAFTING]),
        tokens=played.tokens(_DRAFTING),
        proposed=played.proposed(_DRAFTING),
        accepted=played.accepted(_DRAFTING),
        ended=len(ended) / len(played.outcomes[_DRAFTING]),
        same=played.same(_PLAIN, _DRAFTING),
        plain_ended=Samples.of([of_each(played.ended(_PLAIN))]),
        drafted_ended=Samples.of([of_each(ended)]),
    )
