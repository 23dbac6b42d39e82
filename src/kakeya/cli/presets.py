"""`kakeya bench presets` and `kakeya bench preset NAME`: benchmark runs with everything decided."""

import json
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table
from typer.main import get_command

from kakeya.bench.benchmark import Benchmark
from kakeya.bench.presets import Preset, preset_named, read_presets
from kakeya.bench.registry import benchmark_of, usable_kinds
from kakeya.bench.runner import Outputs
from kakeya.cli.bench import PIPE_WIDTH, measure, verb
from kakeya.cli.console import Screen, harmless, human_seconds
from kakeya.errors import ConfigError
from kakeya.options import Json

# What Typer raises for a command line that makes no sense; it has no name for it.
_UsageError: Any = typer.BadParameter.__bases__[0]

Manifests = Annotated[
    list[Path] | None,
    typer.Option("--manifest", help="A TOML file with more presets. Repeatable."),
]


def register(bench: typer.Typer) -> None:
    bench.command("presets", help="List runs that have a name, with everything decided.")(list_presets)
    bench.command("preset", help="Run one of them here.")(run_preset)


def list_presets(manifest: Manifests = None, as_json: Json = False) -> None:
    found, screen = checked_presets(manifest or ()).values(), Screen()
    if as_json:
        screen.line(json.dumps([asdict(each) for each in found]))
        return
    show_presets(screen, found)


def run_preset(
    name: Annotated[str, typer.Argument(help="The preset, as `kakeya bench presets` lists it.")],
    manifest: Manifests = None,
    output: Annotated[
        Path | None,
        typer.Option(help="The report; its page is written beside it.", show_default="bench-NAME.json"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report itself on stdout.")] = False,
) -> None:
    """Exits like the benchmark. At the preset's time limit it is told to end, as by a signal."""
    preset = preset_named(read_presets(manifest or ()), name)
    outputs = Outputs(output=output or Path(f"bench-{name}.json"), as_json=as_json)
    with _ending_at(preset.limit_s):
        measure(benchmark_for(preset), outputs)


def checked_presets(manifests: Sequence[Path]) -> dict[str, Preset]:
    """The presets, each understood by its benchmark, if that is installed. Raises ConfigError."""
    presets, usable = read_presets(manifests), usable_kinds()
    for preset in presets.values():
        if preset.benchmark in usable:
            benchmark_for(preset)
    return presets


def benchmark_for(preset: Preset) -> Benchmark[Any]:
    """What the preset's arguments mean, read as a command line is.

    Raises ConfigError for arguments that the benchmark does not know, for values that it refuses, and for
    what is not a preset's to decide: where reports go, and keys, which everybody would see in the list.
    """
    found: list[tuple[Benchmark[Any], Outputs]] = []
    app, kind = typer.Typer(add_completion=False), benchmark_of(preset.benchmark)
    # Without --help, which would print and leave.
    app.command(add_help_option=False)(verb(kind, lambda *asked: found.append(asked)))
    try:
        get_command(app)(args=list(preset.arguments), standalone_mode=False)
    except _UsageError as error:
        raise ConfigError(f"preset {preset.name!r}: {error.format_message()}") from error
    except ConfigError as error:
        raise ConfigError(f"preset {preset.name!r}: {error}") from error
    benchmark, outputs = found[0]
    if outputs != Outputs():
        told = ", ".join(f"--{each.name}" for each in fields(Outputs)).replace("as_json", "json")
        raise ConfigError(f"preset {preset.name!r}: {told} are for whoever runs it")
    for secret in sorted(kind.secrets):
        if getattr(benchmark, secret, None) is not None:
            raise ConfigError(
                f"preset {preset.name!r}: --{secret.replace('_', '-')} must not stand in a list"
            )
    return benchmark


def show_presets(screen: Screen, presets: Iterable[Preset]) -> None:
    """A table of them."""
    if not screen.out.is_terminal:
        screen.out.width = PIPE_WIDTH
    table = Table("preset", "proves", "command", "at most", "report", box=SIMPLE)
    for each in presets:
        cells = (each.name, each.proves, each.command, human_seconds(each.limit_s), each.benchmark)
        table.add_row(*(escape(harmless(cell)) for cell in cells))
    screen.out.print(table)


@contextmanager
def _ending_at(limit_s: float) -> Iterator[None]:
    """Have the run end after so long, as SIGTERM ends it: its report says so."""
    timer = threading.Timer(limit_s, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
