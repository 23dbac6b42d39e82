"""The runner: paths, presets, checkpoints, pictures, exit status; and the bar of the terminal."""

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from rich.console import Console

from kakeya.bench.benchmark import Benchmark, Results, Run, numbers
from kakeya.bench.processes import Bystanders
from kakeya.bench.report import Gate, at_least
from kakeya.bench.runner import Outputs, execute, settings
from kakeya.bench.tables import Chart, Series, Table, listing
from kakeya.cli import bench
from kakeya.cli.bench import BenchScreen
from kakeya.errors import ConfigError


@dataclass(frozen=True)
class SpeedResults(Results):
    speed: float


@dataclass(frozen=True)
class Speeding(Benchmark[SpeedResults]):
    """Measures nothing; `speed` is what it says."""

    kind = "speeding"
    title = "Speeding"
    help = "How fast."
    results = SpeedResults
    secrets = frozenset({"password"})

    model: str | None = None
    speed: Annotated[float, typer.Option(help="So fast.")] = 2.0
    drawn: bool = True
    password: str = "hidden"

    @property
    def model_to_fetch(self) -> str | None:
        return self.model

    def presets(self) -> dict[str, Any]:
        return {"speed": 9.0} if self.model == "fast" else {}

    def check(self, *, picture: bool) -> None:
        if picture and self.speed == 0:
            raise ConfigError("nothing to draw")

    def run(self, run: Run[SpeedResults]) -> SpeedResults:
        run.progress(0.5, "half")
        run.facts["server"] = {"path": Path("/home/somebody/m.gguf")}
        run.machine["device"] = "fast"
        with run.watching([]):
            run.checkpoint(SpeedResults(1.0))
        return SpeedResults(self.speed)

    def gates(self, results: SpeedResults) -> list[Gate]:
        return [at_least("speed", results.speed, 1.5, absent="")]

    @staticmethod
    def show(results: SpeedResults) -> list[Table | Chart]:
        series = [Series("speed", [results.speed])]
        table = listing("The table", ("what", "speed"), [("row", results.speed)], labels=1)
        return [table, Chart("The chart", "m/s", "x", ["a"], series, picture=results.speed < 5)]


class Screen:
    """A terminal that remembers."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.shown: list[str] = []

    def fetch(self, model: str) -> Path:
        self.told.append(f"fetched {model}")
        return Path("/models") / model

    @contextmanager
    def progress(self) -> Iterator[Callable[[float, str], None]]:
        yield lambda done, work: self.told.append((done, work))

    def show(self, tables: Any, gates: Any) -> None:
        self.shown += [table.title for table in tables] + [gate.name for gate in gates]

    def line(self, text: str) -> None:
        self.shown.append(text)

    def notice(self, text: str, style: str = "dim") -> None:
        self.told.append(text)


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bystanders, "share", lambda self: 0.25)


def test_a_run_leaves_report_page_and_picture(tmp_path: Path) -> None:
    output, drawing, screen = tmp_path / "r.json", tmp_path / "p.svg", Screen()
    assert execute(Speeding("m"), Outputs(output, drawing), screen) == 0
    report = json.loads(output.read_text())
    assert (report["kind"], report["partial"], report["schema_version"]) == ("speeding", False, 2)
    assert report["results"] == {"bystanders_share": 0.25, "abort_reason": None, "speed": 2.0}
    assert report["config"] == {"model": "m", "speed": 2.0, "drawn": True, "server": {"path": "m.gguf"}}
    assert report["machine"]["device"] == "fast"
    assert report["started_at"] <= report["finished_at"]
    assert [gate["passed"] for gate in report["gates"]] == [True]
    assert screen.told[:3] == ["fetched m", (0.0, "starting"), (0.5, "half")]
    assert screen.told[3] == f"report: {output}, page: {output.with_suffix('.html')}"
    assert screen.shown == ["The table", "speed"]
    assert 'aria-label="The chart"' in output.with_suffix(".html").read_text()
    assert drawing.read_text().startswith("<svg")


def test_a_checkpoint_is_partial_and_judged(tmp_path: Path) -> None:
    output = tmp_path / "r.json"

    class Broken(Speeding):
        def run(self, run: Run[SpeedResults]) -> SpeedResults:
            super().run(run)
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        execute(Broken(), Outputs(output), Screen())
    report = json.loads(output.read_text())
    assert (report["partial"], report["finished_at"], report["results"]["speed"]) == (True, None, 1.0)
    assert report["results"]["bystanders_share"] == 0.25
    assert [gate["passed"] for gate in report["gates"]] == [False]
    assert "partial checkpoint" in output.with_suffix(".html").read_text()


def test_checkpoints_are_not_written_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = 100.0, []
    monkeypatch.setattr("time.monotonic", lambda: now)
    run: Run[SpeedResults] = Run(write=written.append, checkpoint_every_s=5.0)
    for moment, expected in ((101, 0), (105, 1), (109, 1), (110, 2)):
        now = moment
        run.checkpoint(SpeedResults(1.0))
        assert len(written) == expected


@pytest.mark.parametrize(("speed", "status"), [(1.0, 1), (2.0, 0)])
def test_a_failed_gate_is_the_exit_status_and_json_replaces_the_tables(
    speed: float, status: int, tmp_path: Path
) -> None:
    screen = Screen()
    outputs = Outputs(tmp_path / "r.json", as_json=True)
    assert execute(Speeding(speed=speed), outputs, screen) == status
    assert [json.loads(line) for line in screen.shown] == [json.loads((tmp_path / "r.json").read_text())]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["r.html", "r.json"]


@pytest.mark.parametrize(
    ("speed", "path", "message"),
    [(7.0, "p.svg", "cannot draw the picture: what it shows was not measured"), (2.0, "", "cannot write")],
)
def test_a_picture_that_fails_leaves_the_finished_report(
    speed: float, path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, output = Screen(), tmp_path / "r.json"
    drawing = tmp_path / (path or "gone/p.svg")
    monkeypatch.setattr("kakeya.bench.runner.check_file", lambda *_: None)
    assert execute(Speeding(speed=speed), Outputs(output, drawing), screen) == 1
    assert any(message in str(told) for told in screen.told)
    assert json.loads(output.read_text())["partial"] is False
    assert screen.shown == ["The table", "speed"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["r.html", "r.json"]


@pytest.mark.parametrize(
    ("outputs", "speed", "message"),
    [
        (Outputs(Path("r.txt")), 2.0, r"must be named \*\.json"),
        (Outputs(Path("no/r.json")), 2.0, "existing directory"),
        (Outputs(Path("r.json"), Path("p.png")), 2.0, r"must be named \*\.svg, got p\.png"),
        (Outputs(Path("r.json"), Path("no/such/p.svg")), 2.0, "existing directory"),
        (Outputs(Path("r.json"), Path("p.svg")), 0.0, "nothing to draw"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_done(
    outputs: Outputs, speed: float, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    screen = Screen()
    with pytest.raises(ConfigError, match=message):
        execute(Speeding("m", speed), outputs, screen)
    assert screen.told == []
    assert list(tmp_path.iterdir()) == []


def test_reports_are_named_after_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    execute(Speeding(), Outputs(), Screen())
    assert (tmp_path / "bench-speeding.json").exists()


def test_settings_name_a_model_and_not_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert settings(Speeding(str(tmp_path / "m.gguf")))["model"] == "m.gguf"
    assert "password" not in settings(Speeding())


@pytest.mark.parametrize(
    ("arguments", "speed"),
    [((), 2.0), (("--model", "fast"), 9.0), (("--model", "fast", "--speed", "3"), 3.0)],
)
def test_flags_win_over_presets_and_presets_over_defaults(
    arguments: tuple[str, ...], speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Speeding, Outputs]] = []
    monkeypatch.setattr(bench, "execute", lambda *given: asked.append(given[:2]) or 0)
    app = typer.Typer()
    app.command()(bench._verb(Speeding))
    with pytest.raises(SystemExit):
        app([*arguments, "--output", "x.json"])
    assert (asked[0][0].speed, asked[0][1]) == (speed, Outputs(Path("x.json")))


def test_numbers_come_with_commas() -> None:
    assert numbers("levels", "1,16") == (1, 16)
    with pytest.raises(ConfigError, match="levels must be whole numbers with commas"):
        numbers("levels", "1;2")


def test_the_time_left_outlasts_long_quiet_phases() -> None:
    clock, terminal, screen = 0.0, io.StringIO(), BenchScreen()
    screen.err = Console(file=terminal, force_terminal=True, width=160, get_time=lambda: clock)
    quiet = bench.SPEED_SECONDS - 200
    with screen.progress() as progress:
        work = Run[SpeedResults](progress).work(4)
        for piece in range(3):
            clock = piece * quiet
            work.piece(f"piece {piece}")
    last = terminal.getvalue().rpartition("left:")[2]
    # Half of four pieces is left, at 400 seconds each.
    assert "0:13:20" in last
    assert "piece 2" in last


def test_a_bar_never_runs_over_its_end() -> None:
    shown: list[tuple[float, str]] = []
    work = Run[SpeedResults](lambda *told: shown.append(told)).work(10)
    work.begin("a")
    work.advance(5)
    work.advance(50)
    assert shown == [(0.0, "a"), (0.5, "a"), (1.0, "a")]
