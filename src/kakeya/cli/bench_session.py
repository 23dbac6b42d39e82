"""`kakeya bench session`: one session through many turns."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kakeya.bench.report import check_output, check_picture
from kakeya.bench.session_results import KV_LIMIT, RSS_LIMIT, TAIL_LIMIT, Limits
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
from kakeya.cli.command import command_of
from kakeya.cli.console import Screen

if TYPE_CHECKING:
    from kakeya.bench.session import SessionBench

_SERVER = "The server"
_TALK = "The talk"
_GATES = "Gates"


def register(bench: typer.Typer) -> None:
    bench.command("session", help="One session through many turns over gRPC: does every turn cost the same?")(
        command_of(SessionOptions, session)
    )


@dataclass(frozen=True)
class SessionOptions(EngineOptions):
    """What `kakeya bench session` was asked for: one field per flag."""

    grpc_address: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of a running server; else one is started.", rich_help_panel=_SERVER),
    ] = None
    api_key: Annotated[str | None, typer.Option(help="Its key.", rich_help_panel=_SERVER)] = None
    server_pid: Annotated[
        int | None, typer.Option(help="Its process, to watch its memory.", rich_help_panel=_SERVER)
    ] = None
    duration_s: Annotated[
        float | None,
        typer.Option(help="End after so long; 1800 when no other end is given.", rich_help_panel=_TALK),
    ] = None
    turns: Annotated[int | None, typer.Option(help="End after so many.", rich_help_panel=_TALK)] = None
    target_history_tokens: Annotated[
        int | None, typer.Option(help="End when the history is so long.", rich_help_panel=_TALK)
    ] = None
    turn_spacing_s: Annotated[
        float,
        typer.Option(help="Between starts of turns; an overrun starts at once.", rich_help_panel=_TALK),
    ] = 0.0
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", rich_help_panel=_TALK)] = 64
    message_tokens: Annotated[int, typer.Option(help="Tokens of each message.", rich_help_panel=_TALK)] = 64
    seed: Annotated[int, typer.Option(help="Which messages.", rich_help_panel=_TALK)] = 0
    output: Output = Path("bench-session.json")
    picture: Annotated[Path | None, typer.Option(help="Write latency over history as SVG.")] = None
    partial_checkpoint_every_s: Annotated[
        float, typer.Option(help="Write what there is so often, marked as partial.")
    ] = 600.0
    as_json: Json = False
    kv_limit: Annotated[
        float, typer.Option(help="How far KV memory may vary past the plateau.", rich_help_panel=_GATES)
    ] = KV_LIMIT
    tail_limit: Annotated[
        float, typer.Option(help="The last turns' latency over the first ones'.", rich_help_panel=_GATES)
    ] = TAIL_LIMIT
    rss_limit: Annotated[
        float,
        typer.Option(help="The server's memory: last 20 turns over turn 20.", rich_help_panel=_GATES),
    ] = RSS_LIMIT

    def bench(self) -> "SessionBench":
        """The benchmark's settings. Raises ConfigError."""
        from kakeya.bench.session import SessionBench

        return SessionBench(
            self.model,
            self.engine_config(capacity=1),
            grpc_address=self.grpc_address,
            api_key=self.api_key,
            server_pid=self.server_pid,
            duration_s=self.duration_s,
            turns=self.turns,
            target_history_tokens=self.target_history_tokens,
            turn_spacing_s=self.turn_spacing_s,
            max_tokens=self.max_tokens,
            message_tokens=self.message_tokens,
            seed=self.seed,
            checkpoint_every_s=self.partial_checkpoint_every_s,
            limits=Limits(self.kv_limit, self.tail_limit, self.rss_limit),
        )


def session(context: typer.Context, options: SessionOptions) -> None:
    """Talk, write the report, show the tables; exit 1 when a gate failed."""
    check_output(options.output)
    check_picture(options.picture)
    bench, screen = options.bench(), Screen()
    if options.grpc_address is None:
        fetch(screen, options.model)
    from kakeya.bench.session import run
    from kakeya.bench.session_page import session_page, session_picture, session_sections

    with timed_progress(screen) as progress:
        report = run(bench, progress, lambda partial: write(options.output, partial, session_page))
    tables = [section.table for section in session_sections(report.results)]
    drawing = Drawing(options.picture, session_picture)
    conclude(screen, options.output, report, session_page, tables, drawing, as_json=options.as_json)
