"""Gates, reports as JSON, and how they are written and read again."""

import json
import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from kakeya.bench.report import (
    Report,
    as_json,
    at_least,
    at_most,
    busy,
    bystanders_gate,
    check_file,
    collect,
    from_json,
    now,
    read_report,
    write_file,
)
from kakeya.errors import ConfigError

GATES = tuple(at_least(f"gate {value}", value, 1.0, absent="nothing") for value in (2.0, 0.5, None))
CONFIG = {"model": "m", "cache": {"sink": 4}}
REPORT = Report("engine", CONFIG, {"cpu": "a", "os": "b"}, {"speed": 1.0}, GATES, finished_at=now())


@pytest.mark.parametrize(
    ("gate", "passed", "reason"),
    [
        (at_least("g", 2.0, 2.0, absent=""), True, "2 is at least 2"),
        (at_least("g", 1.5, 2.0, absent=""), False, "1.5 is not at least 2"),
        (at_most("g", 1.01, 1.01, absent=""), True, "1.01 is at most 1.01"),
        (at_most("g", 1.02, 1.01, absent=""), False, "1.02 is not at most 1.01"),
        (at_least("g", None, 2.0, absent="no peer"), None, "no peer"),
        (at_most("g", math.nan, 1.0, absent=""), None, "nan, which is not a number"),
        (at_most("g", math.inf, 1.0, absent=""), None, "inf, which is not a number"),
        (bystanders_gate(0.05), True, "at most 0.05"),
        (bystanders_gate(0.051), False, "not at most"),
        (bystanders_gate(None), None, "does not tell"),
    ],
)
def test_a_verdict_comes_with_its_reason(gate: Any, passed: bool | None, reason: str) -> None:
    assert gate.passed is passed
    assert reason in gate.reason
    assert gate.verdict == {True: "passed", False: "failed", None: "not judged"}[passed]
    assert (gate.value is None) is (passed is None)


def test_a_busy_machine_judges_nothing() -> None:
    assert busy(None) is busy(0.05) is None
    assert busy(0.051, "latencies") == "others used 5% of the machine, so latencies mean nothing"


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    for report, status in ((REPORT, 1), (replace(REPORT, gates=GATES[::2], finished_at=None), 0)):
        write_file("report", tmp_path / "a.json", report.to_json())
        told = json.loads((tmp_path / "a.json").read_text())
        assert (told["schema_version"], told["kind"], told["partial"]) == (
            2,
            "engine",
            not told["finished_at"],
        )
        assert [gate["passed"] for gate in told["gates"]] == [gate.passed for gate in report.gates]
        assert read_report(tmp_path / "a.json") == report
        assert report.exit_status == status, "a gate that was not judged did not fail"
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(REPORT, results={"speed": float("nan")}).to_json()


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")
    write_file("report", path, "new")
    assert path.stat().st_mode & 0o777 == 0o644

    def full_disk(self: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(ConfigError, match="cannot write the report at .*no space left"):
        write_file("report", path, "newer")
    with pytest.raises(ConfigError, match="cannot write the picture"):
        write_file("picture", tmp_path / "no" / "such" / "place.svg", "<svg/>")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("r.json", "new")]


def test_an_impossible_place_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    for name, why in (("p.png", r"\*\.svg, got"), ("no/p.svg", "directory"), ("folder.svg", "directory")):
        with pytest.raises(ConfigError, match=f"the picture .*{why}.*{name}"):
            check_file("picture", tmp_path / name, ".svg")
    check_file("picture", tmp_path / "p.svg", ".svg")
    check_file("picture", None, ".svg")
    assert [file.name for file in tmp_path.iterdir()] == ["folder.svg"]


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    samples: tuple[float, ...]
    colour: Colour = Colour.RED

    @property
    def count(self) -> int:
        return len(self.samples)


@dataclass(frozen=True)
class Outer:
    rows: list[Inner]
    by_name: dict[str, Inner | None] = field(default_factory=dict)
    by_number: dict[int, float] = field(default_factory=dict)
    more: Inner | None = None
    path: Path | None = None


def test_typed_values_become_json_with_what_follows_from_them_and_come_back() -> None:
    value = Outer([Inner((1.0, 2.0))], {"a": None, "b": Inner(())}, {3: 0.5})
    told = json.loads(json.dumps(as_json(value)))
    assert told["rows"] == [{"samples": [1.0, 2.0], "colour": "red", "count": 2}]
    assert from_json(Outer, told) == value
    assert isinstance(from_json(Outer, told).rows[0].colour, Colour)
    assert from_json(Outer, {"rows": [], "unheard": 1}) == Outer([])
    assert as_json(Outer([], path=Path("/home/somebody/model.gguf")))["path"] == "model.gguf"
    assert as_json({Path("b"), Path("a")}) == ["a", "b"]


@pytest.mark.parametrize("told", [{}, {"rows": 1}, {"rows": [1]}, {"rows": [{"samples": 1}]}])
def test_what_is_no_such_value_is_an_error(told: Any) -> None:
    with pytest.raises((TypeError, ValueError, KeyError, AttributeError)):
        from_json(Outer, told)


def test_reports_are_found_further_down_and_other_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="looked for in a directory"):
        collect(tmp_path / "absent")
    for name, text in (("package", "{}"), ("list", "[]"), ("half", '{"schema_')):
        (tmp_path / f"{name}.json").write_text(text)
    for name, version in (("later", 3), ("less", 1)):
        (tmp_path / f"{name}.json").write_text(
            f'{{"schema_version": {version}, "kind": "x", "results": {{}}}}'
        )
    with pytest.raises(ConfigError, match="no report in .*; package: not a report"):
        collect(tmp_path)
    for place in ("b.json", "deeper/a.json", ".hidden/c.json"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        write_file("report", tmp_path / place, REPORT.to_json())
    collection = collect(tmp_path)
    assert list(collection.reports) == ["b", "deeper/a"]
    assert list(collection.passed_over) == ["half", "later", "less", "list", "package"]
    reasons = collection.passed_over
    assert reasons["package"] == reasons["list"] == "not a report"
    assert reasons["later"] == "schema version 3 is later than 2"
    assert reasons["less"].startswith("a report that is not whole: 'gates'")
    assert reasons["half"].startswith("cannot be read")
