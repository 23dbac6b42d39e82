"""What the verbs of `kakeya bench` share: options, progress, and how a report is concluded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table as RichTable

from kakeya.bench.gates import Gate
from kakeya.bench.page import Table
from kakeya.bench.report import Report, write_picture, write_report
from kakeya.cli import options
from kakeya.cli.console import FetchBar, Screen
from kakeya.config import DEFAULT_MODEL, CacheConfig, EngineConfig
from kakeya.errors import ConfigError

Repeats = Annotated[int, typer.Option(help="Repetitions of every measurement; medians are reported.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few seconds of the same work, to see that it runs.")]
Output = Annotated[Path, typer.Option(help="The report; its HTML page is written beside it.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report itself on stdout.")]

PIPE_WIDTH = 160
# The time left is estimated from so much of the past: minutes may pass between two signs of progress.
SPEED_SECONDS = 600.0
_STYLES = {True: "green", False: "bold red", None: "dim"}


@dataclass(frozen=True)
class EngineOptions:
    """The model and the engine of a server that a verb starts: one field per flag."""

    model: options.Model = DEFAULT_MODEL
    backend: options.Backend = EngineConfig.backend
    sink: options.Sink = CacheConfig.sink
    window: options.Window = CacheConfig.window
    dtype: options.Dtype = EngineConfig.dtype
    weights: options.Weights = EngineConfig.weights
    numerics: options.NumericMode = EngineConfig.numerics
    kernels: options.Kernels = EngineConfig.kernels
    threads: options.Threads = None

    def engine_config(self, capacity: int) -> EngineConfig:
        """The engine's settings. Raises ConfigError naming the option that cannot be."""
        return options.engine_config(
            backend=self.backend,
            sink=self.sink,
            window=self.window,
            dtype=self.dtype,
            weights=self.weights,
            numerics=self.numerics,
            kernels=self.kernels,
            threads=self.threads,
            capacity=capacity,
        )


@dataclass(frozen=True)
class Drawing:
    """Where a picture of the results goes, if one was asked for, and who draws it."""

    path: Path | None
    draw: Callable[[Mapping[str, Any]], str]


def fetch(screen: Screen, model: str) -> None:
    """Have the model before the clock starts. Raises what resolving raises."""
    from kakeya.models.catalogue import resolve

    with FetchBar(screen) as progress:
        resolve(model, progress)


@contextmanager
def timed_progress(screen: Screen) -> Iterator[Callable[[float, str], None]]:
    """A bar with the time left; call with the share of the run that is done and what is going on."""
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(
        *columns,
        console=screen.err,
        transient=True,
        disable=not screen.err.is_terminal,
        speed_estimate_period=SPEED_SECONDS,
    ) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda done, work: progress.update(task, completed=done, description=work)


@contextmanager
def counted_progress(screen: Screen, pieces_of_work: int) -> Iterator[Callable[[str], None]]:
    """The same bar over known pieces of work; call with each piece as it begins."""
    begun = count()
    with timed_progress(screen) as progress:
        yield lambda work: progress(next(begun) / pieces_of_work, work)


def numbers(name: str, text: str) -> tuple[int, ...]:
    """The value of an option that takes several. Raises ConfigError naming it."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{name} must be whole numbers with commas, such as 1,16,64, got {text!r}"
        ) from None


def write(output: Path, report: Report, page: Callable[[Report], str]) -> Path:
    """The report and its page; where the page is."""
    return write_report(output, report, page(report))


def conclude(
    screen: Screen,
    output: Path,
    report: Report,
    page: Callable[[Report], str],
    tables: Sequence[Table],
    drawing: Drawing | None = None,
    *,
    as_json: bool,
) -> None:
    """Write the report, draw its picture, show it, and exit with the verdict of its gates.

    A picture that fails is named on stderr and makes the exit status 1; it costs nothing else.
    """
    page_path = write(output, report, page)
    failure = "" if drawing is None else _draw(drawing, report)
    if as_json:
        screen.line(report.to_json().rstrip())
    else:
        _show(screen, *map(_rich, tables), _rich_gates(report.gates))
    screen.notice(f"report: {output}, page: {page_path}")
    if failure:
        screen.notice(failure, style="bold red")
    raise typer.Exit(1 if failure else report.exit_status)


def _draw(drawing: Drawing, report: Report) -> str:
    """Write the picture, if one was asked for; what went wrong, or nothing."""
    if drawing.path is None:
        return ""
    try:
        write_picture(drawing.path, drawing.draw(report.results))
    except ConfigError as error:
        return str(error)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return f"cannot draw the picture from these results: {type(error).__name__} {error}"
    return ""


def show_tables(screen: Screen, tables: Sequence[Table]) -> None:
    """Tables on stdout."""
    _show(screen, *map(_rich, tables))


def _show(screen: Screen, *tables: RichTable) -> None:
    # A pipe has no width of its own; lines broken at 80 columns would be no use to anyone.
    if not screen.out.is_terminal:
        screen.out.width = PIPE_WIDTH
    screen.out.print(*tables, sep="")


def _rich(table: Table) -> RichTable:
    shown = RichTable(title=table.title, title_justify="left", box=SIMPLE)
    for place, column in enumerate(table.columns):
        shown.add_column(column, justify="left" if place < table.labels else "right")
    for row in table.rows:
        shown.add_row(*row)
    return shown


def _rich_gates(gates: Sequence[Gate]) -> RichTable:
    shown = RichTable("gate", "verdict", "why", title="Gates", title_justify="left", box=SIMPLE)
    for gate in gates:
        shown.add_row(gate.name, gate.verdict, gate.reason, style=_STYLES[gate.passed])
    return shown
