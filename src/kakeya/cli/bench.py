"""`kakeya bench`: every benchmark as a verb, presets of them, and one page over many reports."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.box import SIMPLE
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from typer.core import TyperGroup
from typer.main import get_group

from kakeya.bench.benchmark import Benchmark
from kakeya.bench.chart import picture
from kakeya.bench.page import collection_page, model_of, overview
from kakeya.bench.report import Gate, Report, check_file, collect, write_file
from kakeya.bench.runner import Outputs, ProgressForm, execute, main_chart
from kakeya.bench.tables import Table
from kakeya.cli.command import command_of
from kakeya.cli.console import FetchBar, Screen
from kakeya.errors import ConfigError

PIPE_WIDTH = 160
# The time left is estimated from so much of the past: minutes may pass between two signs of progress.
SPEED_SECONDS = 600.0
# Programs are told so often how far a run is.
TOLD_EVERY_S = 0.2
_REPORT, _PRESETS = "report", ("presets", "preset")
_STYLES = {True: "green", False: "bold red", None: "dim"}


class BenchGroup(TyperGroup):
    """Makes a verb when it is wanted: nobody waits for what the others import, or needs it installed."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        from kakeya.bench.registry import usable_kinds

        return [*usable_kinds(), *_PRESETS, _REPORT]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        from kakeya.bench.registry import KINDS

        if cmd_name not in self.commands and cmd_name in (*KINDS, *_PRESETS, _REPORT):
            self.commands.update(get_group(_with_verb(cmd_name)).commands)
        return self.commands.get(cmd_name)


def register(app: typer.Typer) -> None:
    about = "Measure speed, memory, capacity and quality."
    app.add_typer(typer.Typer(cls=BenchGroup, help=about, no_args_is_help=True), name="bench")


def _with_verb(kind: str) -> typer.Typer:
    from kakeya.bench.registry import benchmark_of

    bench = typer.Typer()
    if kind == _REPORT:
        about = "One HTML page over the reports in a directory, and their pictures."
        bench.command(kind, help=about)(report)
    elif kind in _PRESETS:
        from kakeya.cli import presets

        presets.register(bench)
    else:
        benchmark = benchmark_of(kind)
        bench.command(kind, help=benchmark.help)(verb(benchmark, measure))
    return bench


def measure(benchmark: Benchmark[Any], outputs: Outputs) -> None:
    """Run a benchmark, and leave with its exit status."""
    screen = BenchScreen() if outputs.progress is ProgressForm.BAR else ProgramScreen()
    raise typer.Exit(execute(benchmark, outputs, screen))


def verb(
    benchmark: type[Benchmark[Any]], run: Callable[[Benchmark[Any], Outputs], None]
) -> Callable[..., None]:
    """A command with the benchmark's flags and those of its outputs, which hands both to `run`."""
    hints = get_type_hints(Outputs, include_extras=True)
    outputs = [(each.name, hints[each.name], each.default) for each in fields(Outputs)]
    options = make_dataclass(benchmark.__name__, outputs, bases=(benchmark,), frozen=True)

    def command(context: typer.Context, given: Any) -> None:
        run(_with_presets(context, _part(benchmark, given)), _part(Outputs, given))

    return command_of(options, command)


def _part(kind: type[Any], given: Any) -> Any:
    return kind(**{each.name: getattr(given, each.name) for each in fields(kind)})


def _with_presets(context: typer.Context, asked: Benchmark[Any]) -> Benchmark[Any]:
    """What was said on the command line wins over a preset."""
    sources = {name: context.get_parameter_source(name) for name in asked.presets()}
    unsaid = [name for name, source in sources.items() if source is None or source.name == "DEFAULT"]
    return replace(asked, **{name: asked.presets()[name] for name in unsaid})


class BenchScreen(Screen):
    """The terminal as the runner wants it."""

    def fetch(self, model: str) -> Path:
        from kakeya.models.catalogue import resolve

        with FetchBar(self) as progress:
            return Path(resolve(model, progress))

    @contextmanager
    def progress(self) -> Iterator[Callable[[float, str], None]]:
        """A bar with the time left."""
        with Progress(
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            "left:",
            TimeRemainingColumn(),
            "{task.description}",
            console=self.err,
            transient=True,
            disable=not self.err.is_terminal,
            speed_estimate_period=SPEED_SECONDS,
        ) as progress:
            task = progress.add_task("", total=1.0)
            yield lambda done, work: progress.update(task, completed=done, description=work)

    def show(self, tables: Sequence[Table], gates: Sequence[Gate]) -> None:
        # A pipe has no width of its own; lines broken at 80 columns would be no use to anyone.
        if not self.out.is_terminal:
            self.out.width = PIPE_WIDTH
        self.out.print(*map(_rich, tables), *([_rich_gates(gates)] if gates else ()), sep="")


class ProgramScreen(BenchScreen):
    """For a program that reads standard error: `{"progress": 0.25, "work": "16 agents"}`, a line each."""

    def fetch(self, model: str) -> Path:
        _tell(0.0, f"fetching {model}")
        return super().fetch(model)

    @contextmanager
    def progress(self) -> Iterator[Callable[[float, str], None]]:
        """Lines, the first one at once."""
        told = -TOLD_EVERY_S

        def tell(done: float, work: str) -> None:
            nonlocal told
            if time.monotonic() - told >= TOLD_EVERY_S:
                told = time.monotonic()
                _tell(done, work)

        yield tell


def _tell(done: float, work: str) -> None:
    sys.stderr.write(json.dumps({"progress": round(done, 4), "work": work}) + "\n")
    sys.stderr.flush()


def _rich(table: Table) -> RichTable:
    drawn = RichTable(title=table.title, title_justify="left", box=SIMPLE)
    for place, heading in enumerate(table.headings):
        drawn.add_column(heading, justify="left" if place < table.labels else "right")
    for row in table.cells:
        drawn.add_row(*row)
    return drawn


def _rich_gates(gates: Sequence[Gate]) -> RichTable:
    drawn = RichTable("gate", "verdict", "why", title="Gates", title_justify="left", box=SIMPLE)
    for gate in gates:
        drawn.add_row(gate.name, gate.verdict, gate.reason, style=_STYLES[gate.passed])
    return drawn


def report(
    directory: Annotated[Path, typer.Argument(help="Where the reports are, also further down.")],
    output: Annotated[Path, typer.Option(help="The page.")] = Path("bench-report.html"),
    pictures: Annotated[
        Path | None, typer.Option(help="Write each report's picture as SVG into this directory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the overview as JSON.")] = False,
) -> None:
    """Read, write the page, show the overview; exit 1 when a gate of any report failed."""
    from kakeya.bench.registry import shown

    check_file("page", output, ".html")
    if pictures is not None and not pictures.is_dir():
        raise ConfigError(f"pictures need an existing directory to be written in, got {pictures}")
    collection, screen, drawn = collect(directory), BenchScreen(), 0
    parts = {name: shown(each) for name, each in collection.reports.items()}
    write_file("page", output, collection_page(collection, parts))
    for name, part in parts.items():
        if pictures is not None and (chart := main_chart(part)) is not None:
            write_file("picture", pictures / f"{name.replace('/', '-')}.svg", picture(chart))
            drawn += 1
    if as_json:
        told = [_told(name, each) for name, each in collection.reports.items()]
        screen.line(json.dumps({"reports": told, "passed_over": collection.passed_over}, indent=2))
    else:
        screen.show([overview(collection)], ())
    screen.notice(f"page: {output}" + (f", pictures: {drawn} in {pictures}" if pictures else ""))
    raise typer.Exit(max(each.exit_status for each in collection.reports.values()))


def _told(name: str, report: Report) -> dict[str, Any]:
    whole = report.to_dict()
    names = ("kind", "partial", "started_at", "finished_at", "gates")
    return {"name": name, "model": model_of(report.config), **{each: whole[each] for each in names}}
