"""What `bench gpu` finds and concludes: typed rows and their gates. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kakeya.bench.benchmark import Results
from kakeya.bench.gpu.plan import LARGE, MIDDLE, SMALL
from kakeya.bench.report import Gate, at_least, at_most
from kakeya.bench.stats import Samples, known, ratio
from kakeya.bench.tables import MS

# Milliseconds of a bare step on an H200, by shape and sessions.
STEP_TARGETS = {
    (LARGE, 1): 4.5,
    (LARGE, 64): 7.5,
    (LARGE, 256): 15.5,
    (MIDDLE, 256): 9.0,
    (SMALL, 1): 0.8,
    (SMALL, 256): 2.4,
}
PEER_LIMIT = 10.0
GREEDY, SEEDED = "greedy", "temperature 0.8, top-p 0.95"
OURS, GENERATE, GENERATE_BATCH = "kakeya", "generate", "generate_batch"


class Part(StrEnum):
    """What can be measured by itself. The machine always is: the other parts are compared with it."""

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
    """The device, its software, and its measured rates: copies, and bf16 matmuls."""

    name: str | None = None
    memory_bytes: int | None = None
    driver: str | None = None
    cuda: str | None = None
    triton: str | None = None
    transformers: str | None = None
    copy_bytes_per_second: float | None = None
    product_flops_per_second: float | None = None

    def rate(self, name: str) -> float:
        rate: float | None = getattr(self, name)
        if rate is None:
            raise RuntimeError(
                "the machine's rates could not be measured, so there is nothing to compare with"
            )
        return rate


@dataclass(frozen=True)
class Step:
    """Bare steps past the wrap, and the floor: the time to read what a step must read."""

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
    """The same step at two lengths of history."""

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
    """A prefill block of one session, and its share of the matmul rate."""

    shape: str
    rows: int
    seconds: Samples
    flops_per_second: float | None
    product_share: float | None

    @property
    def tokens_per_second(self) -> float | None:
        return ratio(self.rows, self.seconds.median)


@dataclass(frozen=True)
class Exact:
    """The same step in both numerics."""

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
    """All sessions at once through the runtime, beside bare steps. `tokens_per_second` counts while all
    generate, `peak_bytes` is the device's peak memory after each repetition, if it tells."""

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
    """One call of an operation; `captured`: replayed as a CUDA graph."""

    seconds: Samples
    floor_share: float | None
    captured: bool


@dataclass(frozen=True)
class Kernel:
    """An operation by itself. The floor is at the copy rate, or at the matmul rate for one with `flops`."""

    shape: str
    operation: str
    size: str
    bytes: int
    flops: int | None
    floor_seconds: float
    timings: dict[str, KernelTiming]


@dataclass(frozen=True)
class Peer:
    """Tokens a second by one method: OURS, or one of transformers'."""

    shape: str
    sessions: int
    method: str
    tokens_per_second: Samples

    def best(self) -> float | None:
        """Our median, or the best that they reached."""
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
class Memory:
    """What an open model takes of its device without its slabs: `planned` by purpose; `used` before it was
    opened (`earlier`), once it was `opened`, and at most after steps (`stepped`), if the device tells."""

    shape: str
    sessions: int
    numerics: str
    planned: dict[str, int]
    pool: int
    used: dict[str, int | None]

    def share(self) -> float | None:
        """The most that it used, over what was planned."""
        most = max(known([self.used["opened"], self.used["stepped"]]), default=None)
        return ratio(most, self.planned["total"])


@dataclass(frozen=True)
class Absence:
    """Something that was not measured."""

    part: Part
    work: str
    why: str


Row = Step | History | Prompt | Exact | Identity | RuntimeRow | Kernel | Peer | Parity | Absence


@dataclass(frozen=True, kw_only=True)
class GpuResults(Results):
    """The rows of each part, the memory of every model that was opened, and what is absent."""

    machine: Machine = Machine()
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each job took."""
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

    def add(self, part: Part, rows: Sequence[Row]) -> None:
        """Put the rows that a job of this part found where they belong."""
        others: dict[type, list[Any]] = {Identity: self.identity, Absence: self.absent}
        for row in rows:
            others.get(type(row), getattr(self, part)).append(row)

    def why(self, part: Part) -> str:
        """Why something of this part may be missing."""
        reasons = dict.fromkeys(each.why for each in self.absent if each.part == part)
        return "; ".join(reasons) or "this shape was not measured in this run"

    def ours_over(self, row: Peer) -> float | None:
        """Our median over the best that they reached, for the work of their row."""
        ours = (each for each in self.transformers if each.method == OURS != row.method)
        same = (each.best() for each in ours if (each.shape, each.sessions) == (row.shape, row.sessions))
        return ratio(next(same, None), row.best())


def counted(sessions: int) -> str:
    return f"{sessions} session{'' if sessions == 1 else 's'}"


def gpu_gates(results: GpuResults) -> list[Gate]:
    """Every gate. The gates of what was not measured say why they are not judged."""
    largest = max(known(row.share() for row in results.memory), default=None)
    absent = "no shape was opened on a device that tells what it has left"
    return [
        *_row_gates(results),
        _all_identical(
            "exact: same bits alone, among others, cut", results.identity, results.why(Part.EXACT)
        ),
        *_peer_gates(results),
        _all_identical("greedy tokens equal the CPU engine's", results.parity, results.why(Part.PARITY)),
        at_most("memory_within_plan", largest, 1.0, absent=absent),
    ]


# Part, shape, sessions (0 for any), the figure of the row, what the gate is called, the limit.
_LIMITS: list[tuple[Part, str, int, str, str, Callable[..., Gate], float]] = [
    *((Part.STEPS, *of, "milliseconds", "step, ms", at_most, ms) for of, ms in STEP_TARGETS.items()),
    *((Part.STEPS, LARGE, n, "floor_share", "floor over step", at_least, 0.75) for n in (1, 64, 256)),
    (Part.HISTORY, LARGE, 64, "ratio", "step at 1,000,000 over 2,000", at_most, 1.01),
    (Part.HISTORY, SMALL, 256, "ratio", "step at 1,000,000 over 2,000", at_most, 1.01),
    (Part.PROMPT, LARGE, 0, "product_share", "prompt, share of the product rate", at_least, 0.5),
    (Part.EXACT, LARGE, 64, "ratio", "exact step over fast", at_most, 1.15),
    (Part.RUNTIME, SMALL, 256, "kept", "runtime over bare steps", at_least, 0.9),
    (Part.RUNTIME, SMALL, 256, "memory_growth", "device memory, last over first", at_most, 1.01),
    (Part.RUNTIME, LARGE, 256, "kept", "runtime over bare steps", at_least, 0.9),
    (Part.RUNTIME, LARGE, 256, "memory_growth", "device memory, last over first", at_most, 1.01),
]


def _row_gates(results: GpuResults) -> Iterator[Gate]:
    """Of greedy rows: seeded sampling is shown and not judged."""
    for part, shape, count, value, what, judge, limit in _LIMITS:
        rows = [row for row in getattr(results, part) if getattr(row, "sampling", GREEDY) == GREEDY]
        same = (r for r in rows if r.shape == shape and count in (0, getattr(r, "rows", 0) or r.sessions))
        name = f"{shape}, {counted(count)}: {what}" if count else f"{shape}: {what}"
        yield judge(name, getattr(next(same, None), value, None), limit, absent=results.why(part))


def _peer_gates(results: GpuResults) -> Iterator[Gate]:
    """Against the fastest of their methods that was measured."""
    for count in (1, 64):
        rows = [row for row in results.transformers if (row.shape, row.sessions) == (SMALL, count)]
        slowest = min(known(map(results.ours_over, rows)), default=None)
        name = f"{SMALL}, {counted(count)}: speed over transformers"
        yield at_least(name, slowest, PEER_LIMIT, absent=results.why(Part.TRANSFORMERS))


def _all_identical(name: str, rows: Sequence[Identity | Parity], absent: str) -> Gate:
    share = sum(row.identical for row in rows) / len(rows) if rows else None
    return at_least(name, share, 1.0, absent=absent)
