"""`bench report`: many reports on one page, also those of earlier versions."""

from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kakeya.bench import registry
from kakeya.bench.chart import picture
from kakeya.bench.page import collection_page, overview
from kakeya.bench.registry import KINDS, benchmark_of, plain_tables, shown, usable_kinds
from kakeya.bench.report import Collection, Report, as_json, at_most, collect, now, write_report
from kakeya.bench.runner import main_chart
from kakeya.bench.tables import Table
from kakeya.bench.talk import RESPONSES, ConversationResults, Talk, Turn
from kakeya.errors import ConfigError

MACHINE = {"cpu": "<any>", "os": "any"}
TURNS = [Turn(n, 1.0, 0.2, prompt_tokens=10 * n, answer_tokens=2) for n in range(1, 13)]
RESULTS = as_json(ConversationResults([Talk(RESPONSES, TURNS, 100)]))
EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"


def a_report(**changes: Any) -> Report:
    fields: dict[str, Any] = {
        "kind": "conversation",
        "config": {"model": "tiny", "nested": {"value": 1}},
        "machine": MACHINE,
        "results": RESULTS,
        "gates": (at_most("flat", 1.0, 2, absent=""), at_most("errors", 3.0, 2, absent="")),
        "finished_at": now(),
    }
    return Report(**(fields | changes))


def write(path: Path, report: Report) -> None:
    path.parent.mkdir(exist_ok=True)
    write_report(path, report, "")


def test_reports_are_found_further_down_and_other_files_are_told(tmp_path: Path) -> None:
    write(tmp_path / "b.json", a_report())
    write(tmp_path / "deeper" / "a.json", a_report(finished_at=None))
    write(tmp_path / ".hidden" / "c.json", a_report())
    (tmp_path / "package.json").write_text("{}")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "half.json").write_text('{"schema_')
    (tmp_path / "later.json").write_text('{"schema_version": 3, "kind": "x", "results": {}}')
    (tmp_path / "less.json").write_text('{"schema_version": 1, "kind": "x", "results": {}}')
    collection = collect(tmp_path)
    assert list(collection.reports) == ["b", "deeper/a"]
    assert list(collection.passed_over) == ["half", "later", "less", "list", "package"]
    assert collection.passed_over["package"] == collection.passed_over["list"] == "not a report"
    assert collection.passed_over["later"] == "schema version 3 is later than 2"
    assert collection.passed_over["less"].startswith("a report that is not whole: 'gates'")
    assert collection.passed_over["half"].startswith("cannot be read")


def test_no_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="looked for in a directory"):
        collect(tmp_path / "absent")
    (tmp_path / "package.json").write_text("{}")
    with pytest.raises(ConfigError, match="no report in .*; package: not a report"):
        collect(tmp_path)


def test_the_overview_counts_gates_and_names_those_that_failed() -> None:
    partial = a_report(finished_at=None, gates=(), config={"server": {"model_id": "served"}})
    rows = overview(Collection({"a": a_report(), "b": partial, "c": a_report(config={})}, {})).cells
    assert rows[0][:3] == ["a", "conversation", "tiny"]
    assert rows[0][4:] == ["1", "1", "0", "errors"]
    assert rows[1][2:] == ["served", "partial", "0", "0", "0", "–"]
    assert rows[2][2] == "–"


def test_the_page_has_everything_and_asks_nobody(tmp_path: Path) -> None:
    write(tmp_path / "one&two.json", a_report())
    write(tmp_path / "odd.json", a_report(kind="unheard", results={"speed": 17.25}))
    write(tmp_path / "old.json", a_report(results={"ways": [{"way": "by <hand>"}]}))
    (tmp_path / "package.json").write_text("{}")
    collection = collect(tmp_path)
    parts = {name: shown(report) for name, report in collection.reports.items()}
    page = collection_page(collection, parts)
    assert '<h1 id="report-2">one&amp;two</h1>' in page
    assert '<a href="#report-2">one&amp;two</a>' in page
    assert "&lt;any&gt;" in page
    assert page.count('aria-label="Latency per turn"') == 1
    assert "<td>speed</td><td>17.25</td>" in page
    assert "<td>by &lt;hand&gt;</td>" in page
    assert "<td>not a report</td>" in page
    assert page.count("<!doctype html>") == page.count("<style>") == 1
    assert not any(word in page for word in ("<script", "http://", "https://", "url("))


def test_what_nobody_knows_is_shown_in_plain_tables() -> None:
    results = {
        "speed": 3.5,
        "machine": {"name": "fast", "deep": {"er": 1}},
        "rows": [{"a": 1, "b": {"c": 2}, "turns": [{"n": 1}, {"n": 2}]}, {"a": 3}],
        "empty": [],
    }
    tables = {table.title: table for table in plain_tables(results)}
    assert tables["Results"].cells == [["speed", "3.5"], ["empty", "[]"]]
    assert tables["machine"].cells == [["name", "fast"]]
    assert tables["machine.deep"].cells == [["er", "1"]]
    assert (tables["rows"].headings, tables["rows"].cells) == (["a", "b.c"], [["1", "2"], ["3", "–"]])
    assert tables["rows 1.turns"].cells == [["1"], ["2"]]


def test_committed_reports_can_all_be_shown() -> None:
    collection = collect(EVIDENCE)
    assert collection.passed_over == {}
    parts = {name: shown(report) for name, report in collection.reports.items()}
    assert {"engine-cpu", "session-1m", "turns-cpu", "gpu-h200", "quality-memory"} <= parts.keys()
    for part in parts.values():
        assert sum(isinstance(each, Table) and bool(each.cells) for each in part) >= 1
    assert len(collection_page(collection, parts)) > 100_000
    drawn = {name: main_chart(part) for name, part in parts.items()}
    for name in ("engine-cpu", "engine-qwen-1.5b", "capacity-light", "overhead-cpu"):
        chart = drawn[name]
        assert chart is not None, name
        ElementTree.fromstring(picture(chart))
    assert any("contestants" in each.title for each in parts["turns-cpu"])
    assert any(each.title == "aggregate" for each in parts["session-1m"])


@pytest.mark.parametrize("kind", KINDS)
def test_every_benchmark_is_complete(kind: str) -> None:
    benchmark = benchmark_of(kind)
    assert benchmark.kind == kind
    assert benchmark.title
    assert benchmark.help.endswith((".", "?"))


OLD_STUBS = "The grpc package installed is at version 1.1, but the generated code depends on 1.85"


@pytest.mark.parametrize("refusal", [ModuleNotFoundError(name="httpx"), RuntimeError(OLD_STUBS)])
def test_what_cannot_be_imported_here_is_not_listed(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    _refuse(monkeypatch, "kakeya.bench.conversation", refusal)
    assert usable_kinds() == [kind for kind in KINDS if kind != "conversation"]


@pytest.mark.parametrize("fault", [ModuleNotFoundError(name="kakeya.bench.wrong"), RuntimeError("boom")])
def test_a_fault_of_our_own_is_not_hidden(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    _refuse(monkeypatch, "kakeya.bench.conversation", fault)
    with pytest.raises(type(fault)):
        usable_kinds()


def _refuse(monkeypatch: pytest.MonkeyPatch, module: str, refusal: Exception) -> None:
    def importing(name: str) -> object:
        if name == module:
            raise refusal
        return import_module(name)

    monkeypatch.setattr(registry, "import_module", importing)
