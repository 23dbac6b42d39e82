"""`kakeya bench recall`: its flags, the run, the gates and the tables."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kakeya.bench.benchmark import Benchmark, Quick, Repeats, Results, Run, numbers
from kakeya.bench.recall import material
from kakeya.bench.recall.costs import measure_harm, measure_turns
from kakeya.bench.recall.material import KINDS, Filler, Trial, make_trial
from kakeya.bench.recall.reading import (
    TAIL,
    Looked,
    Memory,
    answer,
    holds,
    look,
    random_pages,
    right_pages,
    shorten,
)
from kakeya.bench.recall.rows import Asked, Harm, RecallRow, SearchCost, TurnCost, share_of
from kakeya.bench.report import Gate, at_least, at_most
from kakeya.bench.stats import Samples, ratio
from kakeya.bench.tables import MIB, MS, Chart, Column, Series, Table
from kakeya.bench.text import prose
from kakeya.config import DEFAULT_MODEL, CacheConfig, EngineConfig
from kakeya.errors import ConfigError
from kakeya.options import Model, Threads, build
from kakeya.recall.index import PAGE, Vocabulary
from kakeya.types import TokenRange

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

FULL, BOUNDED, RANDOM, RECALL, WHOLE, RIGHT, PINNED = (
    "full attention",
    "bounded",
    "random pages",
    "recall",
    "recall, all of it computed",
    "right pages",
    "pinned",
)
NOT_ASKED = "not asked in this run"
_what = partial(typer.Option, rich_help_panel="What is asked")


@dataclass(frozen=True, kw_only=True)
class RecallResults(Results):
    """Rows in the order in which they were measured, and what recall costs."""

    rows: tuple[RecallRow, ...] = ()
    searches: tuple[SearchCost, ...] = ()
    harm: Harm | None = None
    turns: tuple[TurnCost, ...] = ()


@dataclass(frozen=True)
class RecallBench(Benchmark[RecallResults]):
    """The model, the memory, and which facts are asked for at which distances."""

    kind = "recall"
    title = "Recall benchmark"
    help = "What a session remembers of what has left its window, and what that costs."
    results = RecallResults

    model: Model = DEFAULT_MODEL
    window: Annotated[int, typer.Option(help="The window beside the slots for recall.")] = 252
    recall: Annotated[int, typer.Option(help="Tokens that a turn may bring back.")] = 256
    kinds: Annotated[str, _what(help="Kinds of facts, with commas.")] = ",".join(KINDS)
    distances: Annotated[str, _what(help="Tokens between a fact and its question, with commas.")] = (
        "1500,50000,1000000"
    )
    trials: Annotated[int, _what(help="How often each kind is asked for at each distance.")] = 10
    seed: Annotated[int, _what(help="Which facts in which text.")] = 0
    text: Annotated[
        Path | None,
        _what(help="Plain UTF-8 text; of the packaged one, long histories are its sentences at random."),
    ] = None
    full_tokens: Annotated[
        int, _what(help="Up to which distance the whole history is computed, also with full attention.")
    ] = 1500
    passages: Annotated[int, typer.Option(help="Passages whose perplexity is compared.")] = 12
    histories: Annotated[str, typer.Option(help="Lengths at which turns are timed, with commas.")] = (
        "1024,8192"
    )
    repeats: Repeats = 5
    quick: Quick = False
    threads: Threads = None

    def presets(self) -> dict[str, Any]:
        small = {"distances": "1100,20000", "trials": 1, "passages": 1, "histories": "1024", "repeats": 1}
        return {**small, "full_tokens": 1100} if self.quick else {}

    @property
    def model_to_fetch(self) -> str | None:
        return self.model

    @property
    def config(self) -> EngineConfig:
        return build(EngineConfig, {"threads": self.threads})

    @property
    def cache(self) -> CacheConfig:
        return CacheConfig(window=self.window, recall=self.recall)

    @property
    def memory(self) -> Memory:
        return Memory(self.cache.sink, self.window, self.recall)

    @property
    def kinds_asked(self) -> list[str]:
        return self.kinds.split(",")

    @property
    def distances_asked(self) -> tuple[int, ...]:
        return numbers("distances", self.distances)

    @property
    def near(self) -> int:
        """A distance within the window, with the longest question."""
        return self.window // 4

    def check(self, *, picture: bool) -> None:
        self.require_least(trials=1, passages=1, repeats=1, recall=2 * PAGE, window=2 * PAGE)
        if unknown := [kind for kind in self.kinds_asked if kind not in KINDS]:
            raise ConfigError(f"kinds must be some of {', '.join(KINDS)}, got {unknown[0]!r}")
        if min(self.distances_asked) < 2 * (self.window + self.recall):
            raise ConfigError(
                f"distances must be at least {2 * (self.window + self.recall)} tokens, twice what is seen, "
                f"got {min(self.distances_asked)}"
            )
        if min(numbers("histories", self.histories)) < self.cache.capacity + 2 * self.recall:
            raise ConfigError(f"histories must outgrow what a session sees, got {self.histories!r}")
        build(EngineConfig, {"threads": self.threads})
        self._text()

    def _text(self) -> str:
        try:
            return prose() if self.text is None else self.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the text {self.text} cannot be read as UTF-8: {error}") from error

    def run(self, run: Run[RecallResults]) -> RecallResults:
        """A partial report follows each kind at each distance."""
        text = self._text()
        cells = len(self.kinds_asked) * len(self.distances_asked)
        work = run.work(cells + 3)
        with self._open(self.cache) as runtime, self._open(self._unbounded()) as unbounded:
            asker = Asker(self, runtime, unbounded, text)
            run.facts["text"] = {
                "file": "bench/data/galapagos.txt" if self.text is None else self.text.name,
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
                "tokens": asker.filler.tokens,
            }
            results = RecallResults()
            for distance in self.distances_asked:
                for kind in self.kinds_asked:
                    work.piece(f"{kind}, {distance:,} tokens ago")
                    results = replace(results, rows=(*results.rows, *asker.cell(kind, distance)))
                    results = replace(results, searches=asker.searches())
                    run.checkpoint(results)
            work.piece("within the window")
            results = replace(results, rows=(*results.rows, *asker.within()))
            work.piece("ordinary text")
            results = replace(results, harm=measure_harm(runtime, asker.text, self.memory, self.passages))
            work.piece("turns")
            turns = [
                measure_turns(runtime, asker.text, self.memory, history, self.repeats)
                for history in numbers("histories", self.histories)
            ]
        return replace(results, turns=tuple(turns))

    def _open(self, cache: CacheConfig) -> "Runtime":
        from kakeya.runtime import Runtime

        return Runtime.open(self.model, replace(self.config, cache=cache, capacity=1))

    def _unbounded(self) -> CacheConfig:
        """For the distances at which the whole history is computed."""
        return CacheConfig(window=self.full_tokens + self.recall + 64 * 32 + 1024)

    def gates(self, results: RecallResults) -> list[Gate]:
        """What the issue of forgetting is held to, over all distances."""
        share = partial(share_of, results.rows, RECALL)
        near = [
            share_of(results.rows, memory, [_near(material.EIGHT)], "right") for memory in (BOUNDED, WHOLE)
        ]
        lost = None if None in near else round(near[0] - near[1], 9)  # type: ignore[operator]
        lookup = max((each.lookup.median or 0 for each in results.searches), default=None)
        bytes_a_token = max((each.bytes_a_token for each in results.searches), default=None)
        return [
            at_least("one fact: found", share([material.ONE], "found"), 0.98, absent=NOT_ASKED),
            at_least("one fact: right", share([material.ONE], "right"), 0.95, absent=NOT_ASKED),
            at_least("one of 8 alike: right", share([material.EIGHT], "right"), 0.75, absent=NOT_ASKED),
            at_least("one of 64 alike: found", share([material.MANY], "found"), 0.9, absent=NOT_ASKED),
            at_least("told anew: right", share([material.UPDATED], "right"), 0.9, absent=NOT_ASKED),
            at_most("right answers lost within the window", lost, 0.02, absent=NOT_ASKED),
            at_most(
                "perplexity with recall over without",
                None if results.harm is None else results.harm.ratio,
                1.02,
                absent="not measured in this run",
            ),
            at_most("seconds of a lookup", lookup, 0.003, absent=NOT_ASKED),
            at_most("host bytes a token", bytes_a_token, 16, absent=NOT_ASKED),
        ]

    @staticmethod
    def show(results: RecallResults) -> list[Table | Chart]:
        return [
            Table("What was asked", _ROWS, results.rows, labels=2),
            *_charts(results.rows),
            Table("Searching", _SEARCHES, results.searches),
            Table("Ordinary text", _HARM, [results.harm] if results.harm else []),
            Table("Turns of a few tokens", _TURNS, results.turns),
        ]


class Asker:
    """Asks for facts in every memory, with the same histories."""

    def __init__(self, bench: RecallBench, runtime: "Runtime", unbounded: "Runtime", text: str) -> None:
        self._bench, self._runtime, self._unbounded = bench, runtime, unbounded
        tokenizer = runtime.tokenizer
        self._encode = partial(tokenizer.encode, special=False)
        self._start = tokenizer.encode("", bos=True)
        self._vocabulary = Vocabulary([tokenizer.text_bytes(each) for each in range(tokenizer.vocab_size)])
        self.text = self._encode(text)
        self.filler = Filler(self._encode, text)
        self._looked: dict[int, list[Looked]] = defaultdict(list)

    def cell(self, kind: str, distance: int) -> list[RecallRow]:
        """A row for each memory that can be asked at this distance."""
        asked: dict[str, list[Asked]] = defaultdict(list)
        left_out: dict[str, int] = defaultdict(int)
        for number in range(self._bench.trials):
            trial = self._trial(kind, distance, number)
            looked = look(self._vocabulary, trial, self._bench.memory)
            self._looked[distance].append(looked)
            for memory, (each, left) in self._answers(trial, looked, f"{kind} {number}", distance):
                asked[memory].append(each)
                left_out[memory] += left
        return [RecallRow(each, kind, distance, tuple(asked[each]), left_out[each]) for each in asked]

    def searches(self) -> tuple[SearchCost, ...]:
        return tuple(
            SearchCost(
                distance,
                Samples.of(each.seconds for each in looked),
                max(each.bytes_a_token for each in looked),
            )
            for distance, looked in self._looked.items()
        )

    def within(self) -> list[RecallRow]:
        """Facts that the window still holds, with a history that has outgrown it."""
        rows: dict[str, list[Asked]] = defaultdict(list)
        for number in range(self._bench.trials):
            trial = self._trial(material.EIGHT, self._bench.near, number, lead=self._bench.cache.capacity)
            for memory, recall in ((BOUNDED, 0), (WHOLE, self._bench.recall)):
                said = answer(self._runtime, trial.history, trial.question, recall=recall)
                rows[memory].append(Asked(None, trial.telling.is_right(said.text), said.text))
        kind = _near(material.EIGHT)
        return [RecallRow(memory, kind, self._bench.near, tuple(asked)) for memory, asked in rows.items()]

    def _trial(self, kind: str, distance: int, number: int, lead: int | None = None) -> Trial:
        memory, seed = self._bench.memory, f"{self._bench.seed} {number}"
        lead = memory.pinned + memory.recall if lead is None else lead
        trial = make_trial(kind, distance, seed, self._encode, self.filler, lead)
        shift = len(self._start)
        sought = tuple(TokenRange(each.start + shift, each.end + shift) for each in trial.sought)
        return replace(trial, history=[*self._start, *trial.history], sought=sought)

    def _answers(
        self, trial: Trial, looked: Looked, seed: str, distance: int
    ) -> Iterator[tuple[str, tuple[Asked, int]]]:
        memory = self._bench.memory
        if distance <= self._bench.full_tokens:
            yield FULL, self._read(trial, (), runtime=self._unbounded)
            yield WHOLE, self._whole(trial)
        yield BOUNDED, self._read(trial, ())
        yield RANDOM, self._read(trial, random_pages(trial, memory, seed))
        yield RECALL, self._read(trial, looked.ranges)
        if trial.sought:
            yield RIGHT, self._read(trial, right_pages(trial, memory))
            yield PINNED, self._pin(trial)

    def _read(
        self, trial: Trial, ranges: Sequence[TokenRange], runtime: "Runtime | None" = None
    ) -> tuple[Asked, int]:
        if runtime is not None:
            return self._asked(trial, answer(runtime, trial.history, trial.question).text), 0
        short = shorten(trial, ranges, self._bench.memory)
        recall = self._bench.recall if ranges else 0
        said = answer(self._runtime, short.history, trial.question, recall=recall, ranges=short.ranges)
        found = holds(ranges, trial.sought) if ranges and trial.sought else None
        return self._asked(trial, said.text, found), short.left_out

    def _whole(self, trial: Trial) -> tuple[Asked, int]:
        """The session searches for itself, and everything is computed."""
        said = answer(self._runtime, trial.history, trial.question, recall=self._bench.recall)
        found = holds(said.done.recalled, trial.sought) if trial.sought else None
        return self._asked(trial, said.text, found), 0

    def _pin(self, trial: Trial) -> tuple[Asked, int]:
        """The facts come first and are never evicted."""
        first = [token for each in trial.sought for token in trial.history[each.start : each.end]]
        head = [*self._start, *first]
        tail = trial.history[-2 * self._bench.cache.capacity - TAIL :]
        said = answer(
            self._runtime, [*head, *tail], trial.question, pinned=max(len(head), self._bench.cache.sink)
        )
        return self._asked(trial, said.text), len(trial.history) - len(head) - len(tail)

    def _asked(self, trial: Trial, text: str, found: bool | None = None) -> Asked:
        return Asked(found, trial.telling.is_right(text), text)


def _near(kind: str) -> str:
    return f"{kind}, within the window"


_ROWS = [
    Column("kind of fact", "kind"),
    Column("memory", "memory"),
    Column("tokens ago", "distance"),
    Column("page found", lambda row: str(row.found)),
    Column("right given found", lambda row: str(row.right_given_found)),
    Column("right", lambda row: str(row.right)),
    Column("tokens that no model read", "left_out"),
]
_SEARCHES = [
    Column("tokens ago", "distance"),
    Column("lookup, ms", "lookup.median", MS, ".2f"),
    Column("slowest, ms", "lookup.max", MS, ".2f"),
    Column("host bytes a token, with ids", "bytes_a_token", form=".1f"),
]
_HARM = [
    Column("tokens", "tokens"),
    Column("nats a token with recall", "recalling", form=".4f"),
    Column("without", "plain", form=".4f"),
    Column("perplexity, with over without", "ratio", form=".4f"),
]
_TURNS = [
    Column("history", "history"),
    Column("no recall, ms", "plain.median", MS, ".1f"),
    Column("the same pages, ms", "unchanged.median", MS, ".1f"),
    Column("other pages, ms", "changed.median", MS, ".1f"),
    Column(
        "same pages over no recall", lambda row: ratio(row.unchanged.median, row.plain.median), form=".2f"
    ),
    Column("KV MiB", "device_bytes", MIB, ".1f"),
]


def _charts(rows: Sequence[RecallRow]) -> list[Chart]:
    """Right answers by distance, for each kind; the first is the picture."""
    far = [row for row in rows if not row.kind.endswith("within the window")]
    charts = []
    for kind in dict.fromkeys(row.kind for row in far):
        of_kind = [row for row in far if row.kind == kind]
        distances = sorted({row.distance for row in of_kind})
        series = []
        for memory in dict.fromkeys(row.memory for row in of_kind):
            found = {row.distance: row.right.share for row in of_kind if row.memory == memory}
            series.append(Series(memory, [found.get(distance) for distance in distances]))
        headings = [f"{distance:,}" for distance in distances]
        charts.append(Chart(f"Right answers: {kind}", "share", "tokens since it was said", headings, series))
    charts[:1] = [replace(chart, picture=True) for chart in charts[:1]]
    return charts
