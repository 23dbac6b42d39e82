"""What the verbs of `kakeya bench` share: pictures that may fail, and bars with the time left."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from kakeya.bench.gates import at_least
from kakeya.bench.page import Table
from kakeya.bench.report import Report, now
from kakeya.cli import bench_common
from kakeya.cli.bench_common import Drawing, conclude, counted_progress
from kakeya.cli.console import Screen
from kakeya.models import catalogue
from support.cli import Run

DRAWING_VERBS = ("session", "capacity", "http-session", "turns", "peers", "engine", "quality", "gpu")
REPORT = Report("any", {}, {}, {"speed": 1.0}, finished_at=now())
FAILED = at_least("speed", 0.5, 1.0, absent="")


@pytest.mark.parametrize(
    ("path", "message"),
    [("p.png", "must be named *.svg, got p.png"), ("no/such/p.svg", "existing directory")],
)
@pytest.mark.parametrize("verb", DRAWING_VERBS)
def test_a_bad_picture_is_refused_before_anything_is_done(
    run: Run, verb: str, path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(catalogue, "resolve", lambda *_: pytest.fail("a model was asked for"))
    outcome = run("bench", verb, "--picture", path)
    assert outcome.status == 2
    assert message in outcome.err
    assert list(tmp_path.iterdir()) == []


def drawn_well(results: Mapping[str, Any]) -> str:
    return f"<svg>{results['speed']}</svg>"


def not_drawn(results: Mapping[str, Any]) -> str:
    return str(results["not measured"])


def concluded(
    output: Path, drawing: Drawing | None, report: Report = REPORT, *, as_json: bool = False
) -> int:
    table = Table("The table", ("what",), [("row",)])
    with pytest.raises(typer.Exit) as exit_info:
        conclude(Screen(), output, report, lambda report: "page", [table], drawing, as_json=as_json)
    return exit_info.value.exit_code


@pytest.mark.parametrize("gates", [(), (FAILED,)])
def test_the_picture_stands_beside_the_report(gates: tuple[Any, ...], tmp_path: Path) -> None:
    output, path = tmp_path / "r.json", tmp_path / "p.svg"
    report = Report("any", {}, {}, {"speed": 1.0}, gates, finished_at=now())
    assert concluded(output, Drawing(path, drawn_well), report) == report.exit_status == len(gates)
    assert path.read_text() == "<svg>1.0</svg>"
    assert json.loads(output.read_text())["partial"] is False


def test_nothing_is_drawn_unasked(tmp_path: Path) -> None:
    for drawing in (None, Drawing(None, not_drawn)):
        assert concluded(tmp_path / "r.json", drawing) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["r.html", "r.json"]


@pytest.mark.parametrize(
    ("path", "draw", "message"),
    [
        ("gone/p.svg", drawn_well, "cannot write the picture"),
        ("p.svg", not_drawn, "cannot draw the picture from these results: KeyError 'not measured'"),
    ],
)
def test_a_picture_that_fails_leaves_the_finished_report(
    path: str, draw: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "r.json"
    assert concluded(output, Drawing(tmp_path / path, draw)) == 1
    shown = capsys.readouterr()
    assert "The table" in shown.out
    assert message in shown.err
    assert json.loads(output.read_text()) == REPORT.to_dict()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["r.html", "r.json"]
    assert concluded(output, Drawing(tmp_path / path, draw), as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == REPORT.to_dict()


def test_the_time_left_outlasts_long_quiet_phases() -> None:
    clock = 0.0
    terminal = io.StringIO()
    screen = Screen()
    screen.err = Console(file=terminal, force_terminal=True, width=160, get_time=lambda: clock)
    quiet = bench_common.SPEED_SECONDS - 200
    with counted_progress(screen, 4) as announce:
        for piece in range(3):
            clock = piece * quiet
            announce(f"piece {piece}")
    last = terminal.getvalue().rpartition("left:")[2]
    # Half of four pieces is left, at 400 seconds each.
    assert "0:13:20" in last
    assert "piece 2" in last
