"""`kakeya bench`: measure the engine, or what a choice of weights costs in quality."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from kakeya.bench.gates import Gate
from kakeya.bench.page import Table
from kakeya.bench.report import Report, check_output, write_picture, write_report
from kakeya.cli import options
from kakeya.cli.console import FetchBar, Screen
from kakeya.config import DEFAULT_MODEL, CacheConfig, EngineConfig
from kakeya.errors import ConfigError

if TYPE_CHECKING:
    from kakeya.bench.engine import EngineBench
    from kakeya.bench.quality import QualityBench

Repeats = Annotated[int, typer.Option(help="Repetitions of every measurement; medians are reported.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few seconds of the same work, to see that it runs.")]
Output = Annotated[Path, typer.Option(help="The report; its HTML page is written beside it.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report itself on stdout.")]

PIPE_WIDTH = 160
_STYLES = {True: "green", False: "bold red", None: "dim"}


def register(app: typer.Typer) -> None:
    bench = typer.Typer(help="Measure speed, memory and quality.", no_args_is_help=True)
    bench.command("engine", help="Speed, memory and start of the engine.")(engine)
    bench.command("quality", help="What each choice of dtype, weights and kernels costs.")(quality)
    app.add_typer(bench, name="bench")


def engine(
    model: options.Model = DEFAULT_MODEL,
    peers: Annotated[bool, typer.Option("--peers", help="Measure llama.cpp beside us, in turns.")] = False,
    repeats: Repeats = 5,
    quick: Quick = False,
    output: Output = Path("bench-engine.json"),
    picture: Annotated[Path | None, typer.Option(help="Write speed over history as SVG.")] = None,
    as_json: Json = False,
    sink: options.Sink = CacheConfig.sink,
    window: options.Window = CacheConfig.window,
    dtype: options.Dtype = EngineConfig.dtype,
    weights: options.Weights = EngineConfig.weights,
    numerics: options.NumericMode = EngineConfig.numerics,
    kernels: options.Kernels = EngineConfig.kernels,
    threads: options.Threads = None,
) -> None:
    """Measure, write the report, show the tables; exit 1 when a gate failed."""
    config = options.engine_config(
        sink=sink,
        window=window,
        dtype=dtype,
        weights=weights,
        numerics=numerics,
        kernels=kernels,
        threads=threads,
    )
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, got {repeats}")
    check_output(output)
    screen = Screen()
    _fetch(screen, model)
    from kakeya.bench.engine import EngineBench, run
    from kakeya.bench.engine_page import engine_page, engine_sections, history_picture
    from kakeya.bench.plan import full_plan, quick_plan

    plan = quick_plan(repeats) if quick else full_plan(repeats)
    bench = EngineBench(model, config, plan, peers)
    with _progress(screen, bench) as announce:
        report = run(bench, announce, lambda partial: _write(output, partial, engine_page))
    if picture is not None:
        write_picture(picture, history_picture(report.results))
    tables = [section.table for section in engine_sections(report.results)]
    _conclude(screen, output, report, engine_page, tables, as_json=as_json)


def quality(
    model: options.Model = DEFAULT_MODEL,
    quick: Quick = False,
    output: Output = Path("bench-quality.json"),
    as_json: Json = False,
    threads: options.Threads = None,
) -> None:
    """Measure, write the report, show the table; exit 1 when a gate failed."""
    config = EngineConfig() if threads is None else EngineConfig(threads=threads)
    check_output(output)
    screen = Screen()
    _fetch(screen, model)
    from kakeya.bench.quality import QualityBench, run
    from kakeya.bench.quality_page import quality_page, quality_table
    from kakeya.bench.quality_results import DEFAULT

    bench = QualityBench(model, config)
    if quick:
        bench = QualityBench(model, config, choices=(DEFAULT,), passage_tokens=32, most_tokens=48)
    with _progress(screen, bench) as announce:
        report = run(bench, announce, lambda partial: _write(output, partial, quality_page))
    _conclude(screen, output, report, quality_page, [quality_table(report.results)], as_json=as_json)


def _fetch(screen: Screen, model: str) -> None:
    """Have the model before the clock starts. Raises what resolving raises."""
    from kakeya.models.catalogue import resolve

    with FetchBar(screen) as progress:
        resolve(model, progress)


@contextmanager
def _progress(screen: Screen, bench: "EngineBench | QualityBench") -> Iterator[Callable[[str], None]]:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, console=screen.err, transient=True, disable=not screen.err.is_terminal
    ) as progress:
        task = progress.add_task("", total=bench.pieces_of_work, completed=-1)
        yield lambda work: progress.update(task, advance=1, description=work)


def _write(output: Path, report: Report, page: Callable[[Report], str]) -> Path:
    return write_report(output, report, page(report))


def _conclude(
    screen: Screen,
    output: Path,
    report: Report,
    page: Callable[[Report], str],
    tables: Sequence[Table],
    *,
    as_json: bool,
) -> None:
    page_path = _write(output, report, page)
    if as_json:
        screen.line(report.to_json().rstrip())
    else:
        # A pipe has no width of its own; lines broken at 80 columns would be no use to anyone.
        if not screen.out.is_terminal:
            screen.out.width = PIPE_WIDTH
        screen.out.print(*map(_rich, tables), _rich_gates(report.gates), sep="")
    screen.notice(f"report: {output}, page: {page_path}")
    raise typer.Exit(report.exit_status)


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
