"""`kakeya bridge`: benchmarks on a machine that one cannot log in to."""

import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from kakeya.bench.report import check_file, read_report, write_file
from kakeya.cli.bench import PIPE_WIDTH, BenchScreen
from kakeya.cli.bridge_serve import BridgeOptions, serve
from kakeya.cli.calling import CallOptions
from kakeya.cli.command import ENVIRONMENT_PREFIX, command_of
from kakeya.cli.console import Screen, harmless, human_seconds
from kakeya.errors import ConfigError, RemoteError, RunNotFound
from kakeya.options import Json

if TYPE_CHECKING:
    from kakeya.bridge.caller import Bridge
    from kakeya.bridge.records import RunRecord

RunId = Annotated[str, typer.Argument(help="The run's id.", metavar="RUN")]
_TAIL_LINES = 20


def register(app: typer.Typer) -> None:
    verbs = typer.Typer(
        no_args_is_help=True, help="Run benchmarks by name on a machine that you cannot log in to."
    )
    verbs.command(
        "serve",
        help="Run presets for callers elsewhere: nothing but what `kakeya bench presets` lists. "
        "Every flag has a KAKEYA_ environment twin; the flag wins.",
        context_settings={"auto_envvar_prefix": ENVIRONMENT_PREFIX},
    )(command_of(BridgeOptions, serve))
    verbs.command("presets", help="List what a bridge can run.")(command_of(ListOptions, presets))
    verbs.command("run", help="Run a preset there, and bring its report home. Ctrl-C ends the run.")(
        command_of(RunOptions, run)
    )
    verbs.command("attach", help="Follow a run again, and bring its report home.")(
        command_of(AttachOptions, attach)
    )
    verbs.command("runs", help="List your runs, newest first.")(command_of(ListOptions, runs))
    verbs.command("fetch", help="Bring home what a run has reported so far.")(
        command_of(AttachOptions, fetch)
    )
    verbs.command("cancel", help="End a run.")(command_of(OneRunOptions, cancel))
    app.add_typer(verbs, name="bridge")


@dataclass(frozen=True, kw_only=True)
class BridgeCallOptions(CallOptions):
    """Which bridge to call, and how."""

    host: Annotated[
        str, typer.Argument(help="Where the bridge is: HOST or HOST:PORT. The usual port is 50071.")
    ]

    def bridge(self, patience_s: float = 0.0) -> "Bridge":
        """Raises ConfigError for certificates that cannot be."""
        from kakeya.bridge.caller import Bridge

        return Bridge(
            self.host, self.api_key, self.tls(), patience_s, lambda words: Screen().notice(harmless(words))
        )


@dataclass(frozen=True, kw_only=True)
class ListOptions(BridgeCallOptions):
    """What to list, and for whom."""

    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class OneRunOptions(BridgeCallOptions):
    """Which run."""

    run_id: RunId


@dataclass(frozen=True, kw_only=True)
class ReportOptions(BridgeCallOptions):
    """Where the report goes. Raises ConfigError when it cannot go there."""

    output: Annotated[
        Path | None,
        typer.Option(help="The report; its page is written beside it.", show_default="bench-PRESET.json"),
    ] = None
    patience_s: Annotated[
        float,
        typer.Option(help="Seconds for which a lost connection is tried again. The run goes on."),
    ] = 600.0

    def __post_init__(self) -> None:
        check_file("report", self.output, ".json")


@dataclass(frozen=True, kw_only=True)
class RunOptions(ReportOptions):
    """What to run. Raises ConfigError for what cannot be a preset's name."""

    preset: Annotated[str, typer.Argument(help="What to run, by name.")]
    detach: Annotated[
        bool, typer.Option("--detach", help="Print the run's id and leave; `attach` comes back to it.")
    ] = False

    def __post_init__(self) -> None:
        from kakeya.bench.presets import is_name

        super().__post_init__()
        if not is_name(self.preset):
            raise ConfigError(f"a preset is called like agent-capacity-light, not {self.preset!a}")


@dataclass(frozen=True, kw_only=True)
class AttachOptions(ReportOptions):
    """Which run, and where its report goes."""

    run_id: RunId


def presets(context: typer.Context, options: ListOptions) -> None:
    from kakeya.cli.presets import show_presets

    with options.bridge() as bridge:
        found = bridge.presets()
    screen = Screen()
    if options.as_json:
        screen.line(json.dumps([asdict(each) for each in found]))
    else:
        show_presets(screen, found)


def run(context: typer.Context, options: RunOptions) -> None:
    with options.bridge(options.patience_s) as bridge:
        states = bridge.run(options.preset, secrets.token_hex(16))
        if options.detach:
            Screen().line(next(states).run_id)
        else:
            _bring_home(bridge, states, options.output)


def attach(context: typer.Context, options: AttachOptions) -> None:
    with options.bridge(options.patience_s) as bridge:
        _bring_home(bridge, bridge.follow(options.run_id), options.output)


def fetch(context: typer.Context, options: AttachOptions) -> None:
    with options.bridge(options.patience_s) as bridge:
        record = next(bridge.follow(options.run_id))
        _write_report(BenchScreen(), bridge, record, options.output)


def runs(context: typer.Context, options: ListOptions) -> None:
    with options.bridge() as bridge:
        found = bridge.runs()
    screen = Screen()
    if options.as_json:
        screen.line(json.dumps([asdict(each) for each in found]))
        return
    table = Table("run", "preset", "state", "began", "took", "done", "why", box=SIMPLE)
    for column in table.columns[:-1]:
        column.no_wrap = True  # to be copied
    if not screen.out.is_terminal:
        screen.out.width = PIPE_WIDTH
    for each in found:
        took, done = _took(each) or "?", f"{each.progress:.0%}"
        cells = (each.run_id, each.preset, each.state.value, each.started_at, took, done, each.reason)
        table.add_row(*(escape(harmless(cell)) for cell in cells))
    screen.out.print(table)


def cancel(context: typer.Context, options: OneRunOptions) -> None:
    with options.bridge() as bridge:
        record = bridge.cancel(options.run_id)
    words = f"it is over: {record.state.value}" if record.is_over else "it ends; `attach` brings its report"
    Screen().notice(words)


def _bring_home(bridge: "Bridge", states: "Iterator[RunRecord]", output: Path | None) -> None:
    """Follow the run, write its report, show it; exit 1 unless it passed."""
    screen = BenchScreen()
    last = _followed(screen, bridge, states)
    if last.has_report:
        _write_report(screen, bridge, last, output)
    else:
        for line in last.output_tail.splitlines()[-_TAIL_LINES:]:
            screen.notice(harmless(line))
    passed = last.state.value == "passed"
    why = f": {harmless(last.reason)}" if last.reason else ""
    after = f" after {took}" if (took := _took(last)) else ""
    screen.notice(f"{last.preset} {last.state.value}{after}{why}", style="" if passed else "bold red")
    raise typer.Exit(0 if passed else 1)


def _took(record: "RunRecord") -> str:
    """How long it took; nothing where the bridge died meanwhile, so that nobody knows."""
    return "" if record.is_over and record.elapsed_s == 0 else human_seconds(record.elapsed_s)


def _followed(screen: BenchScreen, bridge: "Bridge", states: "Iterator[RunRecord]") -> "RunRecord":
    """The end of the run. The first Ctrl-C ends the run, the next one only leaves it."""
    last = next(states)
    run_id = harmless(last.run_id)
    screen.notice(f"run {run_id} of {last.preset}, since {harmless(last.started_at)}")
    with screen.progress() as progress:
        _show(progress, last)
        try:
            for last in states:
                _show(progress, last)
        except KeyboardInterrupt:
            screen.notice("ending the run, to bring home what it has; Ctrl-C again leaves without it")
            bridge.cancel(last.run_id)
            for later in bridge.follow(last.run_id):
                last = later
                _show(progress, last)
    return last


def _show(progress: Callable[[float, str], None], record: "RunRecord") -> None:
    progress(record.progress, escape(harmless(record.work)))


def _write_report(screen: BenchScreen, bridge: "Bridge", record: "RunRecord", output: Path | None) -> None:
    """Both files, each whole or not at all; then the report's tables. Raises RemoteError for what is none."""
    from kakeya.bench.registry import shown
    from kakeya.bench.tables import Table as Shown

    path = output or Path(f"bench-{record.preset}.json")
    check_file("report", path, ".json")
    content, page = bridge.fetch(record.run_id), _page(bridge, record)
    write_file("report", path, content)
    if page is not None:
        write_file("page", path.with_suffix(".html"), page)
    try:
        report = read_report(path)
    except ConfigError as error:
        raise RemoteError(f"what the bridge sent to {path} is no report: {error}") from error
    screen.show([each for each in shown(report) if isinstance(each, Shown)], report.gates)
    pages = f", page: {path.with_suffix('.html')}" if page is not None else ""
    screen.notice(f"report: {path}{pages}{', partial' if report.partial else ''}")


def _page(bridge: "Bridge", record: "RunRecord") -> bytes | None:
    """A run that was ended early may have none."""
    try:
        return bridge.fetch(record.run_id, page=True)
    except RunNotFound:
        return None
