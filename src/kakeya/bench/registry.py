"""All benchmarks, in the order in which help lists them, and how their reports are shown."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from kakeya.bench.benchmark import Benchmark
from kakeya.bench.page import Shown, flat
from kakeya.bench.report import Report, from_json
from kakeya.bench.tables import Table, listing

_PLACES = {
    "kakeya.bench.engine": "Engine",
    "kakeya.bench.gpu.benchmark": "GpuBench",
    "kakeya.bench.quality.benchmark": "QualityBench",
    "kakeya.bench.conversation": "Conversation",
    "kakeya.bench.capacity": "Capacity",
    "kakeya.bench.overhead": "Overhead",
}


def _installed() -> Iterator[type[Benchmark[Any]]]:
    """Those whose packages are there: a machine with a GPU need not have what a server needs."""
    for module, name in _PLACES.items():
        try:
            yield getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("kakeya"):
                raise


BENCHMARKS = tuple(_installed())


def shown(report: Report) -> Shown:
    """A report's tables and charts; plain tables of what is in it where no benchmark knows such results."""
    kinds = {benchmark.kind: benchmark for benchmark in BENCHMARKS}
    if report.kind in kinds:
        benchmark = kinds[report.kind]
        try:
            return benchmark.show(from_json(benchmark.results, report.results))
        except (LookupError, TypeError, ValueError, AttributeError):
            pass  # of an earlier version
    return plain_tables(report.results)


def plain_tables(results: Mapping[str, Any], prefix: str = "") -> list[Table]:
    """Lists of objects as tables, whatever is in them, and single figures in a table of their own."""
    figures: dict[str, Any] = {}
    tables: list[Table] = []
    for name, value in results.items():
        if isinstance(value, dict):
            tables += plain_tables(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            tables += _rows_table(f"{prefix}{name}", value)
        else:
            figures[name] = value
    own = [listing(prefix.rstrip(".") or "Results", ("what", "value"), flat(figures))] if figures else []
    return [*own, *tables]


def _rows_table(title: str, rows: list[dict[str, Any]]) -> list[Table]:
    """The rows' own figures, and below them the lists that each of them has."""
    cells = [dict(flat({name: value for name, value in row.items() if not _is_rows(value)})) for row in rows]
    headings = list(dict.fromkeys(name for row in cells for name in row))
    inner = [
        (f"{title} {number}.{name}", value)
        for number, row in enumerate(rows, start=1)
        for name, value in row.items()
        if _is_rows(value)
    ]
    own = listing(title, headings, [[row.get(name, "–") for name in headings] for row in cells])
    return [own, *(table for name, value in inner for table in _rows_table(name, value))]


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)
