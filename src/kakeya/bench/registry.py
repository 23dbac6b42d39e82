"""All benchmarks, in the order in which help lists them, and how their reports are shown."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from kakeya.bench.benchmark import Benchmark
from kakeya.bench.page import Shown, flat
from kakeya.bench.report import Report, from_json
from kakeya.bench.tables import Table, listing

_PLACES = {
    "engine": ("kakeya.bench.engine", "Engine"),
    "gpu": ("kakeya.bench.gpu.benchmark", "GpuBench"),
    "quality": ("kakeya.bench.quality.benchmark", "QualityBench"),
    "recall": ("kakeya.bench.recall.benchmark", "RecallBench"),
    "conversation": ("kakeya.bench.conversation", "Conversation"),
    "capacity": ("kakeya.bench.capacity", "Capacity"),
    "agents": ("kakeya.bench.agents", "Agents"),
    "load": ("kakeya.bench.load", "Load"),
    "speculation": ("kakeya.bench.speculation", "Speculation"),
    "overhead": ("kakeya.bench.overhead", "Overhead"),
    "hibernate": ("kakeya.bench.hibernate", "Hibernate"),
    "crash": ("kakeya.bench.crash", "Crash"),
    "cluster": ("kakeya.bench.cluster.benchmark", "ClusterBench"),
    "cluster-simulate": ("kakeya.bench.cluster_simulation", "ClusterSimulation"),
    "fuzz": ("kakeya.bench.fuzz", "Fuzz"),
}
KINDS = tuple(_PLACES)


def benchmark_of(kind: str) -> type[Benchmark[Any]]:
    """The benchmark with this name. Imports what it needs and nothing of the others."""
    module, name = _PLACES[kind]
    found: type[Benchmark[Any]] = getattr(import_module(module), name)
    return found


def usable_kinds() -> list[str]:
    """Those whose packages are there: a machine with a GPU need not have what a server needs."""
    return [kind for kind in KINDS if _is_usable(kind)]


def _is_usable(kind: str) -> bool:
    try:
        benchmark_of(kind)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kakeya"):
            raise
        return False
    except RuntimeError as error:  # how generated stubs refuse an older grpcio or protobuf
        if "generated code" not in str(error):
            raise
        return False
    return True


def shown(report: Report) -> Shown:
    """A report's tables and charts; plain tables of what is in it where no benchmark knows such results."""
    if report.kind in KINDS:
        benchmark = benchmark_of(report.kind)
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
        elif _is_rows(value):
            tables.append(_rows_table(f"{prefix}{name}", value))
            for number, row in enumerate(value, start=1):
                inner = {each: rows for each, rows in row.items() if _is_rows(rows)}
                tables += plain_tables(inner, f"{prefix}{name} {number}.")
        else:
            figures[name] = value
    own = [listing(prefix.rstrip(".") or "Results", ("what", "value"), flat(figures))] if figures else []
    return [*own, *tables]


def _rows_table(title: str, rows: list[dict[str, Any]]) -> Table:
    cells = [dict(flat({name: value for name, value in row.items() if not _is_rows(value)})) for row in rows]
    headings = list(dict.fromkeys(name for row in cells for name in row))
    return listing(title, headings, [[row.get(name, "–") for name in headings] for row in cells])


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)
