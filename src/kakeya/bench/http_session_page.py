"""The table and the plots of `bench http-session`, for the terminal and for the page. Pure."""

from collections.abc import Mapping
from typing import Any

from kakeya.bench.page import Section, Table, picture, render_page
from kakeya.bench.report import Report
from kakeya.bench.turns_page import error_rows, error_table, tokens_curve, turns_curve

TITLE = "HTTP session benchmark"

Row = Mapping[str, Any]


def http_session_page(report: Report) -> str:
    """The report as one HTML page."""
    return render_page(TITLE, report, http_session_sections(report.results))


def http_session_picture(results: Row) -> str:
    """Latency of every turn with and without matching, as an SVG file."""
    return picture(turns_curve(results["contestants"]))


def http_session_sections(results: Row) -> list[Section]:
    """Both sides in numbers with the plots, and what went wrong."""
    rows = results["contestants"]
    sections = [Section(http_session_table(results), [turns_curve(rows), tokens_curve(rows)])]
    errors = error_rows(rows)
    return [*sections, Section(error_table(errors))] if errors else sections


def http_session_table(results: Row) -> Table:
    """The two sides beside each other."""
    rows = results["contestants"]
    over = results["unmatched_over_matched"]
    lines = (
        ("tokens of history", "history_length", 1, "{:,.0f}"),
        ("latency p50, ms", "latency_p50_s", 1000, "{:,.0f}"),
        ("latency p95, ms", "latency_p95_s", 1000, "{:,.0f}"),
        ("first token p50, ms", "ttft_p50_s", 1000, "{:,.0f}"),
        ("first turns p50, ms", "head_latency_p50_s", 1000, "{:,.0f}"),
        ("last turns p50, ms", "tail_latency_p50_s", 1000, "{:,.0f}"),
        ("last over first", "tail_over_head", 1, "{:.2f}"),
    )
    sides = [row["aggregate"] for row in rows]
    counts = ("turns, and errors", *(f"{side['n_turns']:,}, {side['n_errors']:,}" for side in sides), "")
    cells = [
        (
            label,
            *(_number(side[name], pattern, scale) for side in sides),
            _number(over[name], "{:.2f}x") if name in over else "",
        )
        for label, name, scale, pattern in lines
    ]
    # Both sides talk in turns, so that others disturb them alike.
    others = _number(results.get("bystanders_share"), "{:.1%}")
    cells.append(("share of the machine that others used", *(others for _ in sides), ""))
    columns = ("what", *(row["contestant"] for row in rows), "ratio")
    return Table("One conversation over chat completions", columns, [counts, *cells])


def _number(value: float | None, pattern: str, scale: float = 1) -> str:
    return "–" if value is None else pattern.format(value * scale)
