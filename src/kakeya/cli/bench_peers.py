"""`kakeya bench peers`: the engine and one conversation beside llama.cpp and transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kakeya.bench.report import check_output, check_picture
from kakeya.bench.turns_results import RESPONSES
from kakeya.cli.bench_common import (
    Drawing,
    EngineOptions,
    Json,
    Output,
    Quick,
    Repeats,
    conclude,
    timed_progress,
    write,
)
from kakeya.cli.bench_turns import (
    PEERS,
    TALK,
    CheckpointEvery,
    LlamaContext,
    LlamaProgram,
    MaxTokens,
    MessageTokens,
    Seed,
    fetched_model,
)
from kakeya.cli.command import command_of
from kakeya.cli.console import Screen
from kakeya.errors import ConfigError

if TYPE_CHECKING:
    from kakeya.bench.comparison import PeersBench


def register(bench: typer.Typer) -> None:
    bench.command("peers", help="The engine and one conversation beside llama.cpp and transformers.")(
        command_of(PeersOptions, peers)
    )


@dataclass(frozen=True)
class PeersOptions(EngineOptions):
    """What `kakeya bench peers` was asked for: one field per flag."""

    repeats: Repeats = 5
    quick: Quick = False
    turns: Annotated[
        int | None,
        typer.Option(help="How many turns; 100 when left out, 4 with --quick.", rich_help_panel=TALK),
    ] = None
    max_tokens: MaxTokens = 32
    message_tokens: MessageTokens = 32
    seed: Seed = 0
    llama_server: LlamaProgram = None
    llama_context: LlamaContext = 0
    transformers_turns: Annotated[
        int | None,
        typer.Option(
            help="For how many transformers takes part; 20 when left out, 2 with --quick.",
            rich_help_panel=PEERS,
        ),
    ] = None
    output: Output = Path("bench-peers.json")
    picture: Annotated[Path | None, typer.Option(help="Write latency over turns as SVG.")] = None
    partial_checkpoint_every_s: CheckpointEvery = 60.0
    as_json: Json = False

    def bench(self, model_path: Path) -> "PeersBench":
        """The benchmark's settings. Raises ConfigError."""
        from kakeya.bench.comparison import PeersBench
        from kakeya.bench.engine import EngineBench
        from kakeya.bench.plan import full_plan, quick_plan
        from kakeya.bench.turns import TurnsBench

        if self.repeats < 1:
            raise ConfigError(f"repeats must be at least 1, got {self.repeats}")
        config = self.engine_config(capacity=1)
        plan = quick_plan(self.repeats) if self.quick else full_plan(self.repeats)
        talk = TurnsBench(
            self.model,
            str(model_path),
            config,
            ways=(RESPONSES,),
            llama_server=None if self.llama_server is None else str(self.llama_server),
            llama_context=self.llama_context,
            transformers_turns=_given(self.transformers_turns, 2 if self.quick else 20),
            turns=_given(self.turns, 4 if self.quick else 100),
            max_tokens=self.max_tokens,
            message_tokens=self.message_tokens,
            seed=self.seed,
            checkpoint_every_s=self.partial_checkpoint_every_s,
        )
        return PeersBench(EngineBench(self.model, config, plan, peers=True), talk)


def _given(number: int | None, otherwise: int) -> int:
    return otherwise if number is None else number


def peers(context: typer.Context, options: PeersOptions) -> None:
    """Measure, write the report, show the tables; exit 1 when a gate failed."""
    check_output(options.output)
    check_picture(options.picture)
    screen = Screen()
    bench = options.bench(fetched_model(screen, options.model))
    from kakeya.bench.comparison import run
    from kakeya.bench.comparison_page import comparison_page, comparison_picture, comparison_table

    with timed_progress(screen) as progress:
        report = run(bench, progress, lambda partial: write(options.output, partial, comparison_page))
    table = comparison_table(report.results)
    drawing = Drawing(options.picture, comparison_picture)
    conclude(screen, options.output, report, comparison_page, [table], drawing, as_json=options.as_json)
