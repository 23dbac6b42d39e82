"""Runs any benchmark: from the check of its flags to the exit status, with report, page and picture."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import typer

from kakeya.bench.benchmark import Benchmark, Results, Run
from kakeya.bench.chart import picture, templates
from kakeya.bench.machine import machine_facts, public_name, public_proposers
from kakeya.bench.page import report_page
from kakeya.bench.report import Gate, Report, as_json, check_file, now, write_file
from kakeya.bench.tables import Chart, Table
from kakeya.errors import ConfigError

R = TypeVar("R", bound=Results)


class ProgressForm(StrEnum):
    """How a run says how far it is: a bar on a terminal, or a JSON object a line on standard error."""

    BAR = "bar"
    JSON = "json"


@dataclass(frozen=True)
class Outputs:
    """Where a report goes and who is told of it: the flags that all benchmarks have.

    Without `output` it is bench-KIND.json.
    """

    output: Annotated[
        Path | None,
        typer.Option(help="The report; its HTML page is written beside it.", show_default="bench-VERB.json"),
    ] = None
    picture: Annotated[Path | None, typer.Option(help="Write the report's main chart as SVG.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the report itself on stdout.")] = False
    progress: Annotated[
        ProgressForm, typer.Option(help="A bar for people, or lines of JSON on stderr for programs.")
    ] = ProgressForm.BAR

    def path(self, kind: str) -> Path:
        return self.output or Path(f"bench-{kind}.json")


class Terminal(Protocol):
    """What the runner shows things on."""

    def fetch(self, model: str) -> Path:
        """Where the model lies, once it does. Raises what resolving raises."""
        ...

    def progress(self) -> AbstractContextManager[Callable[[float, str], None]]:
        """A bar; call with the share of the run that is done and what is going on."""
        ...

    def show(self, tables: Sequence[Table], gates: Sequence[Gate]) -> None: ...

    def line(self, text: str) -> None: ...

    def notice(self, text: str, style: str = "dim") -> None: ...


def execute(benchmark: Benchmark[R], outputs: Outputs, terminal: Terminal) -> int:
    """Measure, write the report, its page and its picture, show them; 1 when a gate or the picture failed.

    Raises ConfigError for settings that cannot be, before anything is fetched or measured, and what the
    benchmark raises. A picture that cannot be drawn costs nothing else.
    """
    path = outputs.path(benchmark.kind)
    page_path = path.with_suffix(".html")
    check_file("report", path, ".json")
    check_file("picture", outputs.picture, ".svg")
    benchmark.check(picture=outputs.picture is not None)
    model = benchmark.model_to_fetch
    model_path = None if model is None else terminal.fetch(model)
    templates()  # now, so that no measurement sees them loaded
    report = Report(benchmark.kind, settings(benchmark), machine_facts())
    with terminal.progress() as progress:
        progress(0.0, "starting")
        run: Run[R] = Run(progress, lambda results: write(results), model_path, benchmark.checkpoint_every_s)

        def write(results: R, finished_at: str | None = None) -> Report:
            told = replace(
                report,
                config=report.config | as_json(run.facts),
                machine=report.machine | as_json(run.machine),
                results=as_json(results),
                gates=tuple(benchmark.gates(results)),
                finished_at=finished_at,
            )
            write_file("report", path, told.to_json())
            write_file("report", page_path, report_page(benchmark.title, told, benchmark.show(results)))
            return told

        results = run.stamped(benchmark.run(run))
    report = write(results, now())
    shown = benchmark.show(results)
    failure = _draw(outputs.picture, shown)
    if outputs.as_json:
        terminal.line(report.to_json().rstrip())
    else:
        terminal.show([each for each in shown if isinstance(each, Table)], report.gates)
    terminal.notice(f"report: {path}, page: {page_path}")
    if failure:
        terminal.notice(failure, style="bold red")
    return 1 if failure else report.exit_status


def _draw(path: Path | None, shown: Sequence[Table | Chart]) -> str:
    """Write the picture, if one was asked for; what went wrong, or nothing."""
    if path is None:
        return ""
    chart = main_chart(shown)
    if chart is None:
        return "cannot draw the picture: what it shows was not measured"
    try:
        write_file("picture", path, picture(chart))
    except ConfigError as error:
        return str(error)
    return ""


def main_chart(shown: Sequence[Table | Chart]) -> Chart | None:
    """The chart that stands for the report."""
    return next((each for each in shown if isinstance(each, Chart) and each.picture), None)


# Their ends alone are told, and `system` stays what it is.
_TLS_FILES = ("proposer_tls_ca", "proposer_tls_cert", "proposer_tls_key")


def settings(benchmark: Benchmark[Any]) -> dict[str, Any]:
    """The flags as a report tells them: no secrets, and of the machine's directories nothing."""
    told = {each.name: getattr(benchmark, each.name) for each in fields(benchmark)}
    if isinstance(told.get("model"), str):
        told["model"] = public_name(told["model"])
    told |= {name: public_proposers(told[name]) for name in ("proposer", "proposers") if name in told}
    told |= {name: Path(told[name]) for name in _TLS_FILES if told.get(name)}
    return {name: as_json(value) for name, value in told.items() if name not in benchmark.secrets}
