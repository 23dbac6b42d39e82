"""The tables and plots of `bench session`, for the terminal and for the page. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from kakeya.bench.chart import Series
from kakeya.bench.curve import curve
from kakeya.bench.page import Section, Table, picture, render_page
from kakeya.bench.report import Report
from kakeya.bench.session_results import BUCKET_SECONDS, RSS_TAIL, SETTLED_TURN

TITLE = "Session benchmark"
MIB = 2**20
AXIS = "thousand tokens of history"

Row = Mapping[str, Any]


def session_page(report: Report) -> str:
    """The report as one HTML page."""
    return render_page(TITLE, report, session_sections(report.results))


def session_picture(results: Row) -> str:
    """Latency over history, as an SVG file."""
    return picture(_latency_curve(_good(results)))


def session_sections(results: Row) -> list[Section]:
    """The run in numbers with its plots, and its stretches of ten minutes."""
    sections = [
        Section(summary_table(results), _curves(_good(results))),
        Section(bucket_table(results["aggregate"]["buckets_10min"])),
    ]
    errors = [turn for turn in results["turns"] if not turn["ok"]]
    return [*sections, Section(error_table(errors))] if errors else sections


def summary_table(results: Row) -> Table:
    """The aggregate, in words."""
    total, kept = results["aggregate"], results["aggregate"]["kv_live_bytes"]
    aborted = results["abort_reason"] and f"aborted: {results['abort_reason']}"
    rows = [
        ("turns, and errors", f"{total['n_turns']:,}, {total['n_errors']:,}"),
        ("ended by", results["ended_by"] or aborted or "not yet"),
        ("seconds", _number(total["duration_s"], "{:,.1f}")),
        ("tokens of history", _number(total["history_length"])),
        ("latency p50 / p95, ms", _pair(total, "latency")),
        ("first token p50 / p95, ms", _pair(total, "ttft")),
        ("latency, first turns / last turns, ms", _ends(total)),
        ("last over first", _number(total["tail_over_head"], "{:.3f}")),
        ("KV bytes, min / max", f"{_number(kept['min'])} / {_number(kept['max'])}"),
        *_memory_rows(total["server_rss"]),
        ("share of the machine that others used", _number(results.get("bystanders_share"), "{:.1%}")),
    ]
    return Table("One session", ("what", "value"), rows)


def _memory_rows(rss: Row) -> list[tuple[str, str]]:
    """Older reports have neither peak nor tail."""
    names = ("peak_over_settled", "tail_over_settled", "last_over_settled")
    return [
        (
            f"server memory over turn {SETTLED_TURN}'s, peak / last {RSS_TAIL} turns / last turn",
            " / ".join(_number(rss.get(name), "{:.4f}") for name in names),
        ),
        ("its slope, KiB a minute", _number(_per_minute(rss["slope_bytes_per_s"]), "{:+,.1f}")),
    ]


def bucket_table(buckets: Sequence[Row]) -> Table:
    columns = ("from minute", "turns", "errors", "latency p50, ms", "p95, ms", "KV MiB", "history", "RSS MiB")
    rows = [
        (
            f"{bucket['from_s'] / 60:.0f}",
            f"{bucket['n_turns']:,}",
            f"{bucket['n_errors']:,}",
            _number(_ms(bucket["latency_p50_s"]), "{:,.1f}"),
            _number(_ms(bucket["latency_p95_s"]), "{:,.1f}"),
            _number(_mib(bucket["kv_live_bytes_max"]), "{:,.2f}"),
            _number(bucket["history_length"]),
            _number(_mib(bucket["server_rss_bytes_max"]), "{:,.1f}"),
        )
        for bucket in buckets
    ]
    return Table(f"By {BUCKET_SECONDS / 60:.0f} minutes", columns, rows)


def error_table(errors: Sequence[Row]) -> Table:
    """The first errors; the JSON has them all."""
    rows = [(f"{turn['t_relative_s']:,.1f}", turn["error_class"], turn["error_str"]) for turn in errors[:20]]
    return Table("Errors", ("second", "class", "message"), rows, labels=3)


def _good(results: Row) -> list[Row]:
    return [turn for turn in results["turns"] if turn["ok"]]


def _curves(turns: Sequence[Row]) -> list[str]:
    at = [turn["history_length"] / 1000 for turn in turns]
    kept = [Series("kv_live_bytes", [_mib(turn["kv_live_bytes"]) for turn in turns])]
    curves = [_latency_curve(turns), curve("KV memory per turn", "MiB", AXIS, at, kept)]
    memory = [_mib(turn.get("server_rss_bytes")) for turn in turns]
    if any(memory):
        series = [Series("server resident memory", memory)]
        curves.append(curve("Server memory per turn", "MiB", AXIS, at, series))
    return curves


def _latency_curve(turns: Sequence[Row]) -> str:
    series = [
        Series("latency", [_ms(turn["latency_s"]) for turn in turns]),
        Series("first token", [_ms(turn.get("ttft_s")) for turn in turns]),
    ]
    at = [turn["history_length"] / 1000 for turn in turns]
    return curve("Latency per turn", "ms", AXIS, at, series)


def _pair(total: Row, name: str) -> str:
    return " / ".join(_number(_ms(total[f"{name}_{rank}_s"]), "{:,.1f}") for rank in ("p50", "p95"))


def _ends(total: Row) -> str:
    ends = (total["head_latency_p50_s"], total["tail_latency_p50_s"])
    return " / ".join(_number(_ms(end), "{:,.1f}") for end in ends)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _mib(size: float | None) -> float | None:
    return None if size is None else size / MIB


def _per_minute(slope: float | None) -> float | None:
    return None if slope is None else slope * 60 / 1024


def _number(value: float | None, pattern: str = "{:,.0f}") -> str:
    return "–" if value is None else pattern.format(value)
