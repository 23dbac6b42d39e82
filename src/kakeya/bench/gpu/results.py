"""What `bench gpu` finds and concludes: typed rows, their gates, tables and the chart. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, TypeVar

from kakeya.bench.benchmark import Results
from kakeya.bench.gpu.plan import LARGE, MIDDLE, SMALL
from kakeya.bench.report import Gate, at_least, at_most
from kakeya.bench.stats import Samples, known, ratio
from kakeya.bench.tables import MIB, MS, Chart, Column, Series, Table, figure, listing

# Milliseconds of a bare step on an H200, by shape and sessions.
STEP_TARGETS = {
    (LARGE, 1): 4.5,
    (LARGE, 64): 7.5,
    (LARGE, 256): 15.5,
    (MIDDLE, 256): 9.0,
    (SMALL, 1): 0.8,
    (SMALL, 256): 2.4,
}
# Where the step must come near what memory allows.
FLOOR_JUDGED = ((LARGE, 1), (LARGE, 64), (LARGE, 256))
HISTORY_JUDGED = ((LARGE, 64), (SMALL, 256))
RUNTIME_JUDGED = ((SMALL, 256), (LARGE, 256))
PEER_JUDGED = ((SMALL, 1), (SMALL, 64))

FLOOR_LIMIT = 0.75
HISTORY_LIMIT = 1.01
PROMPT_LIMIT = 0.5
EXACT_LIMIT = 1.15
RUNTIME_LIMIT = 0.9
MEMORY_LIMIT = 1.01
PEER_LIMIT = 10.0

GREEDY, SEEDED = "greedy", "temperature 0.8, top-p 0.95"
OURS, GENERATE, GENERATE_BATCH = "kakeya", "generate", "generate_batch"

T = TypeVar("T")


class Part(StrEnum):
    """What can be measured by itself. The machine always is: the others are held to it."""

    MACHINE = "machine"
    STEPS = "steps"
    HISTORY = "history"
    PROMPT = "prompt"
    EXACT = "exact"
    RUNTIME = "runtime"
    KERNELS = "kernels"
    TRANSFORMERS = "transformers"
    PARITY = "parity"


@dataclass(frozen=True)
class Machine:
    """The device, what drives it, and its measured rates, which everything else is held to."""

    name: str | None = None
    memory_bytes: int | None = None
    driver: str | None = None
    cuda: str | None = None
    triton: str | None = None
    transformers: str | None = None
    copy_bytes_per_second: float | None = None
    product_flops_per_second: float | None = None

    def rate(self, name: str) -> float:
        """A measured rate. Raises RuntimeError where there is none."""
        rate: float | None = getattr(self, name)
        if rate is None:
            raise RuntimeError(
                "the machine's rates could not be measured, so there is nothing to hold this to"
            )
        return rate


@dataclass(frozen=True)
class Step:
    """Bare steps past the wrap, beside what memory allows."""

    shape: str
    rows: int
    kernels: str
    seconds: Samples
    floor_seconds: float

    @property
    def milliseconds(self) -> float | None:
        return None if self.seconds.median is None else MS * self.seconds.median

    @property
    def floor_share(self) -> float | None:
        return ratio(self.floor_seconds, self.seconds.median)

    @property
    def target_ms(self) -> float | None:
        return STEP_TARGETS.get((self.shape, self.rows))


@dataclass(frozen=True)
class History:
    """The same step at two histories."""

    shape: str
    rows: int
    near: int
    far: int
    near_seconds: Samples
    far_seconds: Samples

    @property
    def ratio(self) -> float | None:
        return ratio(self.far_seconds.median, self.near_seconds.median)


@dataclass(frozen=True)
class Prompt:
    """A prefill block of one session, beside the rate of matmuls."""

    shape: str
    rows: int
    seconds: Samples
    flops_per_second: float | None
    product_share: float | None

    @classmethod
    def of(cls, shape: str, rows: int, seconds: Samples, flops: int, rate: float) -> "Prompt":
        speed = ratio(flops, seconds.median)
        return cls(shape, rows, seconds, speed, ratio(speed, rate))

    @property
    def tokens_per_second(self) -> float | None:
        return ratio(self.rows, self.seconds.median)


@dataclass(frozen=True)
class Exact:
    """What exact numerics cost."""

    shape: str
    rows: int
    fast_seconds: Samples
    exact_seconds: Samples

    @property
    def ratio(self) -> float | None:
        return ratio(self.exact_seconds.median, self.fast_seconds.median)


@dataclass(frozen=True)
class Identity:
    """Whether a session had the same bits as alone."""

    shape: str
    how: str
    tokens: int
    identical: bool


@dataclass(frozen=True)
class RuntimeRow:
    """All sessions at once through the runtime, beside bare steps; `tokens_per_second` while all generated.

    `peak_bytes` of device memory after each repetition; empty where that cannot be told.
    """

    shape: str
    sessions: int
    sampling: str
    tokens_per_second: Samples
    whole_tokens_per_second: Samples
    bare_tokens_per_second: float | None
    prompt_tokens_per_second: float
    peak_bytes: tuple[int, ...]

    @property
    def kept(self) -> float | None:
        return ratio(self.tokens_per_second.median, self.bare_tokens_per_second)

    @property
    def memory_growth(self) -> float | None:
        return ratio(self.peak_bytes[-1], self.peak_bytes[0]) if self.peak_bytes else None


@dataclass(frozen=True)
class KernelTiming:
    """One call of an operation; `captured`: replayed as a graph."""

    seconds: Samples
    floor_share: float | None
    captured: bool

    @classmethod
    def of(cls, seconds: Samples, floor_seconds: float, *, captured: bool) -> "KernelTiming":
        return cls(seconds, ratio(floor_seconds, seconds.median), captured)


@dataclass(frozen=True)
class Kernel:
    """An operation by itself, beside what memory allows, or the matrix units for one with operations to
    count; timings by the kernels' name."""

    shape: str
    operation: str
    size: str
    bytes: int
    flops: int | None
    floor_seconds: float
    timings: dict[str, KernelTiming]


@dataclass(frozen=True)
class Peer:
    """Tokens a second of one contender: OURS, or one of transformers' ways."""

    shape: str
    sessions: int
    method: str
    tokens_per_second: Samples

    def best(self) -> float | None:
        """Our median, and the best that they reached."""
        return self.tokens_per_second.median if self.method == OURS else self.tokens_per_second.max


@dataclass(frozen=True)
class Parity:
    """Greedy tokens in float32 beside the CPU engine's."""

    model: str
    prompt_tokens: int
    tokens: int
    equal_tokens: int
    identical: bool


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes by purpose."""

    weights: int
    workspace: int
    graphs: int
    moves: int

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.graphs + self.moves


@dataclass(frozen=True)
class UsedMemory:
    """Bytes besides the slabs: before the shape, once it is open, after steps; None where nobody can tell."""

    earlier: int | None = None
    opened: int | None = None
    stepped: int | None = None


@dataclass(frozen=True)
class Memory:
    """What an open shape takes of its device."""

    shape: str
    sessions: int
    numerics: str
    planned: PlannedMemory
    pool: int
    used: UsedMemory

    def share(self) -> float | None:
        """The most that it has taken besides its slabs, over what was planned."""
        return ratio(max(known([self.used.opened, self.used.stepped]), default=None), self.planned.total)


@dataclass(frozen=True)
class Absence:
    """Something that was not measured."""

    part: Part
    work: str
    why: str


@dataclass(frozen=True, kw_only=True)
class GpuResults(Results):
    """Rows for each part that has some, the memory of every shape that was opened, and what is absent."""

    machine: Machine = Machine()
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each piece of work took."""
    steps: list[Step] = field(default_factory=list)
    history: list[History] = field(default_factory=list)
    prompt: list[Prompt] = field(default_factory=list)
    exact: list[Exact] = field(default_factory=list)
    runtime: list[RuntimeRow] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    transformers: list[Peer] = field(default_factory=list)
    parity: list[Parity] = field(default_factory=list)
    identity: list[Identity] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    absent: list[Absence] = field(default_factory=list)

    def joined(self, found: "GpuResults") -> "GpuResults":
        """With what a piece of work has found: rows go behind those that are there, facts beside."""
        rows: dict[str, Any] = {}
        for each in fields(self):
            mine, more = getattr(self, each.name), getattr(found, each.name)
            if isinstance(mine, (list, dict)):
                rows[each.name] = mine + more if isinstance(mine, list) else mine | more
        machine = found.machine if found.machine.name else self.machine
        return replace(self, machine=machine, **rows)

    def why(self, part: Part) -> str:
        """Why something of this part may be missing."""
        reasons = dict.fromkeys(each.why for each in self.absent if each.part == part)
        return "; ".join(reasons) or "this shape was not measured in this run"

    def ours_over(self, row: Peer) -> float | None:
        """Our median for the work of this row of theirs, over the best that they reached."""
        if row.method == OURS:
            return None
        ours = _find(self.transformers, shape=row.shape, sessions=row.sessions, method=OURS)
        return None if ours is None else ratio(ours.best(), row.best())


def _find(rows: Sequence[T], /, **asked: object) -> T | None:
    """The first row that is as asked for."""
    matching = (row for row in rows if all(getattr(row, name) == value for name, value in asked.items()))
    return next(matching, None)


def counted(sessions: int) -> str:
    return f"{sessions} session{'' if sessions == 1 else 's'}"


@dataclass(frozen=True)
class Limit:
    """A gate on one figure of one row, which is found by what it is of."""

    part: Part
    row: Mapping[str, object]
    name: str
    of: str
    judge: Callable[..., Gate]
    limit: float

    def gate(self, results: GpuResults) -> Gate:
        row = _find(getattr(results, self.part), **self.row)
        value = None if row is None else getattr(row, self.of)
        return self.judge(self.name, value, self.limit, absent=results.why(self.part))


def _limits() -> Iterator[Limit]:
    """All that one row decides."""
    for (shape, rows), target in STEP_TARGETS.items():
        of, name = {"shape": shape, "rows": rows}, f"{shape}, {counted(rows)}: step, ms"
        yield Limit(Part.STEPS, of, name, "milliseconds", at_most, target)
    for shape, rows in FLOOR_JUDGED:
        of, name = {"shape": shape, "rows": rows}, f"{shape}, {counted(rows)}: floor over step"
        yield Limit(Part.STEPS, of, name, "floor_share", at_least, FLOOR_LIMIT)
    for shape, rows in HISTORY_JUDGED:
        of, name = {"shape": shape, "rows": rows}, f"{shape}, {counted(rows)}: step at 1,000,000 over 2,000"
        yield Limit(Part.HISTORY, of, name, "ratio", at_most, HISTORY_LIMIT)
    name = f"{LARGE}: prompt, share of the product rate"
    yield Limit(Part.PROMPT, {"shape": LARGE}, name, "product_share", at_least, PROMPT_LIMIT)
    name = f"{LARGE}, 64 sessions: exact step over fast"
    yield Limit(Part.EXACT, {"shape": LARGE, "rows": 64}, name, "ratio", at_most, EXACT_LIMIT)
    for shape, count in RUNTIME_JUDGED:
        of, name = {"shape": shape, "sessions": count, "sampling": GREEDY}, f"{shape}, {counted(count)}"
        yield Limit(Part.RUNTIME, of, f"{name}: runtime over bare steps", "kept", at_least, RUNTIME_LIMIT)
        growth = f"{name}: device memory, last over first"
        yield Limit(Part.RUNTIME, of, growth, "memory_growth", at_most, MEMORY_LIMIT)


def gpu_gates(results: GpuResults) -> list[Gate]:
    """Every gate there is; those of what was not measured say why they are not judged."""
    largest = max(known(row.share() for row in results.memory), default=None)
    absent = "no shape was opened on a device that tells what it has left"
    return [
        *(limit.gate(results) for limit in _limits()),
        _all_identical(
            "exact: same bits alone, among others, cut", results.identity, results.why(Part.EXACT)
        ),
        *_peer_gates(results),
        _all_identical("greedy tokens equal the CPU engine's", results.parity, results.why(Part.PARITY)),
        at_most("memory_within_plan", largest, 1.0, absent=absent),
    ]


def _peer_gates(results: GpuResults) -> Iterator[Gate]:
    """Against the best of their ways that was measured."""
    for shape, count in PEER_JUDGED:
        same_work = [row for row in results.transformers if (row.shape, row.sessions) == (shape, count)]
        slowest = min(known(map(results.ours_over, same_work)), default=None)
        name = f"{shape}, {counted(count)}: speed over transformers"
        yield at_least(name, slowest, PEER_LIMIT, absent=results.why(Part.TRANSFORMERS))


def _all_identical(name: str, rows: Sequence[Identity | Parity], absent: str) -> Gate:
    share = sum(row.identical for row in rows) / len(rows) if rows else None
    return at_least(name, share, 1.0, absent=absent)


_SHARE, _TERA, _MICRO = ".3f", 1e-12, 1e6
_SHAPE, _ROWS = Column("shape", "shape"), Column("sessions", "rows")
_SESSIONS, _TOKENS = Column("sessions", "sessions"), Column("tokens", "tokens")


def show(results: GpuResults) -> list[Table | Chart]:
    """The machine, then every part that was measured, then what was not."""
    return [each for each in _shown(results) if isinstance(each, Chart) or each.rows]


def _shown(results: GpuResults) -> Iterator[Table | Chart]:
    machine = results.machine
    rates = [
        ("device", machine.name),
        ("copy, read and write, TB/s", figure(machine.copy_bytes_per_second, _TERA, ".2f")),
        ("bf16 product, TFLOP/s", figure(machine.product_flops_per_second, _TERA)),
    ]
    yield listing("Measured rates", ("what", "value"), rates if machine.name else [], labels=1)
    yield Table("Bare steps past the wrap", _STEP_COLUMNS, results.steps, labels=2)
    if results.steps:
        yield _chart(results.steps)
    yield Table("The same step at two histories", _HISTORY_COLUMNS, results.history)
    yield Table("A prompt block of one session", _PROMPT_COLUMNS, results.prompt)
    yield Table("What exact numerics cost", _EXACT_COLUMNS, results.exact)
    yield Table("Exact numerics: tokens and log-probabilities", _IDENTITY_COLUMNS, results.identity, labels=2)
    yield Table("Through the runtime, tokens/s", _RUNTIME_COLUMNS, results.runtime, labels=2)
    yield Table("Kernels by themselves", _KERNEL_COLUMNS, results.kernels, labels=3)
    ours_over = Column("ours / theirs", results.ours_over, form=".1f")
    yield Table("Beside transformers", [*_PEER_COLUMNS, ours_over], results.transformers, labels=2)
    yield Table("Greedy tokens beside the CPU engine's, float32", _PARITY_COLUMNS, results.parity)
    yield Table("Device memory, planned and used, MiB", _MEMORY_COLUMNS, results.memory, labels=2)
    reasons = [(each.part, each.work, each.why) for each in results.absent]
    yield listing("Not measured", ("part", "work", "why"), reasons)


def _peaks(row: RuntimeRow) -> str | None:
    """Device memory after the first and after the last repetition."""
    ends = row.peak_bytes[:: len(row.peak_bytes) - 1 or 1]
    return " → ".join(figure(peak, 1e-9, ".2f") for peak in ends) or None


def _kernel_columns(kernels: str) -> list[Column]:
    def microseconds(row: Kernel) -> str | None:
        timing = row.timings.get(kernels)
        if timing is None:
            return None
        return figure(timing.seconds.median, _MICRO, ",.1f") + ("" if timing.captured else " (no graph)")

    def share(row: Kernel) -> float | None:
        return row.timings[kernels].floor_share if kernels in row.timings else None

    return [Column(f"{kernels}, µs", microseconds), Column(f"floor / {kernels}", share, form=_SHARE)]


_STEP_COLUMNS = [
    _SHAPE,
    Column("kernels", "kernels"),
    _ROWS,
    Column("step, ms", "milliseconds", form=".3f"),
    Column("floor, ms", "floor_seconds", MS, ".3f"),
    Column("floor / step", "floor_share", form=_SHARE),
    Column("target, ms", "target_ms", form="g"),
]
_HISTORY_COLUMNS = [
    _SHAPE,
    _ROWS,
    Column("position", "near"),
    Column("step, ms", "near_seconds.median", MS, ".3f"),
    Column("position", "far"),
    Column("step, ms", "far_seconds.median", MS, ".3f"),
    Column("far / near", "ratio", form=".4f"),
]
_PROMPT_COLUMNS = [
    _SHAPE,
    Column("rows", "rows"),
    Column("step, ms", "seconds.median", MS, ".3f"),
    Column("tokens/s", "tokens_per_second"),
    Column("TFLOP/s", "flops_per_second", _TERA),
    Column("of the product rate", "product_share", form=_SHARE),
]
_EXACT_COLUMNS = [
    _SHAPE,
    _ROWS,
    Column("fast, ms", "fast_seconds.median", MS, ".3f"),
    Column("exact, ms", "exact_seconds.median", MS, ".3f"),
    Column("exact / fast", "ratio", form=_SHARE),
]
_IDENTITY_COLUMNS = [
    _SHAPE,
    Column("against the session alone", "how"),
    _TOKENS,
    Column("same bits", "identical"),
]
_RUNTIME_COLUMNS = [
    _SHAPE,
    Column("sampling", "sampling"),
    _SESSIONS,
    Column("tokens/s", "tokens_per_second.median"),
    Column("bare steps", "bare_tokens_per_second"),
    Column("kept", "kept", form=_SHARE),
    Column("whole run", "whole_tokens_per_second.median"),
    Column("prompts", "prompt_tokens_per_second"),
    Column("peak GB", _peaks),
]
_KERNEL_COLUMNS = [
    _SHAPE,
    Column("operation", "operation"),
    Column("size", "size"),
    Column("MB", "bytes", 1e-6, ",.2f"),
    Column("GFLOP", "flops", 1e-9, ",.2f"),
    Column("floor, µs", "floor_seconds", _MICRO, ",.1f"),
    *_kernel_columns("triton"),
    *_kernel_columns("torch"),
]
_PEER_COLUMNS = [_SHAPE, Column("by", "method"), _SESSIONS, Column("tokens/s", Peer.best)]
_PARITY_COLUMNS = [
    Column("model", "model"),
    Column("prompt", "prompt_tokens"),
    _TOKENS,
    Column("equal from the start", "equal_tokens"),
    Column("all equal", "identical"),
]
_MEMORY_COLUMNS = [
    _SHAPE,
    Column("numerics", "numerics"),
    _SESSIONS,
    *(Column(each, f"planned.{each}", MIB) for each in ("weights", "workspace", "graphs", "moves")),
    Column("planned", "planned.total", MIB),
    Column("open", "used.opened", MIB),
    Column("after steps", "used.stepped", MIB),
    Column("used / planned", Memory.share, form=_SHARE),
    Column("earlier", "used.earlier", MIB),
    Column("slabs", "pool", MIB),
]


def _chart(steps: Sequence[Step]) -> Chart:
    # Whole names would run into each other; the size at their end tells them apart.
    labels = [f"{step.shape.rpartition('-')[2]} × {step.rows}" for step in steps]
    series = [
        Series("floor", [MS * step.floor_seconds for step in steps]),
        Series("step", [step.milliseconds for step in steps]),
    ]
    return Chart("Step and memory floor", "ms", "size × sessions", labels, series, bars=True, picture=True)
