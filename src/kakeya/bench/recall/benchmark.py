"""`kakeya bench recall`: its flags, the run, the gates and the tables."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kakeya.bench.benchmark import Benchmark, Quick, Repeats, Results, Run, numbers
from kakeya.bench.recall import material
from kakeya.bench.recall.asking import BOUNDED, MEMORIES, RECALL, WHOLE, near_kind
from kakeya.bench.recall.costs import AGENTS, STREAMS, measure_harm, measure_streams, measure_turns
from kakeya.bench.recall.material import KINDS
from kakeya.bench.recall.reading import TAIL, Memory
from kakeya.bench.recall.rows import Harm, RecallRow, SearchCost, StreamCost, TurnCost, least_share, share_of
from kakeya.bench.recall.trials import trials_of
from kakeya.bench.report import Gate, at_least, at_most, busy
from kakeya.bench.stats import ratio
from kakeya.bench.tables import MIB, MS, Chart, Column, Series, Table
from kakeya.bench.text import prose
from kakeya.config import DEFAULT_MODEL, CacheConfig, EngineConfig
from kakeya.errors import ConfigError
from kakeya.options import Model, Threads, build
from kakeya.recall.index import PAGE

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

NOT_ASKED = "not asked in this run"
NOT_MEASURED = "not measured in this run"
_what = partial(typer.Option, rich_help_panel="What is asked")


class Part(StrEnum):
    """What can be measured by itself: answers take long, costs need a quiet machine."""

    ANSWERS = "answers"
    COSTS = "costs"


@dataclass(frozen=True, kw_only=True)
class RecallResults(Results):
    """Rows in the order in which they were measured, and what recall costs."""

    rows: tuple[RecallRow, ...] = ()
    searches: tuple[SearchCost, ...] = ()
    harm: Harm | None = None
    turns: tuple[TurnCost, ...] = ()
    streams: tuple[StreamCost, ...] = ()


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
    part: Annotated[
        Part | None,
        typer.Option(help="`answers`: what is remembered; `costs`: what that takes; both when left out."),
    ] = None
    kinds: Annotated[str, _what(help="Kinds of facts, with commas.")] = ",".join(KINDS)
    memories: Annotated[str, _what(help="Which memories are asked, with commas.")] = ",".join(MEMORIES)
    distances: Annotated[str, _what(help="Tokens between a fact and its question, with commas.")] = (
        "1500,50000,1000000"
    )
    trials: Annotated[int, _what(help="How often each kind is asked for at each distance.")] = 10
    processes: Annotated[int, _what(help="Processes that trials are spread over, one thread each.")] = 1
    seed: Annotated[int, _what(help="Which facts in which text.")] = 0
    text: Annotated[
        Path | None,
        _what(help="Plain UTF-8 text; of the packaged one, long histories are its sentences at random."),
    ] = None
    full_tokens: Annotated[
        int, _what(help="Up to which distance full attention is asked, which computes all of it.")
    ] = 1500
    whole_tokens: Annotated[
        int, _what(help="Up to which distance a session with recall computes all of it, and searches itself.")
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
        return {**small, "full_tokens": 1100, "whole_tokens": 1100} if self.quick else {}

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
    def memories_asked(self) -> list[str]:
        return self.memories.split(",")

    @property
    def distances_asked(self) -> tuple[int, ...]:
        return numbers("distances", self.distances)

    @property
    def near(self) -> int:
        """A distance within the window, with the longest question."""
        return self.window // 4

    @property
    def least_distance(self) -> int:
        """From here on neither memory sees a fact by itself."""
        return self.window + max(self.recall, TAIL) + PAGE

    def check(self, *, picture: bool) -> None:
        self.require_least(trials=1, processes=1, passages=1, repeats=1, recall=2 * PAGE, window=2 * PAGE)
        if unknown := [kind for kind in self.kinds_asked if kind not in KINDS]:
            raise ConfigError(f"kinds must be some of {', '.join(KINDS)}, got {unknown[0]!r}")
        if unknown := [each for each in self.memories_asked if each not in MEMORIES]:
            raise ConfigError(f"memories must be some of {', '.join(MEMORIES)}, got {unknown[0]!r}")
        if min(self.distances_asked) < self.least_distance:
            raise ConfigError(
                f"distances must be at least {self.least_distance} tokens, so that facts are out of sight, "
                f"got {min(self.distances_asked)}"
            )
        needed = self.cache.capacity + 2 * self.recall
        if self.part is not Part.ANSWERS and min(numbers("histories", self.histories)) < needed:
            raise ConfigError(f"histories must outgrow what a session sees, got {self.histories!r}")
        build(EngineConfig, {"threads": self.threads})
        self._text()

    def _text(self) -> str:
        try:
            return prose() if self.text is None else self.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the text {self.text} cannot be read as UTF-8: {error}") from error

    def run(self, run: Run[RecallResults]) -> RecallResults:
        """A partial report follows each kind at each distance, and each cost."""
        text = self._text()
        results = RecallResults()
        run.facts["text"] = {
            "file": "bench/data/galapagos.txt" if self.text is None else self.text.name,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
        if self.part is not Part.COSTS:
            results = self._ask(run, text, results)
        if self.part is not Part.ANSWERS:
            with self.open(self.cache) as runtime:
                results = self._measure_costs(run, runtime, text, results)
        return results

    def _ask(self, run: Run[RecallResults], text: str, results: RecallResults) -> RecallResults:
        work = run.work(len(self.kinds_asked) * len(self.distances_asked) + 1)
        with trials_of(self, text) as trials:
            for distance in self.distances_asked:
                for kind in self.kinds_asked:
                    work.piece(f"{kind}, {distance:,} tokens ago")
                    results = replace(results, rows=(*results.rows, *trials.cell(kind, distance)))
                    results = replace(results, searches=trials.searches())
                    run.checkpoint(results)
            work.piece("within the window")
            return replace(results, rows=(*results.rows, *trials.within()))

    def _measure_costs(
        self, run: Run[RecallResults], runtime: "Runtime", text: str, results: RecallResults
    ) -> RecallResults:
        tokens, histories = (
            runtime.tokenizer.encode(text, special=False),
            numbers("histories", self.histories),
        )
        work = run.work(len(histories) + 2)
        work.piece("ordinary text")
        with run.watching([os.getpid()]):
            results = replace(results, harm=measure_harm(runtime, tokens, self.memory, self.passages))
            for history in histories:
                work.piece(f"turns behind {history:,} tokens")
                plain = history == min(histories)  # a long history takes minutes to compute, so once
                cost = measure_turns(runtime, tokens, self.memory, history, self.repeats, plain=plain)
                results = replace(results, turns=(*results.turns, cost))
                run.checkpoint(results)
            work.piece("streams beside turns")
            with self.open(self.cache, STREAMS + 2 * AGENTS) as many:
                streams = measure_streams(many, tokens, self.memory, self.repeats)
        return replace(results, streams=streams)

    def open(self, cache: CacheConfig, capacity: int = 1) -> "Runtime":
        from kakeya.runtime import Runtime

        return Runtime.open(self.model, replace(self.config, cache=cache, capacity=capacity))

    @property
    def unbounded(self) -> CacheConfig:
        """For the distances at which the whole history is computed."""
        return CacheConfig(window=self.full_tokens + self.recall + 64 * 32 + 1024)

    def gates(self, results: RecallResults) -> list[Gate]:
        """What the issue of forgetting is held to, at every distance."""
        share = partial(least_share, results.rows, RECALL)
        near = [
            share_of(results.rows, memory, [near_kind(material.EIGHT)], "right")
            for memory in (BOUNDED, WHOLE)
        ]
        lost = None if None in near else round(near[0] - near[1], 9)  # type: ignore[operator]
        noise = busy(results.bystanders_share, "latencies")
        lookup = max((each.lookup.median or 0 for each in results.searches), default=None)
        bytes_a_token = max((each.bytes_a_token for each in results.searches), default=None)
        return [
            at_least("one fact: found", share([material.ONE], "found"), 0.98, absent=NOT_ASKED),
            at_least("one fact: right", share([material.ONE], "right"), 0.95, absent=NOT_ASKED),
            at_least("one of 8 alike: right", share([material.EIGHT], "right"), 0.75, absent=NOT_ASKED),
            at_least("one of 64 alike: found", share([material.MANY], "found"), 0.9, absent=NOT_ASKED),
            at_least("told anew: right", share([material.UPDATED], "right"), 0.9, absent=NOT_ASKED),
            at_least("in a pasted message: found", share([material.PASTED], "found"), 0.98, absent=NOT_ASKED),
            at_least("in a pasted message: right", share([material.PASTED], "right"), 0.95, absent=NOT_ASKED),
            at_most("right answers lost within the window", lost, 0.02, absent=NOT_ASKED),
            at_most(
                "perplexity with recall over without",
                None if results.harm is None else results.harm.ratio,
                1.02,
                absent=NOT_MEASURED,
            ),
            at_most("seconds of a lookup", lookup, 0.003, absent=NOT_ASKED),
            at_most("host bytes a token", bytes_a_token, 16, absent=NOT_ASKED),
            at_most(
                "turn with the same pages, longest history over shortest",
                None if noise else _longest_over_shortest(results.turns),
                1.05,
                absent=noise or NOT_MEASURED,
            ),
            at_most(
                "gap of streams (p95), turns that recall over turns that do not",
                None if noise else _recalling_over_plain(results.streams),
                1.2,
                absent=noise or NOT_MEASURED,
            ),
        ]

    @staticmethod
    def show(results: RecallResults) -> list[Table | Chart]:
        return [
            Table("What was asked", _ROWS, results.rows, labels=2),
            *_charts(results.rows),
            Table("Searching", _SEARCHES, results.searches),
            Table("Ordinary text", _HARM, [results.harm] if results.harm else []),
            Table("Turns of a few tokens", _TURNS, results.turns),
            Table(f"{STREAMS} streams beside {AGENTS} sessions that take turns", _STREAMS, results.streams),
        ]


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


_STREAMS = [
    Column("beside", "beside"),
    Column("gap between tokens, ms", "gap.median", MS, ".1f"),
    Column("95th percentile, ms", "p95", MS, ".1f"),
    Column("turns meanwhile", "turns"),
]


def _longest_over_shortest(turns: Sequence[TurnCost]) -> float | None:
    by_length = sorted(turns, key=lambda turn: turn.history)
    if len(by_length) < 2:
        return None
    return ratio(by_length[-1].unchanged.median, by_length[0].unchanged.median)


def _recalling_over_plain(streams: Sequence[StreamCost]) -> float | None:
    return ratio(streams[2].p95, streams[1].p95) if streams else None


# What gates look at, and so the picture.
_JUDGED = (material.ONE, material.EIGHT, material.MANY, material.UPDATED, material.PASTED)


def _charts(rows: Sequence[RecallRow]) -> list[Chart]:
    """Right answers by distance: in the picture with recall, of what gates judge; then one for each kind."""
    far = [row for row in rows if not row.kind.endswith("within the window")]
    kinds = list(dict.fromkeys(row.kind for row in far))
    recalled = [row for row in far if row.memory == RECALL and row.kind in _JUDGED]
    plain = [row for row in far if row.memory == BOUNDED and row.kind == kinds[0]]
    charts = [_chart("Right answers with recall", [*recalled, *plain], _kind_or_memory, picture=True)]
    charts += [_chart(f"Right answers: {kind}", [row for row in far if row.kind == kind]) for kind in kinds]
    return [chart for chart in charts if chart.series]


def _kind_or_memory(row: RecallRow) -> str:
    return row.kind if row.memory == RECALL else f"{row.kind}, {row.memory}"


def _chart(
    title: str,
    rows: Sequence[RecallRow],
    name: Callable[[RecallRow], str] = lambda row: row.memory,
    *,
    picture: bool = False,
) -> Chart:
    distances = sorted({row.distance for row in rows})
    shares: dict[str, dict[int, float | None]] = defaultdict(dict)
    for row in rows:
        shares[name(row)][row.distance] = row.right.share
    series = [Series(each, [found.get(distance) for distance in distances]) for each, found in shares.items()]
    headings = [f"{distance:,}" for distance in distances]
    return Chart(title, "share", "tokens since it was said", headings, series, picture=picture)
