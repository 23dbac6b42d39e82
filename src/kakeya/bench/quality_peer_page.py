"""The table of the part `peer` of `bench quality`. Pure."""

from collections.abc import Mapping
from typing import Any

from kakeya.bench.page import Section, Table

Row = Mapping[str, Any]


def peer_sections(results: Row) -> list[Section]:
    """Every file with both perplexities."""
    return [Section(peer_table(results))]


def peer_table(results: Row) -> Table:
    columns = ("file", "held as", "scored tokens", "ours", "llama.cpp", "ours/llama.cpp", "standard error")
    rows = [
        (
            row["file"],
            row["held_as"],
            f"{row['scored']:,}",
            _number(row["ours"]),
            _number(row["llama_cpp"]),
            _number(row["ours_over_llama_cpp"], "{:.5f}"),
            _number(row["standard_error"], "{:.5f}"),
        )
        for row in results["files"]
    ]
    return Table(f"Perplexity beside {results['library']}", columns, rows, labels=2)


def _number(value: float | None, pattern: str = "{:,.4f}") -> str:
    return "–" if value is None else pattern.format(value)
