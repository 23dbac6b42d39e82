"""The tables and plots of the part `memory` of `bench quality`. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from kakeya.bench.chart import Series
from kakeya.bench.curve import curve
from kakeya.bench.history_chart import HistoryCurve, history_curve
from kakeya.bench.page import Section, Table, picture
from kakeya.bench.quality_memory_results import EARLY_TOKENS, FAR_TOKENS, thinned

MIB = 2**20
# A point of the picture stands for at least this share of the history before it.
SHARE = 0.12
# Beyond this it is drawn at the edge: a model that guesses blindly does better.
HIGHEST = 1e6

Row = Mapping[str, Any]


def memory_sections(results: Row) -> list[Section]:
    """The ways beside each other with their curves, and the long session beside fresh ones."""
    sections = [Section(memory_table(results["ways"]), [perplexity_chart(results), *_sink_charts(results)])]
    return [*sections, Section(fresh_table(results["fresh"]))] if results["fresh"] else sections


def memory_picture(results: Row) -> str:
    """Perplexity over history for every way, as an SVG file."""
    return picture(perplexity_chart(results))


def memory_table(rows: Sequence[Row]) -> Table:
    columns = ("remembers", "MiB", "tokens", "tokens/s", "perplexity", "early", "last third", "last/early",
               f"past {FAR_TOKENS:,}")  # fmt: skip
    cells = [
        (
            row["way"],
            f"{row['session_bytes'] / MIB:,.1f}",
            f"{row['tokens']:,}",
            _number(row["tokens_per_second"], "{:,.0f}"),
            *(_number(row[name]) for name in ("perplexity", "perplexity_early", "perplexity_late")),
            _number(row["late_over_early"], "{:.3f}"),
            _number(row["perplexity_far"]),
        )
        for row in rows
    ]
    return Table(f"Perplexity; early: from a full window to {EARLY_TOKENS:,} tokens", columns, cells)


def fresh_table(fresh: Row) -> Table:
    """The same stretches of text in the long session and in ones begun a window before."""
    ours, theirs = (_number(fresh[f"perplexity_{name}"]) for name in ("streamed", "fresh"))
    rows = [
        ("in the long session", ours),
        ("in sessions begun a window before", theirs),
        ("long over fresh", _number(fresh["streamed_over_fresh"], "{:.4f}")),
    ]
    count, size = len(fresh["stretches"]), fresh["stretch_tokens"]
    return Table(
        f"{count} stretches of {size} tokens far on, remembering {fresh['way']}",
        ("where", "perplexity"),
        rows,
    )


def perplexity_chart(results: Row) -> str:
    """All ways over the whole history."""
    lines = {row["way"]: dict(thinned(row["buckets"], SHARE)) for row in results["ways"]}
    at = sorted({place for line in lines.values() for place in line})
    trained = results["trained_tokens"]
    return history_curve(
        HistoryCurve(
            title="Perplexity by place in the history",
            unit="ppl",
            x_title="perplexity by tokens of history",
            series=[Series(way, [_drawn(line.get(place)) for place in at]) for way, line in lines.items()],
            at=at,
            mark=(trained, f"trained to {trained:,}"),
        )
    )


def _drawn(value: float | None) -> float | None:
    return None if value is None else min(HIGHEST, value)


def _sink_charts(results: Row) -> list[str]:
    """Those with sinks alone, on plain axes, where small differences are seen."""
    rows = [row for row in results["ways"] if row["sink"] > 0]
    if not rows:
        return []
    at = [(bucket["from"] + bucket["to"]) / 2000 for bucket in rows[0]["buckets"]]
    series = [Series(row["way"], [bucket["perplexity"] for bucket in row["buckets"]]) for row in rows]
    x_title = "perplexity by thousand tokens of history"
    return [curve("Perplexity of sinks and window", "ppl", x_title, at, series)]


def _number(value: float | None, pattern: str = "{:,.2f}") -> str:
    return "–" if value is None else pattern.format(value)
