"""`kakeya bench capacity`: how many agents at once, each checked against its solo run."""

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kakeya.bench.capacity_results import RSS_LIMIT
from kakeya.bench.report import check_output, check_picture
from kakeya.cli import options
from kakeya.cli.bench_common import (
    Drawing,
    EngineOptions,
    Json,
    Output,
    conclude,
    fetch,
    numbers,
    timed_progress,
    write,
)
from kakeya.cli.command import command_of
from kakeya.cli.console import Screen
from kakeya.types import Numerics

if TYPE_CHECKING:
    from kakeya.bench.capacity import CapacityBench

_RAMP = "The ramp"


class Preset(StrEnum):
    """How far to go: 256 agents with windows as they are, or 2,048 with small ones."""

    LIGHT = "light"
    STRESS = "stress"


# What a preset says where the command line says nothing.
PRESETS: dict[Preset, dict[str, Any]] = {
    Preset.LIGHT: {"levels": "1,16,64,256"},
    Preset.STRESS: {"levels": "256,512,1024,2048", "window": 64, "prompt_len": 8, "gen_tokens": 8},
}


def register(bench: typer.Typer) -> None:
    bench.command("capacity", help="How many agents at once, every output checked against its solo run.")(
        command_of(CapacityOptions, capacity)
    )


@dataclass(frozen=True)
class CapacityOptions(EngineOptions):
    """What `kakeya bench capacity` was asked for: one field per flag."""

    numerics: options.NumericMode = Numerics.EXACT
    preset: Annotated[
        Preset,
        typer.Option(help="light: to 256 agents; stress: to 2,048, small windows.", rich_help_panel=_RAMP),
    ] = Preset.LIGHT
    levels: Annotated[
        str, typer.Option(help="Numbers of agents, rising, with commas.", rich_help_panel=_RAMP)
    ] = PRESETS[Preset.LIGHT]["levels"]
    context_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens each holds first; what fills the window when left out.", rich_help_panel=_RAMP
        ),
    ] = None
    prompt_len: Annotated[int, typer.Option(help="Tokens each then says.", rich_help_panel=_RAMP)] = 16
    gen_tokens: Annotated[int, typer.Option(help="Tokens each is answered.", rich_help_panel=_RAMP)] = 16
    capacity: Annotated[
        int | None,
        typer.Option(help="The server's; as many as the highest level when left out.", rich_help_panel=_RAMP),
    ] = None
    seed: Annotated[int, typer.Option(help="Which texts and answers.", rich_help_panel=_RAMP)] = 0
    rss_limit: Annotated[
        float, typer.Option(help="Gate: the server's peak memory over when it was ready.")
    ] = RSS_LIMIT
    output: Output = Path("bench-capacity.json")
    picture: Annotated[Path | None, typer.Option(help="Write speed over agents as SVG.")] = None
    as_json: Json = False

    def bench(self) -> "CapacityBench":
        """The benchmark's settings. Raises ConfigError."""
        from kakeya.bench.capacity import CapacityBench

        levels = numbers("levels", self.levels)
        return CapacityBench(
            self.model,
            self.engine_config(capacity=max(levels) if self.capacity is None else self.capacity),
            levels,
            context_len=self.context_len,
            prompt_len=self.prompt_len,
            gen_tokens=self.gen_tokens,
            seed=self.seed,
            rss_limit=self.rss_limit,
        )


def capacity(context: typer.Context, given: CapacityOptions) -> None:
    """Climb, write the report, show the tables; exit 1 when a gate failed."""
    asked = _with_preset(context, given)
    check_output(asked.output)
    check_picture(asked.picture)
    bench, screen = asked.bench(), Screen()
    fetch(screen, asked.model)
    from kakeya.bench.capacity import run
    from kakeya.bench.capacity_page import capacity_page, capacity_picture, capacity_sections

    with timed_progress(screen) as progress:
        report = run(bench, progress, lambda partial: write(asked.output, partial, capacity_page))
    tables = [section.table for section in capacity_sections(report.results)]
    drawing = Drawing(asked.picture, capacity_picture)
    conclude(screen, asked.output, report, capacity_page, tables, drawing, as_json=asked.as_json)


def _with_preset(context: typer.Context, given: CapacityOptions) -> CapacityOptions:
    """What was said on the command line wins over the preset."""
    sources = {name: context.get_parameter_source(name) for name in PRESETS[given.preset]}
    unsaid = {name for name, source in sources.items() if source is None or source.name == "DEFAULT"}
    return replace(given, **{name: PRESETS[given.preset][name] for name in unsaid})
