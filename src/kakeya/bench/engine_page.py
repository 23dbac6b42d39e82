"""The tables and charts of `bench engine`, for the terminal and for the page. Pure."""

from collections.abc import Sequence

from kakeya.bench.chart import Chart, Series, bar_chart, line_chart
from kakeya.bench.engine_results import OURS, PEER, Row, median_of, row_label
from kakeya.bench.page import Section, Table, picture, render_page
from kakeya.bench.report import Report

TITLE = "Engine benchmark"
SPEED = "tokens/s"


def engine_page(report: Report) -> str:
    """The report as one HTML page."""
    return render_page(TITLE, report, engine_sections(report.results))


def history_picture(results: Row) -> str:
    """What a longer history does to one session's speed, as an SVG file."""
    return picture(_history_chart(results))


def engine_sections(results: Row) -> list[Section]:
    """Speed, memory and start, each with its charts. Reports of earlier versions have no sampled decoding."""
    sampled: Sequence[Row] = results.get("sampled", ())
    return [
        Section(speed_table(results), _speed_charts(results)),
        *([Section(sampled_table(sampled), [_sampled_chart(sampled)])] if sampled else ()),
        Section(memory_table(results["memory"])),
        Section(startup_table(results["startup"])),
    ]


def speed_table(results: Row) -> Table:
    """Medians of both sides and their ratio; the peer's columns only when there was one."""
    columns = ("work", OURS, PEER, "ratio")
    cells = [
        (
            row_label(row),
            _number(median_of(row)),
            _number(median_of(row, "peer_tokens_per_second")),
            _number(row["ratio"], "{:.2f}x"),
        )
        for row in (*results["prompt"], *results["decode"])
    ]
    shown = 4 if results["peer"] else 2
    return Table(f"Speed, {SPEED} (median)", columns[:shown], [row[:shown] for row in cells])


def sampled_table(sampled: Sequence[Row]) -> Table:
    """What choosing tokens otherwise than greedily costs."""
    columns = ("work", OURS, "of greedy")
    rows = [(row_label(row), _number(median_of(row)), _number(row["of_greedy"], "{:.3f}")) for row in sampled]
    return Table(f"Sampled decoding, {SPEED} (median); ours alone, the peer chooses no tokens", columns, rows)


def memory_table(memory: Row) -> Table:
    moments = ("before_open", "after_open", "after_warm_up", "at_end", "pool")
    rows = [(moment.replace("_", " "), f"{memory[f'{moment}_bytes'] / 2**20:,.1f}") for moment in moments]
    return Table("Resident memory", ("moment", "MiB"), rows)


def startup_table(startup: Row) -> Table:
    steps = (
        ("launch to loaded model", "ready_seconds"),
        ("from there to first token", "first_token_seconds"),
    )
    rows = [(label, _number(median_of(startup, name), "{:.2f}")) for label, name in steps]
    return Table("Start of a fresh process (median)", ("step", "seconds"), rows)


def _number(value: float | None, pattern: str = "{:,.0f}") -> str:
    return "–" if value is None else pattern.format(value)


def _speed_charts(results: Row) -> list[str]:
    with_peer = results["peer"] is not None
    charts = [
        bar_chart(_chart("Prompt", "prompt tokens", results["prompt"], "tokens", with_peer=with_peer)),
        _history_chart(results),
    ]
    for history in sorted({row["history"] for row in results["decode"] if row["sessions"] > 1}):
        rows = [row for row in results["decode"] if row["history"] == history]
        title = f"sessions at history {history:,}"
        charts.append(bar_chart(_chart("Sessions together", title, rows, "sessions", with_peer=with_peer)))
    return charts


def _sampled_chart(sampled: Sequence[Row]) -> str:
    sessions = list(dict.fromkeys(row["sessions"] for row in sampled))
    series = [
        Series(choice, [median_of(row) for row in sampled if row["choice"] == choice])
        for choice in dict.fromkeys(row["choice"] for row in sampled)
    ]
    return bar_chart(
        Chart("Sampled decoding", SPEED, "sessions", [f"{count:,}" for count in sessions], series)
    )


def _history_chart(results: Row) -> str:
    alone = [row for row in results["decode"] if row["sessions"] == 1]
    with_peer = results["peer"] is not None
    return line_chart(_chart("One session", "tokens of history", alone, "history", with_peer=with_peer))


def _chart(title: str, x_title: str, rows: Sequence[Row], place: str, *, with_peer: bool) -> Chart:
    series = [Series(OURS, [median_of(row) for row in rows])]
    if with_peer:
        series.append(Series(PEER, [median_of(row, "peer_tokens_per_second") for row in rows]))
    return Chart(title, SPEED, x_title, [f"{row[place]:,}" for row in rows], series)
