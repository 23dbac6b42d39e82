"""The tables and plots of `bench capacity`, for the terminal and for the page. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from kakeya.bench.chart import Chart, Series, line_chart
from kakeya.bench.page import Section, Table, picture, render_page
from kakeya.bench.report import Report

TITLE = "Capacity benchmark"
MIB = 2**20

Row = Mapping[str, Any]


def capacity_page(report: Report) -> str:
    """The report as one HTML page."""
    return render_page(TITLE, report, capacity_sections(report.results))


def capacity_picture(results: Row) -> str:
    """Speed of all agents together over their number, as an SVG file."""
    return picture(_speed_chart(results["levels"]))


def capacity_sections(results: Row) -> list[Section]:
    """Levels with their plots, the summary, and an example of each error."""
    levels = results["levels"]
    sections = [Section(level_table(levels), _charts(levels)), Section(summary_table(results))]
    errors = [(row["level"], error) for row in levels for error in row["first_errors"]]
    return [*sections, Section(error_table(errors))] if errors else sections


def level_table(levels: Sequence[Row]) -> Table:
    """One line a level."""
    columns = ("agents", "created", "answered", "wrong", "errors", "create p50 / p95, ms",
               "turn p50 / p95, s", "tokens/s", "KV MiB each", "RSS MiB", "wall, s")  # fmt: skip
    rows = [
        (
            f"{row['level']:,}",
            f"{row['created_ok']:,}",
            f"{row['generate_ok']:,}",
            f"{row['wrong_outputs']:,}",
            ", ".join(f"{count} {name}" for name, count in row["errors"].items()) or "0",
            _pair(row, "create", 1000.0, "{:,.1f}"),
            _pair(row, "generate", 1.0, "{:,.2f}"),
            _number(row["tokens_per_s"], "{:,.0f}"),
            _mib(row["per_session_kv_bytes"], "{:,.2f}"),
            _mib(row["server_rss_bytes"]),
            f"{row['wall_s']:,.1f}",
        )
        for row in levels
    ]
    return Table("Agents at once", columns, rows)


def summary_table(results: Row) -> Table:
    """The ramp in words, and how busy others kept the machine: its speeds are judged by nobody."""
    summary = results["summary"]
    distinct = f"{summary['distinct_solo_outputs']:,} of {summary['solo_outputs']:,}"
    share = _number(summary["node_kv_share_of_memory"], "{:.1%}")
    rows = [
        ("most agents at once, all clean", f"{summary['max_concurrent_agents_clean']:,}"),
        ("outputs compared with solo runs", f"{summary['outputs_checked']:,}"),
        ("of these wrong", f"{summary['wrong_outputs']:,}"),
        ("distinct solo outputs", distinct),
        ("KV MiB a session, seen / announced", _seen_and_announced(summary)),
        ("KV MiB of the node at most", f"{_mib(summary['node_kv_upper_bound'])} ({share} of the memory)"),
        ("server RSS MiB, ready / peak", _ready_and_peak(summary)),
        ("share of the machine that others used", _number(results.get("bystanders_share"), "{:.1%}")),
        ("the ramp ended", summary["stopped_by"] or "not yet"),
    ]
    return Table("Summary", ("what", "value"), rows)


def error_table(errors: Sequence[tuple[int, Row]]) -> Table:
    rows = [(f"{level:,}", error["class"], error["phase"], error["message"]) for level, error in errors]
    return Table("An example of each error", ("agents", "class", "part", "message"), rows, labels=4)


def _seen_and_announced(summary: Row) -> str:
    return " / ".join(
        _mib(summary[name], "{:,.2f}") for name in ("per_session_kv_bytes", "announced_kv_bytes_per_session")
    )


def _ready_and_peak(summary: Row) -> str:
    return " / ".join(_mib(summary[name]) for name in ("server_rss_when_ready", "server_peak_rss"))


def _charts(levels: Sequence[Row]) -> list[str]:
    return [
        _speed_chart(levels),
        line_chart(_latency_chart(levels, "generate", "A turn", "s", 1.0)),
        line_chart(_latency_chart(levels, "create", "Opening a session", "ms", 1000.0)),
        line_chart(_memory_chart(levels)),
    ]


def _speed_chart(levels: Sequence[Row]) -> str:
    series = [Series("all agents together", [row["tokens_per_s"] for row in levels])]
    return line_chart(Chart("Generated tokens a second", "tokens/s", "agents", _labels(levels), series))


def _latency_chart(levels: Sequence[Row], name: str, title: str, unit: str, scale: float) -> Chart:
    series = [
        Series(f"{title.lower()}, {rank}", [_scaled(row[f"{name}_{rank}_s"], scale) for row in levels])
        for rank in ("p50", "p95")
    ]
    return Chart(title, unit, "agents", _labels(levels), series)


def _memory_chart(levels: Sequence[Row]) -> Chart:
    series = [Series("server resident memory", [_scaled(row["server_rss_bytes"], 1 / MIB) for row in levels])]
    return Chart("Memory", "MiB", "agents", _labels(levels), series)


def _labels(levels: Sequence[Row]) -> list[str]:
    return [f"{row['level']:,}" for row in levels]


def _pair(row: Row, name: str, scale: float, pattern: str) -> str:
    return " / ".join(_number(_scaled(row[f"{name}_{rank}_s"], scale), pattern) for rank in ("p50", "p95"))


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _mib(size: float | None, pattern: str = "{:,.0f}") -> str:
    return _number(_scaled(size, 1 / MIB), pattern)


def _number(value: float | None, pattern: str) -> str:
    return "–" if value is None else pattern.format(value)
