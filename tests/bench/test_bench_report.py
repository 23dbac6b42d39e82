import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kakeya.bench.chart import Chart, Series, bar_chart, line_chart, round_up
from kakeya.bench.gates import at_least
from kakeya.bench.page import Section, Table, render_page
from kakeya.bench.report import (
    SCHEMA_VERSION,
    Report,
    check_output,
    check_picture,
    now,
    write_picture,
    write_report,
)
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
CHART = Chart(
    "Title <1>", "tokens/s", "history", ["64", "1,024"], [Series("a", [3, 5]), Series("b", [2, None])]
)


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the picture"):
        write_picture(tmp_path / "no" / "such" / "place.svg", "<svg/>")


def test_report_says_what_it_is() -> None:
    read = json.loads(REPORT.to_json())
    assert read["schema_version"] == SCHEMA_VERSION
    assert read["kind"] == "engine"
    assert read["partial"] is False
    assert read["started_at"] <= read["finished_at"]
    assert [gate["passed"] for gate in read["gates"]] == [True, False, None]
    assert REPORT.exit_status == 1


def test_unfinished_report_is_partial() -> None:
    partial = replace(REPORT, finished_at=None)
    assert json.loads(partial.to_json())["partial"] is True
    assert "partial checkpoint" in render_page("t", partial, [])


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
        check_picture(tmp_path / name)


def test_a_possible_picture_or_none_is_accepted(tmp_path: Path) -> None:
    check_picture(tmp_path / "p.svg")
    check_picture(None)
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
    table = Table("T <x>", ("what", "n"), [("<row>", "1")])
    page = render_page("Title", REPORT, [Section(table, [bar_chart(CHART)])])
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
    page = render_page("Title", REPORT, [])
    for style, verdict in (("passed", "passed"), ("failed", "failed"), ("judged", "not judged")):
        assert f'<td class="{style}">{verdict}</td>' in page


def test_page_without_gates_has_no_empty_table() -> None:
    assert "<h2>Gates" not in render_page("Title", replace(REPORT, gates=()), [])


@pytest.mark.parametrize(
    ("value", "end"), [(0.0, 1.0), (-3, 1.0), (1.0, 1.0), (3, 4), (9, 10), (0.03, 0.04), (150, 200)]
)
def test_axes_end_at_a_round_number(value: float, end: float) -> None:
    assert round_up(value) == pytest.approx(end)


def _shapes(svg: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(tag))


def test_line_chart_has_a_dot_for_each_measurement_at_its_height() -> None:
    dots = _shapes(line_chart(CHART), "circle")
    assert [dot.findtext("title") for dot in dots] == [
        "a, 64: 3 tokens/s",
        "a, 1,024: 5 tokens/s",
        "b, 64: 2 tokens/s",
    ]
    # The axis runs from 0 at y = 236 to 8 at y = 40.
    heights = [float(dot.get("cy", "")) for dot in dots]
    assert heights == [pytest.approx(236 - 196 * value / 8, abs=0.06) for value in (3, 5, 2)]


def test_bars_are_as_tall_as_their_values_and_do_not_overlap() -> None:
    bars = [bar for bar in _shapes(bar_chart(CHART), "rect") if bar.find("title") is not None]
    spans = sorted((float(bar.get("x", "")), float(bar.get("width", ""))) for bar in bars)
    assert len(spans) == 3
    assert all(x + width <= following for (x, width), (following, _) in pairwise(spans))
    heights = [float(bar.get("height", "")) for bar in bars]
    assert heights[0] / heights[1] == pytest.approx(3 / 5, abs=0.01)


def test_a_chart_without_measurements_is_still_a_chart() -> None:
    empty = Chart("t", "u", "x", [], [Series("a", [])])
    assert not re.search("nan|inf", bar_chart(empty) + line_chart(empty))
