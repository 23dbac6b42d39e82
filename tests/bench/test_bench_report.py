"""Reports as JSON and as pages, the tables in them, and how they are written and read again."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kakeya.bench.page import report_page
from kakeya.bench.report import (
    SCHEMA_VERSION,
    Report,
    as_json,
    at_least,
    check_file,
    check_output,
    from_json,
    now,
    read_report,
    write_file,
    write_report,
)
from kakeya.bench.tables import Chart, Column, Series, Table, figure, figures, listing
from kakeya.errors import ConfigError

GATES = tuple(at_least(f"gate {value}", value, 1.0, absent="nothing <here>") for value in (2.0, 0.5, None))
REPORT = Report(
    "engine",
    config={"model": "<m>", "cache": {"sink": 4}},
    machine={"cpu": "a & b", "os": "any"},
    results={"speed": 1.0},
    gates=GATES,
    finished_at=now(),
)
CHART = Chart("Title <1>", "tokens/s", "history", ["64", "1,024"], [Series("a", [3, 5])])


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the picture"):
        write_file("picture", tmp_path / "no" / "such" / "place.svg", "<svg/>")


def test_report_says_what_it_is() -> None:
    read = json.loads(REPORT.to_json())
    assert read["schema_version"] == SCHEMA_VERSION
    assert read["kind"] == "engine"
    assert read["partial"] is False
    assert read["started_at"] <= read["finished_at"]
    assert [gate["passed"] for gate in read["gates"]] == [True, False, None]
    assert REPORT.exit_status == 1


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_report(tmp_path / "a.json", REPORT, "")
    assert read_report(tmp_path / "a.json") == REPORT


def test_unfinished_report_is_partial() -> None:
    partial = replace(REPORT, finished_at=None)
    assert json.loads(partial.to_json())["partial"] is True
    assert "partial checkpoint" in report_page("t", partial, [])


def test_report_refuses_to_hide_a_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(REPORT, results={"speed": float("nan")}).to_json()


def test_writing_replaces_both_files_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")
    page = write_report(path, REPORT, "<p>page")
    assert json.loads(path.read_text())["kind"] == "engine"
    assert page.read_text() == "<p>page"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["r.html", "r.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failed_write_keeps_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")

    def full_disk(self: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(ConfigError, match="no space left"):
        write_report(path, REPORT, "page")
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("name", ["r.txt", "missing/r.json", "folder.json"])
def test_an_impossible_output_is_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match=name):
        check_output(tmp_path / name)


def test_a_possible_output_is_accepted(tmp_path: Path) -> None:
    check_output(tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["p.png", "missing/p.svg", "folder.svg"])
def test_an_impossible_picture_is_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ConfigError, match=name):
        check_file("picture", tmp_path / name, ".svg")


def test_a_possible_picture_or_none_is_accepted(tmp_path: Path) -> None:
    check_file("picture", tmp_path / "p.svg", ".svg")
    check_file("picture", None, ".svg")
    assert list(tmp_path.iterdir()) == []


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.urls: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.urls += [str(value) for name, value in attrs if name in ("src", "href")]


def test_page_is_self_contained_and_escapes() -> None:
    table = listing("T <x>", ("what", "n"), [("<row>", "1")], labels=1)
    page = report_page("Title", REPORT, [table, CHART])
    tags = _Tags(page)
    assert tags.urls == []
    assert "url(" not in page
    assert not {"script", "link", "img"} & set(tags.tags)
    assert tags.tags.count("svg") == 1
    assert "T &lt;x&gt;" in page
    assert "<td>&lt;row&gt;</td>" in page
    assert "nothing &lt;here&gt;" in page
    assert "<td>cache.sink</td><td>4</td>" in page
    assert "prefers-color-scheme: dark" in page


def test_page_shows_each_verdict_in_its_own_style() -> None:
    page = report_page("Title", REPORT, [])
    for style, verdict in (("passed", "passed"), ("failed", "failed"), ("judged", "not judged")):
        assert f'<td class="{style}">{verdict}</td>' in page


def test_page_without_gates_has_no_empty_table() -> None:
    assert "<h2>Gates" not in report_page("Title", replace(REPORT, gates=()), [])


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


def test_numbers_are_scaled_and_text_stands_as_it_is() -> None:
    assert [figure(value, 1000, ",.1f") for value in (1.5, None, "x", True, False)] == [
        "1,500.0",
        "–",
        "x",
        "yes",
        "no",
    ]
    assert figures(0.001, None, scale=1000, form=".2f") == "1.00 / –"


@pytest.mark.parametrize(
    ("of", "text"),
    [("colour", "red"), ("count", "2x"), (lambda row: row.samples[0] / 4, "0x"), (lambda row: None, "–")],
)
def test_a_cell_is_an_attribute_or_what_a_call_gives(of: str | Callable[[Inner], object], text: str) -> None:
    row = Inner((1.0, 2.0))
    assert Column("title", of, unit="x" if text.endswith("x") else "").cell(row) == text


def test_a_path_of_attributes_ends_where_there_is_nothing() -> None:
    column = Column("count", "more.count")
    table = Table("t", [column], [Outer([], more=Inner((1.0,))), Outer([])])
    assert (table.headings, table.cells) == (["count"], [["1"], ["–"]])
