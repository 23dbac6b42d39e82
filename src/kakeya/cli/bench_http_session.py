"""`kakeya bench http-session`: one conversation over chat completions, with and without matching."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kakeya.bench.report import check_output, check_picture
from kakeya.bench.session_results import TAIL_LIMIT
from kakeya.cli.bench_common import (
    Drawing,
    EngineOptions,
    Json,
    Output,
    conclude,
    fetch,
    timed_progress,
    write,
)
from kakeya.cli.bench_turns import TALK, CheckpointEvery, MaxTokens, MessageTokens, Seed
from kakeya.cli.command import command_of
from kakeya.cli.console import Screen

if TYPE_CHECKING:
    from kakeya.bench.http_session import HttpSessionBench

DEFAULT_TURNS = 100


def register(bench: typer.Typer) -> None:
    bench.command("http-session", help="One conversation over chat completions, with and without matching.")(
        command_of(HttpSessionOptions, http_session)
    )


@dataclass(frozen=True)
class HttpSessionOptions(EngineOptions):
    """What `kakeya bench http-session` was asked for: one field per flag."""

    duration_s: Annotated[float | None, typer.Option(help="End after so long.", rich_help_panel=TALK)] = None
    turns: Annotated[
        int | None,
        typer.Option(
            help=f"End after so many; {DEFAULT_TURNS} when no other end is given.", rich_help_panel=TALK
        ),
    ] = None
    target_history_tokens: Annotated[
        int | None, typer.Option(help="End when the history is so long.", rich_help_panel=TALK)
    ] = None
    max_tokens: MaxTokens = 64
    message_tokens: MessageTokens = 64
    seed: Seed = 0
    tail_limit: Annotated[
        float, typer.Option(help="Gate: the last turns' latency over the first ones', matched.")
    ] = TAIL_LIMIT
    output: Output = Path("bench-http-session.json")
    picture: Annotated[Path | None, typer.Option(help="Write latency over turns as SVG.")] = None
    partial_checkpoint_every_s: CheckpointEvery = 600.0
    as_json: Json = False

    def bench(self) -> "HttpSessionBench":
        """The benchmark's settings. Raises ConfigError."""
        from kakeya.bench.http_session import HttpSessionBench
        from kakeya.bench.turns import CAPACITY
        from kakeya.bench.turns_talk import Ends

        is_open = self.duration_s is self.turns is self.target_history_tokens is None
        turns = DEFAULT_TURNS if is_open else self.turns
        return HttpSessionBench(
            self.model,
            self.engine_config(capacity=CAPACITY),
            Ends(turns, self.duration_s, self.target_history_tokens),
            max_tokens=self.max_tokens,
            message_tokens=self.message_tokens,
            seed=self.seed,
            checkpoint_every_s=self.partial_checkpoint_every_s,
            limit=self.tail_limit,
        )


def http_session(context: typer.Context, options: HttpSessionOptions) -> None:
    """Talk, write the report, show the tables; exit 1 when a gate failed."""
    check_output(options.output)
    check_picture(options.picture)
    bench, screen = options.bench(), Screen()
    fetch(screen, options.model)
    from kakeya.bench.http_session import run
    from kakeya.bench.http_session_page import (
        http_session_page,
        http_session_picture,
        http_session_sections,
    )

    with timed_progress(screen) as progress:
        report = run(bench, progress, lambda partial: write(options.output, partial, http_session_page))
    tables = [section.table for section in http_session_sections(report.results)]
    drawing = Drawing(options.picture, http_session_picture)
    conclude(screen, options.output, report, http_session_page, tables, drawing, as_json=options.as_json)
