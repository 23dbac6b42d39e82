"""What `bench gpu` shows of its results: tables and the chart. Pure."""

from kakeya.bench.gpu.results import GpuResults, Kernel, Memory, Peer, RuntimeRow
from kakeya.bench.tables import MIB, MS, Chart, Column, Of, Table, figure, listing, over

_TERA, _MICRO = 1e-12, 1e6


def _kernel_columns(kernels: str) -> list[Column]:
    def microseconds(row: Kernel) -> str | None:
        timing = row.timings.get(kernels)
        if timing is None:
            return None
        return figure(timing.seconds.median, _MICRO, ",.1f") + ("" if timing.captured else " (no graph)")

    def share(row: Kernel) -> float | None:
        return row.timings[kernels].floor_share if kernels in row.timings else None

    return [Column(f"{kernels}, µs", microseconds), Column(f"floor / {kernels}", share, form=".3f")]


def _peaks(row: RuntimeRow) -> str | None:
    """Device memory after the first and after the last repetition."""
    ends = row.peak_bytes[:: len(row.peak_bytes) - 1 or 1]
    return " → ".join(figure(peak, 1e-9, ".2f") for peak in ends) or None


def _plain(*names: str) -> list[Column]:
    """Attributes under their own names."""
    return [Column(name, name) for name in names]


def _of(name: str, key: str) -> Of:
    """What a dictionary of the row has under a key."""
    return lambda row: getattr(row, name)[key]


_ROWS = Column("sessions", "rows")
_STEPS = [
    *_plain("shape", "kernels"),
    _ROWS,
    Column("step, ms", "milliseconds", form=".3f"),
    Column("floor, ms", "floor_seconds", MS, ".3f"),
    Column("floor / step", "floor_share", form=".3f"),
    Column("target, ms", "target_ms", form="g"),
]
_HISTORY = [
    *_plain("shape"),
    _ROWS,
    Column("position", "near"),
    Column("step, ms", "near_seconds.median", MS, ".3f"),
    Column("position", "far"),
    Column("step, ms", "far_seconds.median", MS, ".3f"),
    Column("far / near", "ratio", form=".4f"),
]
_PROMPT = [
    *_plain("shape", "rows"),
    Column("step, ms", "seconds.median", MS, ".3f"),
    Column("tokens/s", "tokens_per_second"),
    Column("TFLOP/s", "flops_per_second", _TERA),
    Column("of the matmul rate", "product_share", form=".3f"),
]
_EXACT = [
    *_plain("shape"),
    _ROWS,
    Column("fast, ms", "fast_seconds.median", MS, ".3f"),
    Column("exact, ms", "exact_seconds.median", MS, ".3f"),
    Column("exact / fast", "ratio", form=".3f"),
]
_IDENTITY = [
    *_plain("shape"),
    Column("against the session alone", "how"),
    *_plain("tokens"),
    Column("same bits", "identical"),
]
_RUNTIME = [
    *_plain("shape", "sampling", "sessions"),
    Column("tokens/s", "tokens_per_second.median"),
    Column("bare steps", "bare_tokens_per_second"),
    Column("kept", "kept", form=".3f"),
    Column("whole run", "whole_tokens_per_second.median"),
    Column("prompts", "prompt_tokens_per_second"),
    Column("peak GB", _peaks),
]
_KERNELS = [
    *_plain("shape", "operation", "size"),
    Column("MB", "bytes", 1e-6, ",.2f"),
    Column("GFLOP", "flops", 1e-9, ",.2f"),
    Column("floor, µs", "floor_seconds", _MICRO, ",.1f"),
    *_kernel_columns("triton"),
    *_kernel_columns("torch"),
]
_PEERS = [*_plain("shape"), Column("by", "method"), *_plain("sessions"), Column("tokens/s", Peer.best)]
_PARITY = [
    *_plain("model"),
    Column("prompt", "prompt_tokens"),
    *_plain("tokens"),
    Column("equal from the start", "equal_tokens"),
    Column("all equal", "identical"),
]
_MEMORY = [
    *_plain("shape", "numerics", "sessions"),
    *(Column(each, _of("planned", each), MIB) for each in ("weights", "workspace", "graphs", "moves")),
    Column("planned", _of("planned", "total"), MIB),
    Column("open", _of("used", "opened"), MIB),
    Column("after steps", _of("used", "stepped"), MIB),
    Column("used / planned", Memory.share, form=".3f"),
    Column("earlier", _of("used", "earlier"), MIB),
    Column("slabs", "pool", MIB),
]


def show(results: GpuResults) -> list[Table | Chart]:
    """The machine, then every part that was measured, then what was not."""
    machine, steps = results.machine, results.steps
    rates = [
        ("device", machine.name),
        ("copy, read and write, TB/s", figure(machine.copy_bytes_per_second, _TERA, ".2f")),
        ("bf16 matmul, TFLOP/s", figure(machine.product_flops_per_second, _TERA)),
    ]
    peers = [*_PEERS, Column("ours / theirs", results.ours_over, form=".1f")]
    absent = [(each.part, each.work, each.why) for each in results.absent]
    # Whole names would run into each other; the size at their end tells them apart.
    labels = [f"{step.shape.rpartition('-')[2]} × {step.rows}" for step in steps]
    times = {"floor": "floor_seconds", "step": "seconds.median"}
    chart = over(
        "Step and memory floor", "ms", "size × sessions", labels, steps, times, MS, bars=True, picture=True
    )
    tables = [
        listing("Measured rates", ("what", "value"), rates if machine.name else [], labels=1),
        Table("Bare steps past the wrap", _STEPS, steps, labels=2),
        Table("The same step at two histories", _HISTORY, results.history),
        Table("A prompt block of one session", _PROMPT, results.prompt),
        Table("What exact numerics cost", _EXACT, results.exact),
        Table("Exact numerics: tokens and log-probabilities", _IDENTITY, results.identity, labels=2),
        Table("Through the runtime, tokens/s", _RUNTIME, results.runtime, labels=2),
        Table("Kernels by themselves", _KERNELS, results.kernels, labels=3),
        Table("Beside transformers", peers, results.transformers, labels=2),
        Table("Greedy tokens beside the CPU engine's, float32", _PARITY, results.parity),
        Table("Device memory, planned and used, MiB", _MEMORY, results.memory, labels=2),
        listing("Not measured", ("part", "work", "why"), absent),
    ]
    shown: list[Table | Chart] = [each for each in tables if each.rows]
    return [*shown[:2], chart, *shown[2:]] if steps else shown
