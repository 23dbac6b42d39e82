"""What `bench quality` finds and concludes: typed rows, their gates, tables and charts. Pure.

A text is not equally hard everywhere, so the perplexity of its end over that of its beginning says little by
itself. What is judged of a long history is the same stretches, far on, in the long session and in sessions
begun just before.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from kakeya.bench.benchmark import Results
from kakeya.bench.report import Gate, at_least, at_most
from kakeya.bench.stats import ratio
from kakeya.bench.tables import MIB, Chart, Column, Series, Table, figure, listing
from kakeya.types import DType, KernelChoice, WeightFormat

POSITIONS_NEEDED = 2000
# What the default settings may cost.
DEFAULT_KL_LIMIT, DEFAULT_AGREEMENT_LIMIT = 0.01, 0.95

FLAT_LIMIT = 1.05
FAR_TOKENS = 100_000  # from here on a history is long
EARLY_TOKENS = 32_768  # up to here it is young
FIRST_BUCKET, BUCKET = 128, 2048
STRETCHES, STRETCH_TOKENS = 24, 256
# A point of the picture stands for at least this share of the history before it.
POINT_SHARE = 0.12
# Beyond this it is drawn at the edge: a model that guesses blindly does better.
HIGHEST = 1e6

FULL, BOUNDED, PINNED = "full", "bounded", "pinned"
LOSS_LIMIT = 0.2
# A model that fails with everything before its eyes says nothing about memory.
LEAST_FULL_RECALL = 0.5

# How far the two perplexities may be apart, as a share of llama.cpp's.
APART_LIMIT = 0.005
SCORED_NEEDED = 450


@dataclass(frozen=True)
class Choice:
    """One way to hold the weights and compute with them."""

    dtype: DType
    weights: WeightFormat
    kernels: KernelChoice

    def label(self) -> str:
        return f"{self.dtype} / {self.weights} / {self.kernels}"


REFERENCE = Choice(DType.FLOAT32, WeightFormat.FLOAT32, KernelChoice.TORCH)
DEFAULT = Choice(DType.BFLOAT16, WeightFormat.AUTO, KernelChoice.AUTO)


def all_choices() -> list[Choice]:
    """Every combination but the reference; the defaults first."""
    chosen = (KernelChoice.NATIVE, KernelChoice.TORCH)
    every = [
        Choice(dtype, weights, kernels) for kernels in chosen for dtype in DType for weights in WeightFormat
    ]
    return [DEFAULT, *(choice for choice in every if choice != REFERENCE)]


@dataclass(frozen=True)
class Scores:
    """Means over the scored positions; None where there are none."""

    positions: int = 0
    mean_kl: float | None = None
    top1_agreement: float | None = None
    perplexity: float | None = None


@dataclass(frozen=True)
class ChoiceRow(Choice):
    """A choice, what the loader made of it and how each way of feeding it fared, or why it was refused."""

    held_as: str | None = None
    refused: str | None = None
    prompt: Scores | None = None
    decode: Scores | None = None


def choice_gates(rows: Sequence[ChoiceRow]) -> list[Gate]:
    """Enough text for a verdict, and a limit on what the defaults cost in decoding."""
    default = next((row for row in rows if row.label() == DEFAULT.label()), None)
    scores = Scores() if default is None or default.decode is None else default.decode
    absent = f"needs {POSITIONS_NEEDED:,} positions, got {scores.positions:,}"
    if scores.positions < POSITIONS_NEEDED:
        scores = Scores()
    kl, agreement = scores.mean_kl, scores.top1_agreement
    return [
        at_most("mean KL divergence of the default choice", kl, DEFAULT_KL_LIMIT, absent=absent),
        at_least("top-1 agreement of the default choice", agreement, DEFAULT_AGREEMENT_LIMIT, absent=absent),
    ]


_CHOICE_COLUMNS = [
    *(Column(name, name) for name in ("dtype", "weights", "kernels")),
    Column("held as", lambda row: f"not here: {row.refused}" if row.refused else row.held_as),
    Column("KL, decode", "decode.mean_kl", form=".2e"),
    Column("KL, prompt", "prompt.mean_kl", form=".2e"),
    Column("top-1", "decode.top1_agreement", form=".2%"),
    Column("perplexity", "decode.perplexity", form=".3f"),
]


def show_choices(reference: Scores, rows: Sequence[ChoiceRow]) -> Iterator[Table | Chart]:
    """One line a choice, and one chart for each (dtype, kernels) with the weight formats side by side."""
    exact = Scores(reference.positions, 0.0, 1.0, reference.perplexity)
    first = ChoiceRow(**vars(REFERENCE), held_as="the reference", prompt=exact, decode=exact)
    yield Table("Against float32 weights of the same file", _CHOICE_COLUMNS, [first, *rows], labels=4)
    groups: dict[str, list[ChoiceRow]] = {}
    for row in rows:
        if not row.refused:
            groups.setdefault(f"{row.dtype}, {row.kernels} kernels", []).append(row)
    for name, members in groups.items():
        series = [
            Series("decode", [row.decode.mean_kl if row.decode else None for row in members]),
            Series("prompt", [row.prompt.mean_kl if row.prompt else None for row in members]),
        ]
        labels = [row.weights for row in members]
        yield Chart(f"KL divergence, {name}", "mean KL", name, labels, series, bars=True)


@dataclass(frozen=True)
class Way:
    """A way to remember: `sink` first tokens for ever, `window` recent ones.

    A `full` one has a window as long as what it reads, so that it forgets nothing.
    """

    sink: int
    window: int
    full: bool = False

    def label(self) -> str:
        if self.full:
            return "full"
        return f"{self.sink} + {self.window:,}" if self.sink else f"window {self.window:,}"


def perplexity(surprises: Sequence[float]) -> float | None:
    """The exponential of their mean; None where there are none, or where it is no number."""
    mean = math.fsum(surprises) / len(surprises) if surprises else math.inf
    return math.exp(mean) if mean < 700 else None


def between(surprises: Sequence[float], start: int, end: int) -> Sequence[float]:
    """Of the tokens at positions from `start` to before `end`; the first token of a text surprises nobody."""
    return surprises[max(0, start - 1) : max(0, end - 1)]


@dataclass(frozen=True)
class Bucket:
    """Perplexity from where the bucket before ends to `to`."""

    to: int
    perplexity: float | None


def bucket_edges(tokens: int) -> list[int]:
    """Where buckets begin and end: doubling at first, where a window fills, then all of one size."""
    edges, size = [0], FIRST_BUCKET
    while edges[-1] < tokens:
        edges.append(min(tokens, edges[-1] + size))
        size = min(BUCKET, edges[-1])
    return edges


@dataclass(frozen=True)
class WayRow(Way):
    """A measured way: what it took, its perplexity in buckets, and at its ends once its window is full."""

    way: str = ""
    session_bytes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    perplexity: float | None = None
    perplexity_early: float | None = None
    perplexity_late: float | None = None
    perplexity_far: float | None = None
    buckets: tuple[Bucket, ...] = ()

    @property
    def tokens_per_second(self) -> float | None:
        return ratio(self.tokens, self.seconds)

    @property
    def late_over_early(self) -> float | None:
        return ratio(self.perplexity_late, self.perplexity_early)


def way_row(way: Way, surprises: Sequence[float], seconds: float, session_bytes: int) -> WayRow:
    def found(start: int, end: int) -> float | None:
        return perplexity(between(surprises, start, end))

    tokens = 1 + len(surprises)
    late = tokens * 2 // 3
    return WayRow(
        **vars(way),
        way=way.label(),
        session_bytes=session_bytes,
        tokens=tokens,
        seconds=seconds,
        perplexity=found(0, tokens),
        perplexity_early=None if way.full else found(way.sink + way.window, min(EARLY_TOKENS, late)),
        perplexity_late=None if way.full else found(late, tokens),
        perplexity_far=found(FAR_TOKENS, tokens),
        buckets=tuple(Bucket(end, found(start, end)) for start, end in pairwise(bucket_edges(tokens))),
    )


@dataclass(frozen=True)
class Stretch:
    """The same text in the long session and in one begun just before. Version 1 has no `at`."""

    streamed: float | None
    fresh: float | None
    at: int | None = None


@dataclass(frozen=True)
class Fresh:
    """All stretches together."""

    way: str
    stretch_tokens: int
    stretches: tuple[Stretch, ...]
    perplexity_streamed: float | None
    perplexity_fresh: float | None

    @property
    def streamed_over_fresh(self) -> float | None:
        return ratio(self.perplexity_streamed, self.perplexity_fresh)


def far_stretches(tokens: int, far: int = FAR_TOKENS, size: int = STRETCH_TOKENS) -> list[int]:
    """Where stretches begin that lie evenly in the far part of a history and do not overlap."""
    room = max(0, tokens - far)
    count = min(STRETCHES, room // size)
    return [far + room * number // count for number in range(count)]


def fresh_row(
    way: Way, streamed: Sequence[float], afresh: Mapping[int, Sequence[float]], size: int = STRETCH_TOKENS
) -> Fresh:
    """The long session beside those begun just before each stretch; `afresh` is theirs, by its beginning."""
    ours = {start: between(streamed, start, start + size) for start in afresh}
    stretches = tuple(Stretch(perplexity(ours[at]), perplexity(afresh[at]), at) for at in afresh)
    joined = [perplexity(list(chain.from_iterable(each.values()))) for each in (ours, afresh)]
    return Fresh(way.label(), size, stretches, *joined)


@dataclass(frozen=True)
class MemoryResults:
    """Every way, where the model's training ended, and the far stretches, if the history reaches them."""

    ways: tuple[WayRow, ...] = ()
    trained_tokens: int = 0
    fresh: Fresh | None = None


def memory_gate(results: MemoryResults) -> Gate:
    """Far on in its history a session predicts as well as one that has just begun."""
    value = None if results.fresh is None else results.fresh.streamed_over_fresh
    absent = f"needs a history of at least {FAR_TOKENS + STRETCH_TOKENS:,} tokens"
    return at_most("perplexity_flat", value, FLAT_LIMIT, absent=absent)


_WAY_COLUMNS = [
    Column("remembers", "way"),
    Column("MiB", "session_bytes", MIB, ",.1f"),
    Column("tokens", "tokens"),
    Column("tokens/s", "tokens_per_second"),
    Column("perplexity", "perplexity", form=",.2f"),
    Column("early", "perplexity_early", form=",.2f"),
    Column("last third", "perplexity_late", form=",.2f"),
    Column("last/early", "late_over_early", form=".3f"),
    Column(f"past {FAR_TOKENS:,}", "perplexity_far", form=",.2f"),
]


def show_memory(results: MemoryResults) -> Iterator[Table | Chart]:
    """The ways beside each other with their curves, and the long session beside fresh ones."""
    title = f"Perplexity; early: from a full window to {EARLY_TOKENS:,} tokens"
    yield Table(title, _WAY_COLUMNS, results.ways)
    yield _perplexity_chart(results)
    if with_sinks := [row for row in results.ways if row.sink > 0]:
        # On plain axes, where small differences are seen.
        at = [(start + end) / 2000 for start, end in pairwise(bucket_edges(with_sinks[0].tokens))]
        series = [Series(row.way, [bucket.perplexity for bucket in row.buckets]) for row in with_sinks]
        x_title = "perplexity by thousand tokens of history"
        yield Chart("Perplexity of sinks and window", "ppl", x_title, at, series)
    if (fresh := results.fresh) is not None:
        count, size = len(fresh.stretches), fresh.stretch_tokens
        rows = [
            ("in the long session", figure(fresh.perplexity_streamed, form=",.2f")),
            ("in sessions begun a window before", figure(fresh.perplexity_fresh, form=",.2f")),
            ("long over fresh", figure(fresh.streamed_over_fresh, form=".4f")),
        ]
        title = f"{count} stretches of {size} tokens far on, remembering {fresh.way}"
        yield listing(title, ("where", "perplexity"), rows, labels=1)


def _perplexity_chart(results: MemoryResults) -> Chart:
    """All ways over the whole history."""
    lines = {row.way: dict(thinned(row.buckets)) for row in results.ways}
    at = sorted({place for line in lines.values() for place in line})
    trained = results.trained_tokens
    return Chart(
        "Perplexity by place in the history",
        "ppl",
        "perplexity by tokens of history",
        at,
        [Series(way, [line.get(place) for place in at]) for way, line in lines.items()],
        log_x=True,
        log_y=True,
        mark=(trained, f"trained to {trained:,}"),
        picture=True,
    )


def thinned(buckets: Sequence[Bucket], factor: float = POINT_SHARE) -> list[tuple[float, float]]:
    """(position, perplexity) of neighbouring buckets taken together until each spans `factor` of its end.

    A logarithmic axis has little room for the many buckets of its last part.
    """
    points = []
    first = start = 0
    nats = 0.0
    for bucket in buckets:
        nats += (bucket.to - start) * math.log(bucket.perplexity or HIGHEST)
        start = bucket.to
        if start - first >= factor * start or bucket is buckets[-1]:
            points.append(((first + start) / 2, min(HIGHEST, math.exp(nats / (start - first)))))
            first, nats = start, 0.0
    return points


@dataclass(frozen=True)
class Answer:
    """A number that was said, and what came when it was asked for."""

    key: str
    answer: str

    def is_right(self) -> bool:
        return self.key in self.answer


@dataclass(frozen=True)
class RecallRow:
    """What a memory recalled at one distance. `within_window`: what was said is still in the window."""

    memory: str
    distance: int
    within_window: bool
    answers: tuple[Answer, ...]

    @property
    def trials(self) -> int:
        return len(self.answers)

    @property
    def right(self) -> int:
        return sum(answer.is_right() for answer in self.answers)

    @property
    def recall(self) -> float:
        return self.right / self.trials


@dataclass(frozen=True)
class RecallResults:
    """A row for each memory and distance; `bounded` is the bounded memory in words."""

    rows: tuple[RecallRow, ...] = ()
    bounded: str = ""

    def share(self, memory: str, distances: Sequence[int]) -> float | None:
        """Of right answers over these distances; None where nothing was asked."""
        chosen = [row for row in self.rows if row.memory == memory and row.distance in distances]
        asked = sum(row.trials for row in chosen)
        return sum(row.right for row in chosen) / asked if asked else None


def recall_gate(results: RecallResults) -> Gate:
    """Within its window, bounded memory recalls nearly what full attention does."""
    within = [row.distance for row in results.rows if row.memory == BOUNDED and row.within_window]
    full, bounded = (results.share(memory, within) for memory in (FULL, BOUNDED))
    value, absent = None, "no distance within the window was tried with both"
    if full is not None and bounded is not None:
        # Rounded: 0.9 - 0.7 is not to be more than 0.2.
        value = round(full - bounded, 9) if full >= LEAST_FULL_RECALL else None
        absent = f"full attention itself recalls {full:.2f}, less than {LEAST_FULL_RECALL}"
    return at_most("recall_lost_within_the_window", value, LOSS_LIMIT, absent=absent)


def show_recall(results: RecallResults) -> Iterator[Table | Chart]:
    """Right answers by memory and distance, for the memories that were tried."""
    names = {FULL: "full", BOUNDED: results.bounded, PINNED: f"{results.bounded}, number pinned"}
    found = {(row.memory, row.distance): row for row in results.rows}
    distances = sorted({row.distance for row in results.rows})
    tried = [memory for memory in names if any(row.memory == memory for row in results.rows)]
    headings = [f"{distance:,}" for distance in distances]
    cells, series = [], []
    for memory in tried:
        rows = [found.get((memory, distance)) for distance in distances]
        cells.append([names[memory], *(row and f"{row.right}/{row.trials}" for row in rows)])
        series.append(Series(names[memory], [None if row is None else row.recall for row in rows]))
    yield listing("Right answers", ("a number said so many tokens ago", *headings), cells, labels=1)
    x_title = "share of right answers by tokens since it was said"
    yield Chart("Recall by distance", "right", x_title, headings, series)


@dataclass(frozen=True)
class PeerRow:
    """A file that both have read. The standard error is of the ratio, as a share of it: how far another text
    of this length might move it."""

    file: str
    held_as: str
    scored: int
    ours: float | None
    llama_cpp: float | None
    standard_error: float | None

    @property
    def ours_over_llama_cpp(self) -> float | None:
        return ratio(self.ours, self.llama_cpp)


def peer_row(file: str, held_as: str, ours: Sequence[float], theirs: Sequence[float]) -> PeerRow:
    """How much the same tokens surprised each of them, in nats."""
    differences = [mine - other for mine, other in zip(ours, theirs, strict=True)]
    enough = len(differences) >= 2
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if enough else None
    return PeerRow(file, held_as, len(ours), perplexity(ours), perplexity(theirs), error)


@dataclass(frozen=True)
class PeerResults:
    """llama.cpp's version, what it was built for, and a row for each file."""

    library: str
    system: str
    files: tuple[PeerRow, ...] = ()


def peer_gate(row: PeerRow) -> Gate:
    """The perplexities are about the same, in either direction."""
    over = row.ours_over_llama_cpp
    value, absent = None if over is None else abs(over - 1), "a perplexity is no number"
    if row.scored < SCORED_NEEDED:
        value, absent = None, f"needs {SCORED_NEEDED:,} scored tokens, got {row.scored:,}"
    return at_most(f"{row.file}: perplexity apart from llama.cpp's", value, APART_LIMIT, absent=absent)


_PEER_COLUMNS = [
    Column("file", "file"),
    Column("held as", "held_as"),
    Column("scored tokens", "scored"),
    Column("ours", "ours", form=",.4f"),
    Column("llama.cpp", "llama_cpp", form=",.4f"),
    Column("ours/llama.cpp", "ours_over_llama_cpp", form=".5f"),
    Column("standard error", "standard_error", form=".5f"),
]


@dataclass(frozen=True, kw_only=True)
class QualityResults(Results):
    """What the parts found; None for those that were not measured, or not yet."""

    reference: Scores | None = None
    choices: tuple[ChoiceRow, ...] = ()
    memory: MemoryResults | None = None
    recall: RecallResults | None = None
    peer: PeerResults | None = None


def quality_gates(results: QualityResults) -> list[Gate]:
    """Those of the parts that were measured."""
    gates = choice_gates(results.choices) if results.reference else []
    gates += [memory_gate(results.memory)] if results.memory else []
    gates += [recall_gate(results.recall)] if results.recall else []
    return gates + [peer_gate(row) for row in (results.peer.files if results.peer else ())]


def show(results: QualityResults) -> list[Table | Chart]:
    """The parts that were measured."""
    shown: list[Table | Chart] = []
    if results.reference:
        shown += show_choices(results.reference, results.choices)
    if results.memory:
        shown += show_memory(results.memory)
    if results.recall:
        shown += show_recall(results.recall)
    if results.peer:
        title = f"Perplexity beside {results.peer.library}"
        shown.append(Table(title, _PEER_COLUMNS, results.peer.files, labels=2))
    return shown
