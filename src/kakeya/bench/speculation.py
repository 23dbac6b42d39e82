"""`kakeya bench speculation`: what proposers gain over plain decoding.

Two servers with the same model, one of which drafts, answer the same chats in turns: by kind of text,
temperature and number of sessions.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Annotated, Any

import typer

from kakeya.bench.arrivals import Arrival, Outcome, play
from kakeya.bench.benchmark import EngineBenchmark, Quick, Repeats, Results, Run, numbers
from kakeya.bench.machine import public_proposers
from kakeya.bench.processes import Server, server_process
from kakeya.bench.report import Gate, at_least, busy, bystanders_gate
from kakeya.bench.stats import Samples, known, median_of_ratios
from kakeya.bench.tables import Chart, Column, Series, Table
from kakeya.bench.texts_to_draft import KINDS, Task, tasks
from kakeya.config import MODEL, NGRAM, NO_PROPOSER, parse_proposers
from kakeya.errors import ConfigError, RemoteError

# What a proposer must gain over plain decoding: one session, greedy.
GAINS = {NGRAM: ("copy", 1.6), MODEL: ("code", 1.3)}
WORST = 0.97
PATIENCE_S = 600.0
NOT_MEASURED = "not measured in this run"
QUICK = {"kinds": "chat,copy", "sessions": "1,2", "temperatures": "0", "max_tokens": 16, "repeats": 1}

_drafts = partial(typer.Option, rich_help_panel="The drafts")


@dataclass(frozen=True)
class Speedup:
    """One kind of text, at one temperature, in so many sessions: both servers' tokens a second.

    `ended` is the share of answers that ended by themselves. Greedy answers of small models go round in
    circles, which looking up likes. `same` is the share of answers that both servers gave alike.
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

    @property
    def speedup(self) -> float | None:
        return median_of_ratios(self.drafted.samples, self.plain.samples)

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None

    @property
    def tokens_a_step(self) -> float:
        return self.tokens / (self.tokens - self.accepted)

    def label(self) -> str:
        plural = "session" if self.sessions == 1 else "sessions"
        return f"{self.proposer}, {self.kind}, temperature {self.temperature:g}, {self.sessions} {plural}"


@dataclass(frozen=True)
class SpeculationResults(Results):
    """The rows, in the order in which they were measured."""

    rows: list[Speedup] = field(default_factory=list)


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
    repeats: Repeats = 3
    quick: Quick = False

    def __post_init__(self) -> None:
        self.require_least(max_tokens=2, repeats=1)
        unknown = [name for name in self.kinds.split(",") if name not in KINDS]
        if unknown:
            raise ConfigError(f"kinds must be some of {', '.join(KINDS)}, got {unknown[0]!r}")
        numbers("sessions", self.sessions)
        self.warmth()
        for written in self.drafting():
            if not parse_proposers(written):
                raise ConfigError(f"proposers are compared with none: leave {written!r} out")

    def presets(self) -> dict[str, Any]:
        return QUICK if self.quick else {}

    def drafting(self) -> list[str]:
        return self.proposers.split(",")

    def warmth(self) -> list[float]:
        try:
            return [float(part) for part in self.temperatures.split(",")]
        except ValueError:
            raise ConfigError(
                f"temperatures must be numbers with commas, such as 0,0.7, got {self.temperatures!r}"
            ) from None

    def cells(self) -> Iterator[tuple[str, float, int]]:
        yield from product(self.kinds.split(","), self.warmth(), numbers("sessions", self.sessions))

    def run(self, run: Run[SpeculationResults]) -> SpeculationResults:
        return run.asynchronously(self._run(run))

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
                    for kind, temperature, sessions in cells:
                        work.piece(f"{written}: {kind}, temperature {temperature:g}, {sessions} at once")
                        pair = _Pair(self, plain, drafting, kind, temperature, sessions)
                        row = await run.interruption.unless_asked(pair.measure(public_proposers(written)))
                        if row is None:
                            return results
                        results = SpeculationResults([*results.rows, row])
                        run.checkpoint(results)
        return results

    async def _server(self, stack: AsyncExitStack, proposer: str) -> Server:
        capacity = max(numbers("sessions", self.sessions))
        engine = replace(self, proposer=proposer)
        return await stack.enter_async_context(server_process(engine, capacity, (), http=True))

    def gates(self, results: SpeculationResults) -> list[Gate]:
        """What each proposer is for, nothing made slower, and the same answers."""
        noise = busy(results.bystanders_share)
        speedups = {row.label(): row.speedup for row in results.rows if not noise}
        worst = min(known(speedups.values()), default=None)
        same = min((row.same for row in results.rows), default=None)
        return [
            *self._gain_gates(speedups, noise or NOT_MEASURED),
            at_least("the least speed over plain decoding", worst, WORST, absent=noise or NOT_MEASURED),
            at_least("answers that are the same", same, 1.0, absent=NOT_MEASURED),
            bystanders_gate(results.bystanders_share),
        ]

    def _gain_gates(self, speedups: dict[str, float | None], absent: str) -> Iterator[Gate]:
        for written in self.drafting():
            for choice in parse_proposers(written):
                if choice.kind in GAINS:
                    kind, limit = GAINS[choice.kind]
                    label = f"{public_proposers(written)}, {kind}, temperature 0, 1 session"
                    yield at_least(f"{label}: speed over plain", speedups.get(label), limit, absent=absent)

    @staticmethod
    def show(results: SpeculationResults) -> list[Table | Chart]:
        charts = [
            _chart(results.rows, proposer, temperature)
            for proposer in dict.fromkeys(row.proposer for row in results.rows)
            for temperature in dict.fromkeys(row.temperature for row in results.rows)
        ]
        charts[:1] = [replace(chart, picture=True) for chart in charts[:1]]
        return [Table("Speed over plain decoding", _COLUMNS, results.rows, labels=2), *charts]


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


@dataclass(frozen=True)
class _Pair:
    """The same chats to both servers, in turns."""

    bench: Speculation
    plain: Server
    drafting: Server
    kind: str
    temperature: float
    sessions: int

    async def measure(self, proposer: str) -> Speedup:
        """Raises RemoteError when a server fails to answer."""
        wanted = tasks(self.kind, self.sessions)
        chats = [self._arrival(task, seed) for seed, task in enumerate(wanted)]
        speeds: dict[bool, list[float]] = {False: [], True: []}
        last: dict[bool, list[Outcome]] = {}
        for repetition in range(-1, self.bench.repeats):  # the first is uncounted
            for is_drafting in (False, True) if repetition % 2 == 0 else (True, False):
                server = self.drafting if is_drafting else self.plain
                outcomes = await play(server.http_address, server.info.model_id, chats, PATIENCE_S)
                last[is_drafting] = outcomes
                if repetition >= 0:
                    speeds[is_drafting].append(_tokens_a_second(outcomes))
        return self._row(proposer, speeds, last)

    def _arrival(self, task: Task, seed: int) -> Arrival:
        fields = {"temperature": self.temperature, "seed": seed, **task.fields}
        return Arrival(0.0, task.messages, self.bench.max_tokens, fields)

    def _row(
        self, proposer: str, speeds: dict[bool, list[float]], last: dict[bool, list[Outcome]]
    ) -> Speedup:
        drafted, count = last[True], len(last[True])
        accepted = sum(outcome.accepted_tokens for outcome in drafted)
        return Speedup(
            proposer,
            self.kind,
            self.temperature,
            self.sessions,
            Samples.of(speeds[False]),
            Samples.of(speeds[True]),
            tokens=sum(outcome.tokens for outcome in drafted),
            proposed=accepted + sum(outcome.rejected_tokens for outcome in drafted),
            accepted=accepted,
            ended=sum(outcome.finish_reason == "stop" for outcome in drafted) / count,
            same=sum(a.text == b.text for a, b in zip(last[False], drafted, strict=True)) / count,
        )


def _tokens_a_second(outcomes: Sequence[Outcome]) -> float:
    """From the first token of the first answer to the end of the last one."""
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    if failures:
        raise RemoteError(f"a chat was not answered: {failures[0]}")
    began = min(known(outcome.first_token_s for outcome in outcomes))
    ended = max(outcome.ended_s for outcome in outcomes)
    return (sum(outcome.tokens for outcome in outcomes) - 1) / max(ended - began, 1e-6)
