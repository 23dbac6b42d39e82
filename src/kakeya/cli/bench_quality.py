"""`kakeya bench quality`: what arithmetic costs, what bounded memory costs, and what it keeps."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kakeya.bench.quality_results import DEFAULT, Part
from kakeya.bench.report import check_output, check_picture
from kakeya.cli import options
from kakeya.cli.bench_common import (
    Drawing,
    Json,
    Output,
    Quick,
    conclude,
    fetch,
    numbers,
    timed_progress,
    write,
)
from kakeya.cli.command import command_of
from kakeya.cli.console import Screen
from kakeya.config import DEFAULT_MODEL, EngineConfig
from kakeya.errors import ConfigError

if TYPE_CHECKING:
    from kakeya.bench.long_text import LongText
    from kakeya.bench.quality import QualityBench
    from kakeya.bench.quality_choices import ChoicesBench
    from kakeya.bench.quality_memory import MemoryBench
    from kakeya.bench.quality_peer import PeerBench
    from kakeya.bench.quality_recall import RecallBench

_MEMORY = "The part memory"
_RECALL = "The part recall"
_PEER = "The part peer"
# Those that need nothing else installed.
_USUAL = (Part.CHOICES, Part.MEMORY, Part.RECALL)

Parts = Annotated[
    list[Part] | None,
    typer.Option(help="What to measure; may be given more than once. All but peer when left out."),
]
TextFile = Annotated[
    Path | None,
    typer.Option(
        help="Plain UTF-8 text for memory and recall; else a book out of a Debian package, by apt-get."
    ),
]
HistoryTokens = Annotated[
    int, typer.Option(help="How much of the text one session reads.", rich_help_panel=_MEMORY)
]
FullTokens = Annotated[
    int, typer.Option(help="Where full attention stops, which slows as it goes.", rich_help_panel=_MEMORY)
]
SlidingWindow = Annotated[int, typer.Option(help="A window without sinks.", rich_help_panel=_MEMORY)]
Windows = Annotated[
    str,
    typer.Option(help="Windows beside 4 sinks, with commas; recall has the nearest to the default.",
                 rich_help_panel=_MEMORY),
]  # fmt: skip
Distances = Annotated[
    str, typer.Option(help="Tokens between number and question, with commas.", rich_help_panel=_RECALL)
]
Trials = Annotated[int, typer.Option(help="How often at each distance.", rich_help_panel=_RECALL)]
Seed = Annotated[int, typer.Option(help="Which numbers in which prose.", rich_help_panel=_RECALL)]
PeerTokens = Annotated[
    int | None,
    typer.Option(help="How much of the packaged text is scored; all when left out.", rich_help_panel=_PEER),
]
Also = Annotated[
    list[Path] | None,
    typer.Option(help="A .gguf file to compare as well; may be given more than once.", rich_help_panel=_PEER),
]


def register(bench: typer.Typer) -> None:
    bench.command("quality", help="What arithmetic costs, what bounded memory costs, and what it keeps.")(
        command_of(QualityOptions, quality)
    )


@dataclass(frozen=True)
class QualityOptions:
    """What `kakeya bench quality` was asked for: one field per flag."""

    model: options.Model = DEFAULT_MODEL
    part: Parts = None
    text: TextFile = None
    history_tokens: HistoryTokens = 131_072
    full_tokens: FullTokens = 16_384
    sliding_window: SlidingWindow = 1024
    windows: Windows = "252,508,1020,2044"
    distances: Distances = "128,256,512,900,1500,3000,6000"
    trials: Trials = 10
    seed: Seed = 0
    peer_tokens: PeerTokens = None
    also: Also = None
    quick: Quick = False
    output: Output = Path("bench-quality.json")
    picture: Annotated[Path | None, typer.Option(help="Write perplexity over history as SVG.")] = None
    as_json: Json = False
    threads: options.Threads = None

    @property
    def parts(self) -> frozenset[Part]:
        return frozenset(self.part or _USUAL)

    @property
    def reads_at_length(self) -> bool:
        return bool(self.parts & {Part.MEMORY, Part.RECALL})

    def check(self) -> None:
        """Refuse what cannot be, before anything is fetched. Raises ConfigError."""
        check_output(self.output)
        check_picture(self.picture)
        if self.picture is not None and Part.MEMORY not in self.parts:
            raise ConfigError("--picture draws the part memory, which was not asked for")
        self.engine_config()
        if Part.MEMORY in self.parts:
            self.memory()
        if Part.RECALL in self.parts:
            self.recall()
        if Part.PEER in self.parts:
            self.check_peer()
        elif self.also:
            raise ConfigError("--also names files for the part peer, which was not asked for")

    def check_peer(self) -> None:
        from kakeya.bench.quality_peer import check_files

        check_files(self.peer().also)

    def engine_config(self) -> EngineConfig:
        return EngineConfig() if self.threads is None else EngineConfig(threads=self.threads)

    def bench(self, text: "LongText") -> "QualityBench":
        """The benchmark's settings. Raises ConfigError."""
        from kakeya.bench.quality import QualityBench

        return QualityBench(
            self.model,
            self.engine_config(),
            text,
            choices=self.choices() if Part.CHOICES in self.parts else None,
            memory=self.memory() if Part.MEMORY in self.parts else None,
            recall=self.recall() if Part.RECALL in self.parts else None,
            peer=self.peer() if Part.PEER in self.parts else None,
        )

    def choices(self) -> "ChoicesBench":
        from kakeya.bench.quality_choices import ChoicesBench

        if self.quick:
            return ChoicesBench((DEFAULT,), passage_tokens=32, most_tokens=48)
        return ChoicesBench()

    def memory(self) -> "MemoryBench":
        from kakeya.bench.quality_memory import MemoryBench

        if self.quick:
            return MemoryBench(history_tokens=400, full_tokens=200, sliding_window=64, windows=(60,))
        windows = numbers("windows", self.windows)
        return MemoryBench(self.history_tokens, self.full_tokens, self.sliding_window, windows)

    def recall(self) -> "RecallBench":
        from kakeya.bench.quality_memory import nearest_to_default
        from kakeya.bench.quality_recall import RecallBench

        if self.quick:
            return RecallBench(nearest_to_default([252]), distances=(32, 400), trials=1, seed=self.seed)
        bounded = nearest_to_default(numbers("windows", self.windows))
        return RecallBench(bounded, numbers("distances", self.distances), self.trials, self.seed)

    def peer(self) -> "PeerBench":
        from kakeya.bench.quality_peer import PeerBench

        also = tuple(str(path) for path in self.also or ())
        return PeerBench(also, most_tokens=48 if self.quick else self.peer_tokens)


def quality(context: typer.Context, asked: QualityOptions) -> None:
    """Measure, write the report, show the tables; exit 1 when a gate failed."""
    asked.check()
    screen = Screen()
    bench = asked.bench(_text(screen, asked))
    fetch(screen, asked.model)
    from kakeya.bench.quality import run
    from kakeya.bench.quality_page import quality_page, quality_picture, quality_sections

    with timed_progress(screen) as progress:
        report = run(bench, progress, lambda partial: write(asked.output, partial, quality_page))
    tables = [section.table for section in quality_sections(report.results)]
    drawing = Drawing(asked.picture, quality_picture)
    conclude(screen, asked.output, report, quality_page, tables, drawing, as_json=asked.as_json)


def _text(screen: Screen, asked: QualityOptions) -> "LongText":
    """What is read at length. Raises ConfigError where it cannot be had."""
    from kakeya.bench.long_text import PACKAGE, book, packaged_text, text_of_file
    from kakeya.models.store import cache_dir

    if asked.text is not None:
        return text_of_file(asked.text)
    if asked.quick or not asked.reads_at_length:
        return packaged_text()
    screen.notice(f"text: the Debian package {PACKAGE}, fetched once")
    return book(cache_dir() / "texts")
