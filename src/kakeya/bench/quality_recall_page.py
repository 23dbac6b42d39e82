"""The table and the plot of the part `recall` of `bench quality`. Pure."""

from collections.abc import Mapping
from typing import Any

from kakeya.bench.chart import Chart, Series, line_chart
from kakeya.bench.page import Section, Table
from kakeya.bench.quality_recall_results import BOUNDED, FULL, PINNED

Row = Mapping[str, Any]


def recall_sections(results: Row) -> list[Section]:
    """Right answers by memory and distance."""
    return [Section(recall_table(results), [recall_chart(results)])]


def recall_table(results: Row) -> Table:
    distances, by_place = _laid_out(results)
    rows = [
        (label, *(_cell(by_place.get((memory, distance))) for distance in distances))
        for memory, label in _labels(results).items()
    ]
    columns = ("a number said so many tokens ago", *(f"{distance:,}" for distance in distances))
    return Table("Right answers", columns, rows)


def recall_chart(results: Row) -> str:
    distances, by_place = _laid_out(results)
    series = [
        Series(label, [_recall(by_place.get((memory, distance))) for distance in distances])
        for memory, label in _labels(results).items()
    ]
    labels = [f"{distance:,}" for distance in distances]
    return line_chart(
        Chart(
            "Recall by distance",
            "right",
            "share of right answers by tokens since it was said",
            labels,
            series,
        )
    )


def _laid_out(results: Row) -> tuple[list[int], dict[tuple[str, int], Row]]:
    by_place = {(row["memory"], row["distance"]): row for row in results["rows"]}
    return sorted({distance for _, distance in by_place}), by_place


def _labels(results: Row) -> dict[str, str]:
    """The memories that were tried, in words."""
    bounded = results["bounded"]
    labels = {FULL: "full", BOUNDED: bounded, PINNED: f"{bounded}, number pinned"}
    tried = {row["memory"] for row in results["rows"]}
    return {memory: label for memory, label in labels.items() if memory in tried}


def _cell(row: Row | None) -> str:
    return "–" if row is None else f"{row['right']}/{row['trials']}"


def _recall(row: Row | None) -> float | None:
    return None if row is None else row["recall"]
