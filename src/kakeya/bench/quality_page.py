"""The tables and charts of `bench quality`, for the terminal and for the page. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from kakeya.bench.chart import Chart, Series, bar_chart
from kakeya.bench.page import Section, Table, render_page
from kakeya.bench.quality_memory_page import memory_picture, memory_sections
from kakeya.bench.quality_peer_page import peer_sections
from kakeya.bench.quality_recall_page import recall_sections
from kakeya.bench.quality_results import REFERENCE
from kakeya.bench.report import Report

TITLE = "Quality benchmark"


def quality_table(results: Mapping[str, Any]) -> Table:
    """One line a choice: divergence in decoding and in prompts, then agreement and perplexity of decoding."""
    columns = ("dtype", "weights", "kernels", "held as", "KL, decode", "KL, prompt", "top-1", "perplexity")
    perplexity = _number(results["reference"]["perplexity"], "{:.3f}")
    names = (REFERENCE.dtype, REFERENCE.weights, REFERENCE.kernels)
    rows: list[Sequence[str]] = [(*names, "the reference", "0", "0", "100.00%", perplexity)]
    rows += [(row["dtype"], row["weights"], row["kernels"], *_cells(row)) for row in results["choices"]]
    return Table("Against float32 weights of the same file", columns, rows, labels=4)


def _cells(row: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    if row["refused"]:
        return (f"not here: {row['refused']}", "–", "–", "–", "–")
    decode, prompt = row["decode"], row["prompt"]
    return (
        row["held_as"],
        _number(decode["mean_kl"], "{:.2e}"),
        _number(prompt["mean_kl"], "{:.2e}"),
        _number(decode["top1_agreement"], "{:.2%}"),
        _number(decode["perplexity"], "{:.3f}"),
    )


def _number(value: float | None, pattern: str) -> str:
    return "–" if value is None else pattern.format(value)


def quality_page(report: Report) -> str:
    """The report as one HTML page."""
    return render_page(TITLE, report, quality_sections(report.results))


def quality_sections(results: Mapping[str, Any]) -> list[Section]:
    """The parts that were measured."""
    sections: list[Section] = []
    if "choices" in results:
        measured = [row for row in results["choices"] if not row["refused"]]
        sections.append(Section(quality_table(results), _charts(measured)))
    if "memory" in results:
        sections += memory_sections(results["memory"])
    if "recall" in results:
        sections += recall_sections(results["recall"])
    if "peer" in results:
        sections += peer_sections(results["peer"])
    return sections


def quality_picture(results: Mapping[str, Any]) -> str:
    """Perplexity over history, as an SVG file. Raises KeyError where that part was not measured."""
    return memory_picture(results["memory"])


def _charts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One chart for each (dtype, kernels), with the weight formats side by side."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(f"{row['dtype']}, {row['kernels']} kernels", []).append(row)
    return [
        bar_chart(
            Chart(
                title=f"KL divergence, {name}",
                unit="mean KL",
                x_title=name,
                labels=[row["weights"] for row in members],
                series=[
                    Series(fed, [row[fed]["mean_kl"] for row in members]) for fed in ("decode", "prompt")
                ],
            )
        )
        for name, members in groups.items()
    ]
