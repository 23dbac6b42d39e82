"""`kakeya bench turns`: one conversation by several ways of holding it, turn by turn."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kakeya.bench.report import check_output, check_picture
from kakeya.bench.turns_results import FLAT_LIMIT, MATCHED, RESPONSES, UNMATCHED
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
    from kakeya.bench.turns import TurnsBench

TALK = "The talk"
PEERS = "Who takes part"

LlamaProgram = Annotated[
    Path | None,
    typer.Option(help="A llama-server to run; else the one in xllamacpp.", rich_help_panel=PEERS),
]
LlamaContext = Annotated[
    int,
    typer.Option(help="Its context in tokens; 0: as the model was trained for.", rich_help_panel=PEERS),
]
TransformersTurns = Annotated[
    int, typer.Option(help="For how many turns transformers takes part.", rich_help_panel=PEERS)
]
MaxTokens = Annotated[int, typer.Option(help="The most tokens of each answer.", rich_help_panel=TALK)]
MessageTokens = Annotated[int, typer.Option(help="Tokens of each message.", rich_help_panel=TALK)]
Seed = Annotated[int, typer.Option(help="Which messages.", rich_help_panel=TALK)]
Turns = Annotated[int, typer.Option(help="How many turns.", rich_help_panel=TALK)]
CheckpointEvery = Annotated[
    float, typer.Option(help="Write what there is so often, in seconds, marked as partial.")
]


def register(bench: typer.Typer) -> None:
    bench.command("turns", help="One conversation by Responses, by chat completions, by llama.cpp's server.")(
        command_of(TurnsOptions, turns)
    )


@dataclass(frozen=True)
class TurnsOptions(EngineOptions):
    """What `kakeya bench turns` was asked for: one field per flag."""

    turns: Turns = 200
    max_tokens: MaxTokens = 32
    message_tokens: MessageTokens = 32
    seed: Seed = 0
    unmatched: Annotated[
        bool, typer.Option(help="Chat completions without matching, too.", rich_help_panel=PEERS)
    ] = True
    llama: Annotated[bool, typer.Option(help="llama.cpp's server, too.", rich_help_panel=PEERS)] = True
    llama_server: LlamaProgram = None
    llama_context: LlamaContext = 0
    transformers_turns: TransformersTurns = 0
    flat_limit: Annotated[
        float, typer.Option(help="Gate: our last turns' latency over that when the window was just full.")
    ] = FLAT_LIMIT
    output: Output = Path("bench-turns.json")
    picture: Annotated[Path | None, typer.Option(help="Write latency over turns as SVG.")] = None
    partial_checkpoint_every_s: CheckpointEvery = 60.0
    as_json: Json = False

    def bench(self, model_path: Path) -> "TurnsBench":
        """The benchmark's settings. Raises ConfigError."""
        from kakeya.bench.turns import CAPACITY, TurnsBench

        return TurnsBench(
            self.model,
            str(model_path),
            self.engine_config(capacity=CAPACITY),
            ways=(RESPONSES, MATCHED, *((UNMATCHED,) if self.unmatched else ())),
            llama=self.llama,
            llama_server=None if self.llama_server is None else str(self.llama_server),
            llama_context=self.llama_context,
            transformers_turns=self.transformers_turns,
            turns=self.turns,
            max_tokens=self.max_tokens,
            message_tokens=self.message_tokens,
            seed=self.seed,
            checkpoint_every_s=self.partial_checkpoint_every_s,
            limit=self.flat_limit,
        )


def turns(context: typer.Context, options: TurnsOptions) -> None:
    """Talk, write the report, show the tables; exit 1 when a gate failed."""
    check_output(options.output)
    check_picture(options.picture)
    screen = Screen()
    bench = options.bench(fetched_model(screen, options.model))
    from kakeya.bench.turns import run
    from kakeya.bench.turns_page import turns_page, turns_picture, turns_sections

    with timed_progress(screen) as progress:
        report = run(bench, progress, lambda partial: write(options.output, partial, turns_page))
    tables = [section.table for section in turns_sections(report.results)]
    drawing = Drawing(options.picture, turns_picture)
    conclude(screen, options.output, report, turns_page, tables, drawing, as_json=options.as_json)


def fetched_model(screen: Screen, model: str) -> Path:
    """Where the model lies, fetched first if need be. Raises what resolving raises."""
    from kakeya.models.catalogue import resolve

    fetch(screen, model)
    return Path(resolve(model))
