"""The table and the plots of `bench peers`, for the terminal and for the page. Pure."""

from collections.abc import Mapping
from typing import Any

from kakeya.bench.engine_page import engine_sections
from kakeya.bench.page import Section, Table, picture, render_page
from kakeya.bench.report import Report
from kakeya.bench.turns_page import turns_curve, turns_sections
from kakeya.bench.turns_results import LLAMA, TRANSFORMERS

TITLE = "Beside llama.cpp and transformers"

Row = Mapping[str, Any]


def comparison_page(report: Report) -> str:
    """The report as one HTML page."""
    return render_page(TITLE, report, comparison_sections(report.results))


def comparison_picture(results: Row) -> str:
    """Latency of every turn by everybody, as an SVG file; without lines where nobody has talked yet."""
    return picture(turns_curve(results["turns"]["contestants"] if "turns" in results else []))


def comparison_sections(results: Row) -> list[Section]:
    """The one table and the one plot, then both benchmarks in full. A partial report has less."""
    sections = []
    if "comparison" in results:
        plot = turns_curve(results["turns"]["contestants"])
        sections.append(Section(comparison_table(results), [plot]))
        sections += turns_sections(results["turns"])
    return [*sections, *engine_sections(results["engine"])]


def comparison_table(results: Row) -> Table:
    """One line for each kind of work."""
    columns = ("work", "unit", "kakeya", LLAMA, TRANSFORMERS, f"over {LLAMA}", f"over {TRANSFORMERS}")
    rows = [
        (
            row["work"],
            row["unit"],
            *(_number(row[who], "{:,.0f}") for who in ("ours", LLAMA, TRANSFORMERS)),
            *(_number(row["over"][who], "{:.2f}x") for who in (LLAMA, TRANSFORMERS)),
        )
        for row in results["comparison"]
    ]
    return Table("Medians, and how many times as fast we are", columns, rows, labels=2)


def _number(value: float | None, pattern: str) -> str:
    return "–" if value is None else pattern.format(value)
