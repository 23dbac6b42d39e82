"""The runner and the verb that it makes of a benchmark, by one that measures nothing."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from kakeya.bench import registry
from kakeya.bench.benchmark import Benchmark, Results, Run, numbers
from kakeya.bench.report import Gate, at_least
from kakeya.bench.tables import Chart, Series, Table, listing
from kakeya.bench.usage import Bystanders
from kakeya.errors import ConfigError
from kakeya.models import catalogue
from support.programs import Run as Verb


@dataclass(frozen=True)
class SpeedResults(Results):
    speed: float


@dataclass(frozen=True)
class Speeding(Benchmark[SpeedResults]):
    """`speed` is what it says."""

    kind = "engine"
    title = "Speeding"
    help = "How fast."
    results = SpeedResults
    secrets = frozenset({"password"})

    model: str | None = None
    speed: Annotated[float, typer.Option(help="So fast.")] = 2.0
    breaks: Annotated[bool, typer.Option("--breaks")] = False
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
        run.facts["server"] = {"path": run.model_path}
        run.machine["device"] = "fast"
        with run.watching([]):
            run.checkpoint(SpeedResults(1.0))
        if self.breaks:
            raise ConfigError("broken")
        return SpeedResults(self.speed)

    def gates(self, results: SpeedResults) -> list[Gate]:
        return [at_least("quick enough", results.speed, 1.5, absent="")]

    @staticmethod
    def show(results: SpeedResults) -> list[Table | Chart]:
        series = [Series("speed", [results.speed])]
        table = listing("The table", ("what", "speed"), [("row", results.speed)], labels=1)
        return [table, Chart("The chart", "m/s", "x", ["a"], series, picture=results.speed < 5)]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models that were asked for."""
    fetched: list[str] = []
    monkeypatch.setattr(
        catalogue, "resolve", lambda model, progress: fetched.append(model) or f"/home/somebody/{model}.gguf"
    )
    return fetched


@pytest.fixture
def speeding(kakeya_verb: Verb, fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verb:
    """The verb, in an empty folder, beside others that use a quarter of the machine."""
    monkeypatch.setattr(registry, "_PLACES", {"engine": (__name__, "Speeding")})
    monkeypatch.setattr(registry, "import_module", lambda name: sys.modules[name])
    monkeypatch.setattr(Bystanders, "share", lambda self: 0.25)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: kakeya_verb("bench", "engine", *arguments)


def written() -> list[str]:
    return sorted(file.name for file in Path().iterdir())


def read_report() -> Any:
    return json.loads(Path("bench-engine.json").read_text())


def test_a_run_leaves_report_page_and_picture(speeding: Verb, fetched: list[str]) -> None:
    outcome = speeding("--model", "m", "--picture", "p.svg")
    report = read_report()
    assert (outcome.status, fetched) == (0, ["m"])
    assert written() == ["bench-engine.html", "bench-engine.json", "p.svg"]
    assert (report["kind"], report["partial"], report["schema_version"]) == ("engine", False, 2)
    assert report["results"] == {"bystanders_share": 0.25, "abort_reason": None, "speed": 2.0}
    config = {"model": "m", "speed": 2.0, "breaks": False, "server": {"path": "m.gguf"}}
    assert report["config"] == config, "no password, and of the machine's directories nothing"
    assert report["machine"]["device"] == "fast"
    assert report["started_at"] <= report["finished_at"]
    assert [gate["passed"] for gate in report["gates"]] == [True]
    assert "report: bench-engine.json, page: bench-engine.html" in outcome.err
    assert all(words in outcome.out for words in ("The table", "quick enough", "passed"))
    assert 'aria-label="The chart"' in Path("bench-engine.html").read_text()
    assert Path("p.svg").read_text().startswith("<svg")


def test_a_model_is_named_and_not_where_it_lies(speeding: Verb) -> None:
    Path("m.gguf").touch()
    speeding("--model", str(Path("m.gguf").resolve()))
    assert read_report()["config"]["model"] == "m.gguf"


def test_a_checkpoint_is_partial_and_judged(speeding: Verb) -> None:
    assert speeding("--breaks").status == 2
    report = read_report()
    assert (report["partial"], report["finished_at"]) == (True, None)
    assert report["results"] == {"bystanders_share": 0.25, "abort_reason": None, "speed": 1.0}
    assert [gate["passed"] for gate in report["gates"]] == [False]
    assert "partial checkpoint" in Path("bench-engine.html").read_text()


@pytest.mark.parametrize(("speed", "status"), [("1", 1), ("2", 0)])
def test_a_failed_gate_is_the_exit_status_and_json_replaces_the_tables(
    speeding: Verb, speed: str, status: int
) -> None:
    outcome = speeding("--speed", speed, "--json")
    assert outcome.status == status
    assert json.loads(outcome.out) == read_report()


@pytest.mark.parametrize(
    ("speed", "path", "message"),
    [
        ("7", "p.svg", "cannot draw the picture: what it shows was not measured"),
        ("2", "gone/p.svg", "cannot write the picture"),
    ],
)
def test_a_picture_that_fails_leaves_the_finished_report(
    speeding: Verb, speed: str, path: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kakeya.bench.runner.check_file", lambda *_: None)
    outcome = speeding("--speed", speed, "--picture", path)
    assert outcome.status == 1
    assert message in outcome.err
    assert "The table" in outcome.out
    assert read_report()["partial"] is False
    assert written() == ["bench-engine.html", "bench-engine.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--output", "r.txt"), "must be named *.json"),
        (("--output", "no/r.json"), "existing directory"),
        (("--picture", "p.png"), "must be named *.svg, got p.png"),
        (("--picture", "p.svg", "--speed", "0"), "nothing to draw"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_done(
    speeding: Verb, fetched: list[str], arguments: tuple[str, ...], message: str
) -> None:
    outcome = speeding("--model", "m", *arguments)
    assert outcome.status == 2
    assert message in outcome.err
    assert (fetched, written()) == ([], [])


@pytest.mark.parametrize(
    ("arguments", "speed"),
    [((), 2.0), (("--model", "fast"), 9.0), (("--model", "fast", "--speed", "3"), 3.0)],
)
def test_flags_win_over_presets_and_presets_over_defaults(
    speeding: Verb, arguments: tuple[str, ...], speed: float
) -> None:
    speeding(*arguments, "--output", "r.json")
    assert json.loads(Path("r.json").read_text())["config"]["speed"] == speed


def test_checkpoints_are_not_written_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([100.0, 101.0, 105.0, 105.0, 109.0, 110.0, 110.0])
    monkeypatch.setattr("time.monotonic", lambda: next(moments))
    partial: list[SpeedResults] = []
    run: Run[SpeedResults] = Run(write=partial.append, checkpoint_every_s=5.0)
    for speed in (1.0, 5.0, 9.0, 10.0):
        run.checkpoint(SpeedResults(speed))
    assert [each.speed for each in partial] == [5.0, 10.0]


def test_values_of_flags_are_checked() -> None:
    assert numbers("levels", "1,16") == (1, 16)
    with pytest.raises(ConfigError, match="levels must be whole numbers with commas"):
        numbers("levels", "1;2")
    Speeding(speed=1.0).require_least(speed=1, model=9)
    with pytest.raises(ConfigError, match="speed must be at least 1, got 0.5"):
        Speeding(speed=0.5).require_least(speed=1)


def test_a_bar_never_runs_over_its_end() -> None:
    shown: list[tuple[float, str]] = []
    work = Run[SpeedResults](lambda *told: shown.append(told)).work(10)
    work.begin("a")
    work.advance(5)
    work.piece("b")
    work.advance(50)
    assert shown == [(0.0, "a"), (0.5, "a"), (0.5, "b"), (1.0, "b")]
