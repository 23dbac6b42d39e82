"""All benchmarks, and how reports of this version and of earlier ones are shown."""

from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kakeya.bench import registry
from kakeya.bench.chart import picture
from kakeya.bench.page import collection_page
from kakeya.bench.registry import KINDS, benchmark_of, plain_tables, shown, usable_kinds
from kakeya.bench.report import Report, collect, from_json, read_report
from kakeya.bench.runner import main_chart
from kakeya.bench.tables import Table

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"


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
    for kind in ("unheard", "conversation"):  # one that nobody knows, and one of an earlier version
        (table,) = shown(Report(kind, {}, {}, {"ways": [{"way": "by hand"}]}))
        assert table.cells == [["by hand"]]


def test_committed_reports_can_all_be_shown() -> None:
    collection = collect(EVIDENCE)
    assert collection.passed_over == {}
    parts = {name: shown(report) for name, report in collection.reports.items()}
    assert {"engine-cpu", "session-1m", "turns-cpu", "gpu-h200", "quality-memory"} <= parts.keys()
    for part in parts.values():
        assert sum(isinstance(each, Table) and bool(each.cells) for each in part) >= 1
    assert len(collection_page(collection, parts)) > 100_000
    drawn = {name: main_chart(part) for name, part in parts.items()}
    for name in ("engine-cpu", "engine-qwen-1.5b", "capacity-light", "overhead-cpu", "quality-memory"):
        chart = drawn[name]
        assert chart is not None, name
        ElementTree.fromstring(picture(chart))
    assert any("contestants" in each.title for each in parts["turns-cpu"])
    assert any(each.title == "aggregate" for each in parts["session-1m"])


# A part of bench quality when the report was made; bench recall asks for more today.
ELSEWHERE = {"recall_lost_within_the_window"}
# What bench engine did not ask when the reports were made, or asked less of: 5 s of the start.
ASKED_SINCE = {
    "seconds from launch to a loaded model",
    "memory of the loaded model over its file",
    "seconds from `kakeya chat` to the first character of its answer",
}


@pytest.mark.parametrize(
    ("name", "titles"),
    [
        ("engine-4b", ["Speed, tokens/s", "Sampled decoding", "Resident memory", "Start of a fresh process"]),
        ("engine-qwen-1.5b", ["Speed, tokens/s", "Sampled decoding", "Resident memory", "Start of a"]),
        ("engine-smollm2-avx2", ["Speed, tokens/s", "Sampled decoding", "Resident memory", "Start of a"]),
        ("quality-cpu", ["Against float32 weights of the same file"]),
        ("quality-formats", ["Perplexity beside llama-cpp-python 0.3.36"]),
        ("quality-q2k", ["Perplexity beside llama-cpp-python 0.3.36"]),
        (
            "quality-memory",
            ["Perplexity; early: from a full window", "24 stretches of 256 tokens"],
        ),
    ],
)
def test_committed_evidence_is_judged_as_it_was(name: str, titles: list[str]) -> None:
    """Every limit stands in its gates, and every formula in their values."""
    report = read_report(EVIDENCE / f"{name}.json")
    benchmark: Any = benchmark_of(report.kind)
    again = benchmark(model=report.config["model"]).gates(from_json(benchmark.results, report.results))
    again = [gate for gate in again if gate.name not in ASKED_SINCE]
    judged = [gate for gate in report.gates if gate.name not in ELSEWHERE | ASKED_SINCE]
    assert {gate.name: gate for gate in again} == {gate.name: gate for gate in judged}
    tables = [each.title for each in shown(report) if isinstance(each, Table)]
    assert all(found.startswith(title) for found, title in zip(tables, titles, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_every_benchmark_is_complete(kind: str) -> None:
    benchmark = benchmark_of(kind)
    assert benchmark.kind == kind
    assert benchmark.title
    assert benchmark.help.endswith((".", "?"))


OLD_STUBS = "The grpc package installed is at version 1.1, but the generated code depends on 1.85"


@pytest.mark.parametrize(
    ("refusal", "ours"),
    [
        (ModuleNotFoundError(name="httpx"), False),
        (RuntimeError(OLD_STUBS), False),
        (ModuleNotFoundError(name="kakeya.bench.wrong"), True),
        (RuntimeError("boom"), True),
    ],
)
def test_what_cannot_be_imported_is_not_listed_and_a_fault_of_ours_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception, ours: bool
) -> None:
    def importing(name: str) -> object:
        if name == "kakeya.bench.conversation":
            raise refusal
        return import_module(name)

    monkeypatch.setattr(registry, "import_module", importing)
    if ours:
        with pytest.raises(type(refusal)):
            usable_kinds()
    else:
        assert usable_kinds() == [kind for kind in KINDS if kind != "conversation"]
