"""`kakeya bench overhead`: what gRPC and HTTP keep of the engine's speed."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kakeya.bench.overhead_results import KEPT_LIMIT
from kakeya.bench.report import check_output
from kakeya.cli.bench_common import (
    EngineOptions,
    Json,
    Output,
    Repeats,
    conclude,
    fetch,
    timed_progress,
    write,
)
from kakeya.cli.command import command_of
from kakeya.cli.console import Screen

if TYPE_CHECKING:
    from kakeya.bench.overhead import OverheadBench


def register(bench: typer.Typer) -> None:
    bench.command("overhead", help="What gRPC and HTTP keep of the engine's speed.")(
        command_of(OverheadOptions, overhead)
    )


@dataclass(frozen=True)
class OverheadOptions(EngineOptions):
    """What `kakeya bench overhead` was asked for: one field per flag."""

    streams: Annotated[int, typer.Option(help="Streams at once.")] = 16
    tokens: Annotated[int, typer.Option(help="Tokens of each stream.")] = 96
    history: Annotated[int, typer.Option(help="Tokens of history before them.")] = 64
    repeats: Repeats = 21
    limit: Annotated[float, typer.Option(help="Gate: the share of the engine's speed to keep.")] = KEPT_LIMIT
    output: Output = Path("bench-overhead.json")
    as_json: Json = False

    def bench(self) -> "OverheadBench":
        """The benchmark's settings. Raises ConfigError."""
        from kakeya.bench.overhead import OverheadBench

        return OverheadBench(
            self.model,
            self.engine_config(capacity=1),
            streams=self.streams,
            tokens=self.tokens,
            history=self.history,
            repeats=self.repeats,
            limit=self.limit,
        )


def overhead(context: typer.Context, options: OverheadOptions) -> None:
    """Measure, write the report, show the table; exit 1 when a gate failed."""
    check_output(options.output)
    bench, screen = options.bench(), Screen()
    fetch(screen, options.model)
    from kakeya.bench.overhead import run
    from kakeya.bench.overhead_page import overhead_page, overhead_sections

    with timed_progress(screen) as progress:
        report = run(bench, progress, lambda partial: write(options.output, partial, overhead_page))
    tables = [section.table for section in overhead_sections(report.results)]
    conclude(screen, options.output, report, overhead_page, tables, as_json=options.as_json)
