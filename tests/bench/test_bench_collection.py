"""`bench report`: many reports on one page."""

from pathlib import Path
from typing import Any

import pytest

from kakeya.bench.collection import Collection, Found, collected, read_report
from kakeya.bench.collection_page import (
    KINDS,
    collection_page,
    overview,
    overview_table,
    pictures,
    sections_of,
)
from kakeya.bench.gates import at_most
from kakeya.bench.report import Report, now, write_report
from kakeya.bench.turns_results import RESPONSES, Answered, Turn, turns_results
from kakeya.errors import ConfigError

MACHINE = {"cpu": "<any>", "os": "any"}
SAID = [Turn(n, 1.0, Answered(0.2, None, 10 * n, 2, 0)) for n in range(1, 13)]
TURNS = {"contestants": turns_results({RESPONSES: SAID}, 100), "software": {}}
EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"


def turns_report(**changes: Any) -> Report:
    fields: dict[str, Any] = {
        "kind": "turns",
        "config": {"model": "tiny", "nested": {"value": 1}},
        "machine": MACHINE,
        "results": TURNS,
        "gates": (at_most("flat", 1.0, 2, absent=""), at_most("errors", 3.0, 2, absent="")),
        "finished_at": now(),
    }
    return Report(**(fields | changes))


def write(path: Path, report: Report) -> None:
    path.parent.mkdir(exist_ok=True)
    write_report(path, report, "")


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report = turns_report()
    write(tmp_path / "a.json", report)
    assert read_report(tmp_path / "a.json").to_dict() == report.to_dict()


def test_reports_are_found_further_down_and_other_files_are_told(tmp_path: Path) -> None:
    write(tmp_path / "b.json", turns_report())
    write(tmp_path / "deeper" / "a.json", turns_report(finished_at=None))
    write(tmp_path / ".hidden" / "c.json", turns_report())
    (tmp_path / "package.json").write_text("{}")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "half.json").write_text('{"schema_')
    (tmp_path / "later.json").write_text('{"schema_version": 2, "kind": "x", "results": {}}')
    (tmp_path / "less.json").write_text('{"schema_version": 1, "kind": "x", "results": {}}')
    collection = collected(tmp_path)
    assert [found.name for found in collection.reports] == ["b", "deeper/a"]
    assert list(collection.passed_over) == ["half", "later", "less", "list", "package"]
    assert collection.passed_over["package"] == collection.passed_over["list"] == "not a report"
    assert collection.passed_over["later"] == "schema version 2 is not 1"
    assert collection.passed_over["less"] == "a report that is not whole: 'config'"
    assert collection.passed_over["half"].startswith("cannot be read")


def test_no_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="looked for in a directory"):
        collected(tmp_path / "absent")
    (tmp_path / "package.json").write_text("{}")
    with pytest.raises(ConfigError, match="no report in .*; package: not a report"):
        collected(tmp_path)


def test_the_overview_counts_gates_and_names_those_that_failed() -> None:
    partial = turns_report(finished_at=None, gates=(), config={"server": {"model_id": "served"}})
    bare = turns_report(config={})
    collection = Collection((Found("a", turns_report()), Found("b", partial), Found("c", bare)), {})
    rows = overview_table(collection).rows
    assert rows[0][:3] == ("a", "turns", "tiny")
    assert rows[0][4:] == ("1", "1", "0", "errors")
    assert rows[1][2:] == ("served", "partial", "0", "0", "0", "–")
    assert rows[2][2] == "–"
    told = overview(collection)["reports"]
    assert [each["partial"] for each in told] == [False, True, False]
    assert [gate["passed"] for gate in told[0]["gates"]] == [True, False]


def test_the_page_has_everything_and_asks_nobody(tmp_path: Path) -> None:
    write(tmp_path / "one&two.json", turns_report())
    write(tmp_path / "odd.json", turns_report(kind="unheard"))
    write(tmp_path / "old.json", turns_report(results={"contestants": [{}]}))
    (tmp_path / "package.json").write_text("{}")
    collection = collected(tmp_path)
    page = collection_page(collection)
    assert '<h1 id="report-2">one&amp;two</h1>' in page
    assert '<a href="#report-2">one&amp;two</a>' in page
    assert "&lt;any&gt;" in page
    assert page.count('aria-label="Latency per turn"') == 1
    assert "there is no page for reports of kind &#x27;unheard&#x27;" in page
    assert "its results are not of this version: KeyError" in page
    assert "<td>not a report</td>" in page
    assert page.count("<!doctype html>") == page.count("<style>") == 1
    assert not any(word in page for word in ("<script", "http://", "https://", "url("))
    assert list(pictures(collection)) == ["one&two"]


def test_committed_reports_can_all_be_shown() -> None:
    collection = collected(EVIDENCE)
    titles = {
        found.name: [section.table.title for section in sections_of(found)] for found in collection.reports
    }
    assert "engine-cpu" in titles
    assert not any("Not shown" in shown for shown in titles.values())
    assert pictures(collection)["engine-cpu"].startswith("<svg")
    assert collection.passed_over == {}


def test_a_session_report_from_before_peak_and_tail_is_shown() -> None:
    found = next(found for found in collected(EVIDENCE).reports if found.name == "session-1m")
    del found.report.results["bystanders_share"]
    for name in ("peak_over_settled", "tail_over_settled"):
        found.report.results["aggregate"]["server_rss"].pop(name, None)
    assert sections_of(found)[0].table.title == "One session"


def test_every_kind_that_a_bench_writes_is_known() -> None:
    source = Path(__file__).parents[2] / "src" / "kakeya" / "bench"
    written = {
        line.split('Report("', 1)[1].split('"', 1)[0]
        for path in source.glob("*.py")
        for line in path.read_text().replace("Report(\n        ", "Report(").splitlines()
        if 'Report("' in line
    }
    assert written == KINDS.keys()
