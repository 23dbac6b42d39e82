"""The table and the chart of `bench overhead`, for the terminal and for the page. Pure."""

from collections.abc import Mapping
from typing import Any

from kakeya.bench.chart import Chart, Series, bar_chart
from kakeya.bench.overhead_results import ENGINE
from kakeya.bench.page import Section, Table, render_page
from kakeya.bench.report import Report

TITLE = "Overhead benchmark"
SPEED = "tokens/s"

Row = Mapping[str, Any]


def overhead_page(report: Report) -> str:
    """The report as one HTML page."""
    return render_page(TITLE, report, overhead_sections(report.results))


def overhead_sections(results: Row) -> list[Section]:
    """Speeds and what is kept of the engine's, and who was not there."""
    sections = [Section(overhead_table(results), [_chart(results)])]
    if results["absent"]:
        rows = list(results["absent"].items())
        sections.append(Section(Table("Not measured", ("front end", "why"), rows, labels=2)))
    return sections


def overhead_table(results: Row) -> Table:
    """One line for each front end and each kind of work."""
    rows = [
        (
            row["front_end"],
            row["work"],
            _number(row["tokens_per_second"]["median"]),
            _number(row["engine_tokens_per_second"]["median"]),
            _number(row["kept"], "{:.3f}"),
        )
        for row in results["front_ends"]
    ]
    columns = ("front end", "work", SPEED, f"{ENGINE} {SPEED}", "kept")
    return Table("Streams at once, medians", columns, rows, labels=2)


def _chart(results: Row) -> str:
    rows = results["front_ends"]
    series = [
        Series(ENGINE, [row["engine_tokens_per_second"]["median"] for row in rows]),
        Series("front end", [row["tokens_per_second"]["median"] for row in rows]),
    ]
    labels = [f"{row['front_end']}, {row['work']}" for row in rows]
    return bar_chart(Chart("Speed beside the engine", SPEED, "front end and work", labels, series))


def _number(value: float | None, pattern: str = "{:,.0f}") -> str:
    return "–" if value is None else pattern.format(value)
