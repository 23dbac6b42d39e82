"""Pages of one report and of many."""

from dataclasses import replace

import pytest

from kakeya.bench.page import collection_page, overview, report_page
from kakeya.bench.report import Collection, Report, at_least, now
from kakeya.bench.tables import Chart, Series, listing

GATES = tuple(at_least(f"gate {value}", value, 1.0, absent="nothing <here>") for value in (2.0, 0.5, None))
CONFIG = {"model": "<m>", "cache": {"sink": 4}}
MACHINE = {"cpu": "a & b", "os": "any"}
REPORT = Report("engine", CONFIG, MACHINE, {}, GATES, finished_at=now())
PARTIAL = replace(REPORT, gates=(), finished_at=None, config={"server": {"model_id": "served"}})
SHOWN = [
    listing("T <x>", ("what", "n"), [("<row>", "1")], labels=1),
    Chart("Title <1>", "tokens/s", "history", ["64", "1,024"], [Series("a", [3, 5])]),
]
COLLECTION = Collection(
    {"one&two": REPORT, "b": PARTIAL, "c": replace(REPORT, config={})}, {"d": "not <a> report"}
)


@pytest.mark.parametrize(
    "page",
    [
        report_page("T <p>", REPORT, SHOWN),
        collection_page(COLLECTION, {"one&two": SHOWN, "b": [], "c": []}),
    ],
)
def test_a_page_escapes_and_asks_nobody(page: str) -> None:
    assert page.startswith("<!doctype html>")
    assert page.count("<!doctype html>") == page.count("<style>") == page.count("<svg") == 1
    assert not any(word in page for word in ("<script", "<link", "<img", "src=", "http", "url("))
    for part in (
        "T &lt;x&gt;</h2>",
        '<td>&lt;row&gt;</td><td class="number">1</td>',
        'aria-label="Title &lt;1&gt;"',
        "a &amp; b, any",
        "<td>cache.sink</td><td>4</td>",
        "nothing &lt;here&gt;",
        "prefers-color-scheme: dark",
        *(f'<td class="{style}">' for style in ("passed", "failed", "judged")),
    ):
        assert part in page


def test_a_page_of_one_report() -> None:
    assert report_page("T <p>", REPORT, []).count("<h1>T &lt;p&gt;</h1>") == 1
    partial = report_page("t", PARTIAL, [])
    assert "partial checkpoint" in partial
    assert "<h2>Gates" not in partial


def test_a_page_of_many_has_links_and_what_was_no_report() -> None:
    page = collection_page(COLLECTION, {"one&two": SHOWN, "b": [], "c": []})
    assert '<a href="#report-0">one&amp;two</a> · <a href="#report-1">b</a>' in page
    assert '<h1 id="report-0">one&amp;two</h1>' in page
    assert "<td>d</td><td>not &lt;a&gt; report</td>" in page


def test_the_overview_counts_gates_and_names_those_that_failed() -> None:
    today = now()[:10]
    assert overview(COLLECTION).cells == [
        ["one&two", "engine", "<m>", today, "1", "1", "1", "gate 0.5"],
        ["b", "engine", "served", "partial", "0", "0", "0", "–"],
        ["c", "engine", "–", today, "1", "1", "1", "gate 0.5"],
    ]
