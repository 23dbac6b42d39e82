"""The tables and the chart of `bench gpu`, for the terminal and for the page. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kakeya.bench.chart import Chart, Series, bar_chart
from kakeya.bench.gpu_results import OURS, memory_share, ours_over
from kakeya.bench.page import Section, Table, picture, render_page
from kakeya.bench.report import Report

TITLE = "GPU benchmark"

Row = Mapping[str, Any]


def gpu_page(report: Report) -> str:
    """The report as one HTML page."""
    return render_page(TITLE, report, gpu_sections(report.results))


def gpu_picture(results: Row) -> str:
    """Floor and step side by side, as an SVG file. Raises IndexError where no step was measured."""
    results["steps"][0]
    return picture(_chart(results["steps"]))


def gpu_sections(results: Row) -> list[Section]:
    """The machine, then every part that was measured, then what was not."""
    sections = [Section(machine_table(results))] if results["machine"] else []
    for name, table in _TABLES.items():
        if results.get(name):
            charts = [_chart(results[name])] if name == "steps" else []
            sections.append(Section(table(results[name]), charts))
    if results["absent"]:
        rows = [(each["part"], each["work"], each["why"]) for each in results["absent"]]
        sections.append(Section(Table("Not measured", ("part", "work", "why"), rows, labels=3)))
    return sections


def machine_table(results: Row) -> Table:
    """What all else is held to."""
    machine = results["machine"]
    rows = [
        ("device", str(machine["name"])),
        ("copy, read and write, TB/s", _number(machine["copy_bytes_per_second"], 1e-12, "{:.2f}")),
        ("bf16 product, TFLOP/s", _number(machine["product_flops_per_second"], 1e-12, "{:,.0f}")),
    ]
    return Table("Measured rates", ("what", "value"), rows)


def steps_table(rows: Sequence[Row]) -> Table:
    columns = ("shape", "kernels", "sessions", "step, ms", "floor, ms", "floor / step", "target, ms")
    cells = [
        (
            row["shape"],
            row["kernels"],
            str(row["rows"]),
            _ms(row["seconds"]["median"]),
            _ms(row["floor_seconds"]),
            _share(row["floor_share"]),
            _number(row["target_ms"], 1, "{:g}"),
        )
        for row in rows
    ]
    return Table("Bare steps past the wrap", columns, cells, labels=2)


def history_table(rows: Sequence[Row]) -> Table:
    columns = ("shape", "sessions", "position", "step, ms", "position", "step, ms", "far / near")
    cells = [
        (
            row["shape"],
            str(row["rows"]),
            f"{row['near']:,}",
            _ms(row["near_seconds"]["median"]),
            f"{row['far']:,}",
            _ms(row["far_seconds"]["median"]),
            _number(row["ratio"], 1, "{:.4f}"),
        )
        for row in rows
    ]
    return Table("The same step at two histories", columns, cells)


def prompt_table(rows: Sequence[Row]) -> Table:
    columns = ("shape", "rows", "step, ms", "tokens/s", "TFLOP/s", "of the product rate")
    cells = [
        (
            row["shape"],
            f"{row['rows']:,}",
            _ms(row["seconds"]["median"]),
            _number(row["tokens_per_second"], 1, "{:,.0f}"),
            _number(row["flops_per_second"], 1e-12, "{:,.0f}"),
            _share(row["product_share"]),
        )
        for row in rows
    ]
    return Table("A prompt block of one session", columns, cells)


def exact_table(rows: Sequence[Row]) -> Table:
    columns = ("shape", "sessions", "fast, ms", "exact, ms", "exact / fast")
    cells = [
        (
            row["shape"],
            str(row["rows"]),
            _ms(row["fast_seconds"]["median"]),
            _ms(row["exact_seconds"]["median"]),
            _number(row["ratio"], 1, "{:.3f}"),
        )
        for row in rows
    ]
    return Table("What exact numerics cost", columns, cells)


def identity_table(rows: Sequence[Row]) -> Table:
    cells = [(row["shape"], row["how"], str(row["tokens"]), _yes(row["identical"])) for row in rows]
    columns = ("shape", "against the session alone", "tokens", "same bits")
    return Table("Exact numerics: tokens and log-probabilities", columns, cells, labels=2)


def runtime_table(rows: Sequence[Row]) -> Table:
    columns = (
        "shape",
        "sampling",
        "sessions",
        "tokens/s",
        "bare steps",
        "kept",
        "whole run",
        "prompts",
        "peak GB",
    )
    cells = [
        (
            row["shape"],
            row["sampling"],
            str(row["sessions"]),
            _number(row["tokens_per_second"]["median"], 1, "{:,.0f}"),
            _number(row["bare_tokens_per_second"], 1, "{:,.0f}"),
            _share(row["kept"]),
            _number(row["whole_tokens_per_second"]["median"], 1, "{:,.0f}"),
            _number(row["prompt_tokens_per_second"], 1, "{:,.0f}"),
            " → ".join(f"{peak / 1e9:.2f}" for peak in row["peak_bytes"][:: len(row["peak_bytes"]) - 1 or 1])
            or "–",
        )
        for row in rows
    ]
    return Table("Through the runtime, tokens/s", columns, cells, labels=2)


def kernel_table(rows: Sequence[Row]) -> Table:
    """What memory allows, or for those with operations to count the matrix units, beside both kernels."""
    columns = (
        "shape",
        "operation",
        "size",
        "MB",
        "GFLOP",
        "floor, µs",
        "triton, µs",
        "floor / triton",
        "torch, µs",
        "floor / torch",
    )
    cells = [
        (
            row["shape"],
            row["operation"],
            row["size"],
            _number(row["bytes"], 1e-6, "{:,.2f}"),
            _number(row["flops"], 1e-9, "{:,.2f}"),
            _number(row["floor_seconds"], 1e6, "{:,.1f}"),
            *_kernel_cells(row["timings"].get("triton")),
            *_kernel_cells(row["timings"].get("torch")),
        )
        for row in rows
    ]
    return Table("Kernels by themselves", columns, cells, labels=3)


def _kernel_cells(timing: Row | None) -> tuple[str, str]:
    if timing is None:
        return "–", "–"
    microseconds = _number(timing["seconds"]["median"], 1e6, "{:,.1f}")
    return microseconds if timing["captured"] else f"{microseconds} (no graph)", _share(timing["floor_share"])


def peer_table(rows: Sequence[Row]) -> Table:
    """Our median, and the best that they reached."""
    cells = [
        (
            row["shape"],
            row["method"],
            str(row["sessions"]),
            _number(row["tokens_per_second"]["median" if row["method"] == OURS else "max"], 1, "{:,.0f}"),
            _number(ours_over(row, rows), 1, "{:.1f}"),
        )
        for row in rows
    ]
    columns = ("shape", "by", "sessions", "tokens/s", "ours / theirs")
    return Table("Beside transformers", columns, cells, labels=2)


def parity_table(rows: Sequence[Row]) -> Table:
    cells = [
        (
            row["model"],
            f"{row['prompt_tokens']:,}",
            str(row["tokens"]),
            str(row["equal_tokens"]),
            _yes(row["identical"]),
        )
        for row in rows
    ]
    columns = ("model", "prompt", "tokens", "equal from the start", "all equal")
    return Table("Greedy tokens beside the CPU engine's, float32", columns, cells)


def memory_table(rows: Sequence[Row]) -> Table:
    columns = (
        "shape",
        "numerics",
        "sessions",
        "weights",
        "workspace",
        "graphs",
        "moves",
        "planned",
        "open",
        "after steps",
        "used / planned",
        "earlier",
        "slabs",
    )
    cells = [
        (
            row["shape"],
            row["numerics"],
            str(row["sessions"]),
            *(
                _mib(row["planned"][purpose])
                for purpose in ("weights", "workspace", "graphs", "moves", "total")
            ),
            *(_mib(row["used"][when]) for when in ("opened", "stepped")),
            _share(memory_share(row)),
            _mib(row["used"]["earlier"]),
            _mib(row["pool"]),
        )
        for row in rows
    ]
    return Table("Device memory, planned and used, MiB", columns, cells, labels=2)


_TABLES: dict[str, Callable[[Sequence[Row]], Table]] = {
    "steps": steps_table,
    "history": history_table,
    "prompt": prompt_table,
    "exact": exact_table,
    "identity": identity_table,
    "runtime": runtime_table,
    "kernels": kernel_table,
    "transformers": peer_table,
    "parity": parity_table,
    "memory": memory_table,
}


def _chart(rows: Sequence[Row]) -> str:
    series = [
        Series("floor", [1000 * row["floor_seconds"] for row in rows]),
        Series("step", [_in_ms(row["seconds"]["median"]) for row in rows]),
    ]
    # Whole names would run into each other; the size at their end tells them apart.
    labels = [f"{row['shape'].rpartition('-')[2]} × {row['rows']}" for row in rows]
    return bar_chart(Chart("Step and memory floor", "ms", "size × sessions", labels, series))


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _ms(seconds: float | None) -> str:
    return _number(seconds, 1000, "{:.3f}")


def _mib(size: float | None) -> str:
    return _number(size, 2**-20, "{:,.0f}")


def _share(value: float | None) -> str:
    return _number(value, 1, "{:.3f}")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _number(value: float | None, factor: float, pattern: str) -> str:
    return "–" if value is None else pattern.format(value * factor)
