"""The part memory: one long text through one session for each way to remember.

A text is not equally hard everywhere, so the perplexity of its end over that of its beginning says little by
itself. What is judged of a long history is the same stretches, far on, in the long session and in sessions
begun just before.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from kakeya.bench.benchmark import Work
from kakeya.bench.quality.scoring import Found, open_alone, perplexity, surprises
from kakeya.bench.report import Gate, at_most
from kakeya.bench.stats import ratio
from kakeya.bench.tables import MIB, Chart, Column, Series, Table
from kakeya.config import CacheConfig

if TYPE_CHECKING:
    from kakeya.bench.quality.benchmark import QualityBench

FLAT_LIMIT = 1.05
FAR_TOKENS = 100_000  # from here on a history is long
EARLY_TOKENS = 32_768  # up to here it is young
FIRST_BUCKET, BUCKET = 128, 2048
STRETCHES, STRETCH_TOKENS = 24, 256
# A point of the picture stands for at least this share of the history before it.
POINT_SHARE = 0.12
# Beyond this it is drawn at the edge: a model that guesses blindly does better.
HIGHEST = 1e6


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

    def cache(self) -> CacheConfig:
        return CacheConfig(sink=self.sink, window=self.window)


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

    @classmethod
    def of(cls, way: Way, surprises: Sequence[float], seconds: float, session_bytes: int) -> "WayRow":
        def found(start: int, end: int) -> float | None:
            return perplexity(between(surprises, start, end))

        tokens = 1 + len(surprises)
        late = tokens * 2 // 3
        return cls(
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

    @property
    def tokens_per_second(self) -> float | None:
        return ratio(self.tokens, self.seconds)

    @property
    def late_over_early(self) -> float | None:
        return ratio(self.perplexity_late, self.perplexity_early)


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

    @classmethod
    def of(
        cls,
        way: Way,
        streamed: Sequence[float],
        afresh: Mapping[int, Sequence[float]],
        size: int = STRETCH_TOKENS,
    ) -> "Fresh":
        """The long session beside those begun just before each stretch, by the stretch's beginning."""
        ours = {start: between(streamed, start, start + size) for start in afresh}
        stretches = tuple(Stretch(perplexity(ours[at]), perplexity(afresh[at]), at) for at in afresh)
        joined = [perplexity(list(chain.from_iterable(each.values()))) for each in (ours, afresh)]
        return cls(way.label(), size, stretches, *joined)

    @property
    def streamed_over_fresh(self) -> float | None:
        return ratio(self.perplexity_streamed, self.perplexity_fresh)


def far_stretches(tokens: int, far: int = FAR_TOKENS, size: int = STRETCH_TOKENS) -> list[int]:
    """Where stretches begin that lie evenly in the far part of a history and do not overlap."""
    room = max(0, tokens - far)
    count = min(STRETCHES, room // size)
    return [far + room * number // count for number in range(count)]


def tokens_afresh(tokens: int, far: int, window: int) -> int:
    """How many tokens the sessions that begin afresh read."""
    return len(far_stretches(tokens, far)) * (window + STRETCH_TOKENS)


_COLUMNS = [
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
_FRESH_COLUMNS = [
    Column("perplexity in the long session", "perplexity_streamed", form=",.2f"),
    Column("in sessions begun a window before", "perplexity_fresh", form=",.2f"),
    Column("long over fresh", "streamed_over_fresh", form=".4f"),
]


@dataclass(frozen=True)
class MemoryResults:
    """Every way, where the model's training ended, and the far stretches, if the history reaches them."""

    ways: tuple[WayRow, ...] = ()
    trained_tokens: int = 0
    fresh: Fresh | None = None

    def gates(self) -> list[Gate]:
        """Far on in its history a session predicts as well as one that has just begun."""
        value = None if self.fresh is None else self.fresh.streamed_over_fresh
        absent = f"needs a history of at least {FAR_TOKENS + STRETCH_TOKENS:,} tokens"
        return [at_most("perplexity_flat", value, FLAT_LIMIT, absent=absent)]

    def show(self) -> Iterator[Table | Chart]:
        """The ways beside each other with their curves, and the long session beside fresh ones."""
        yield Table(f"Perplexity; early: from a full window to {EARLY_TOKENS:,} tokens", _COLUMNS, self.ways)
        yield self._picture()
        if with_sinks := [row for row in self.ways if row.sink > 0]:
            # On plain axes, where small differences are seen.
            at = [(start + end) / 2000 for start, end in pairwise(bucket_edges(with_sinks[0].tokens))]
            series = [Series(row.way, [bucket.perplexity for bucket in row.buckets]) for row in with_sinks]
            x_title = "perplexity by thousand tokens of history"
            yield Chart("Perplexity of sinks and window", "ppl", x_title, at, series)
        if (fresh := self.fresh) is not None:
            stretches = f"{len(fresh.stretches)} stretches of {fresh.stretch_tokens} tokens far on"
            yield Table(f"{stretches}, remembering {fresh.way}", _FRESH_COLUMNS, [fresh], labels=0)

    def _picture(self) -> Chart:
        """All ways over the whole history."""
        lines = {row.way: dict(thinned(row.buckets)) for row in self.ways}
        at = sorted({place for line in lines.values() for place in line})
        return Chart(
            "Perplexity by place in the history",
            "ppl",
            "perplexity by tokens of history",
            at,
            [Series(way, [line.get(place) for place in at]) for way, line in lines.items()],
            log_x=True,
            log_y=True,
            mark=(self.trained_tokens, f"trained to {self.trained_tokens:,}"),
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


def measure_memory(bench: "QualityBench", token_ids: Sequence[int], work: Work) -> Found:
    """Each way, and at last sessions begun afresh beside the judged one."""
    results, streamed = MemoryResults(), list[float]()
    for way in bench.ways:
        work.begin(f"memory: {way.label()}")
        with open_alone(bench, way.cache()) as runtime:
            began = time.perf_counter()
            nats = surprises(runtime, token_ids[: bench.tokens_of(way)], work)
            row = WayRow.of(way, nats, time.perf_counter() - began, runtime.describe().session_bytes)
            trained = runtime.model_config.max_positions
        results = replace(results, ways=(*results.ways, row), trained_tokens=trained)
        streamed = nats if way == bench.judged else streamed
        yield {"memory": results}
    if starts := far_stretches(bench.history_tokens, bench.far_tokens):
        work.begin(f"memory: the same text afresh, for {bench.judged.label()}")
        afresh = _afresh(bench, token_ids, starts, work)
        yield {"memory": replace(results, fresh=Fresh.of(bench.judged, streamed, afresh))}


def _afresh(
    bench: "QualityBench", token_ids: Sequence[int], starts: Sequence[int], work: Work
) -> dict[int, list[float]]:
    """Each stretch in a session of its own that begins a window earlier and forgets nothing.

    Its later tokens see more than a window's worth, so the comparison errs against the long session.
    """
    before, size = bench.judged.window, STRETCH_TOKENS
    with open_alone(bench, CacheConfig(sink=0, window=before + size)) as runtime:
        texts = {start: token_ids[max(0, start - before) : start + size] for start in starts}
        return {start: surprises(runtime, text, work)[-size:] for start, text in texts.items()}
