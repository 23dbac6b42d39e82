"""What `bench quality --part memory` concludes: perplexity by place in the history. Pure.

A text is not equally hard everywhere, so the perplexity of its end over that of its beginning says little by
itself. What is judged is the same stretches, far on, in the long session and in sessions begun just before.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kakeya.bench.gates import Gate, at_most
from kakeya.bench.stats import ratio

FLAT_LIMIT = 1.05
# From here on a history is long.
FAR_TOKENS = 100_000
# Up to here it is young.
EARLY_TOKENS = 32_768
# Short ones at first, since that is where a window fills; then all alike.
FIRST_BUCKET = 128
BUCKET = 2048
STRETCHES = 24
STRETCH_TOKENS = 256


@dataclass(frozen=True)
class Way:
    """A way to remember: `sink` first tokens for ever, `window` recent ones.

    A `full` one has a window as long as what it reads, so that it forgets nothing.
    """

    sink: int
    window: int
    full: bool = False

    @property
    def kept(self) -> int:
        """How many tokens it remembers."""
        return self.sink + self.window

    @property
    def label(self) -> str:
        if self.full:
            return "full"
        return f"{self.sink} + {self.window:,}" if self.sink else f"window {self.window:,}"


@dataclass(frozen=True)
class Scored:
    """How much each token from position `first` on surprised the model, in nats."""

    first: int
    surprises: Sequence[float]

    @property
    def end(self) -> int:
        return self.first + len(self.surprises)

    def between(self, start: int, end: int) -> Sequence[float]:
        """The surprises at positions from `start` to before `end`, as far as there are any."""
        return self.surprises[max(0, start - self.first) : max(0, end - self.first)]

    def perplexity(self, start: int, end: int) -> float | None:
        return perplexity(self.between(start, end))


def perplexity(surprises: Sequence[float]) -> float | None:
    """The exponential of their mean; None where there are none, or where it is no number."""
    if not surprises:
        return None
    mean = math.fsum(surprises) / len(surprises)
    return math.exp(mean) if mean < 700 else None


def bucket_edges(tokens: int) -> list[int]:
    """Where the buckets of a history begin and end: doubling at first, then of one size."""
    edges, size = [0], FIRST_BUCKET
    while edges[-1] < tokens:
        edges.append(min(tokens, edges[-1] + size))
        size = min(BUCKET, edges[-1])
    return edges


def way_row(way: Way, scored: Scored, seconds: float, session_bytes: int) -> dict[str, Any]:
    """A measured way: what it took, its perplexity in buckets, and at its ends."""
    tokens = scored.end
    early = None if way.full else scored.perplexity(way.kept, min(EARLY_TOKENS, tokens * 2 // 3))
    late = None if way.full else scored.perplexity(tokens * 2 // 3, tokens)
    return {
        "way": way.label,
        "sink": way.sink,
        "window": way.window,
        "full": way.full,
        "session_bytes": session_bytes,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": ratio(tokens, seconds),
        "perplexity": scored.perplexity(0, tokens),
        "perplexity_early": early,
        "perplexity_late": late,
        "late_over_early": ratio(late, early),
        "perplexity_far": scored.perplexity(FAR_TOKENS, tokens),
        "buckets": [
            {"from": start, "to": end, "perplexity": scored.perplexity(start, end)}
            for start, end in pairwise(bucket_edges(tokens))
        ],
    }


def far_stretches(tokens: int, far: int = FAR_TOKENS, size: int = STRETCH_TOKENS) -> list[int]:
    """Where stretches begin that lie evenly in the far part of a history and do not overlap."""
    room = max(0, tokens - far)
    count = min(STRETCHES, room // size)
    return [far + room * number // count for number in range(count)]


def fresh_row(
    way: Way, streamed: Scored, afresh: Mapping[int, Sequence[float]], size: int = STRETCH_TOKENS
) -> dict[str, Any]:
    """The long session beside those begun just before each stretch; `afresh` is theirs, by its beginning."""
    pieces = [
        {
            "from": start,
            "streamed": streamed.perplexity(start, start + size),
            "fresh": perplexity(surprises),
        }
        for start, surprises in afresh.items()
    ]
    ours = perplexity(_joined(streamed.between(start, start + size) for start in afresh))
    theirs = perplexity(_joined(afresh.values()))
    return {
        "way": way.label,
        "stretch_tokens": size,
        "stretches": pieces,
        "perplexity_streamed": ours,
        "perplexity_fresh": theirs,
        "streamed_over_fresh": ratio(ours, theirs),
    }


def _joined(parts: Iterable[Sequence[float]]) -> list[float]:
    return [value for part in parts for value in part]


def memory_gates(results: Mapping[str, Any]) -> tuple[Gate, ...]:
    """Far on in its history a session predicts as well as one that has just begun."""
    fresh = results["fresh"]
    value = fresh and fresh["streamed_over_fresh"]
    absent = f"needs a history of at least {FAR_TOKENS + STRETCH_TOKENS:,} tokens"
    return (at_most("perplexity_flat", value, FLAT_LIMIT, absent=absent),)


def thinned(buckets: Sequence[Mapping[str, Any]], factor: float) -> list[tuple[float, float]]:
    """(position, perplexity) of neighbouring buckets taken together until each spans `factor` of its end.

    A logarithmic axis has little room for the many buckets of its last part.
    """
    groups: list[list[Mapping[str, Any]]] = []
    group: list[Mapping[str, Any]] = []
    for bucket in buckets:
        if bucket["perplexity"] is None:
            continue
        group.append(bucket)
        if bucket["to"] - group[0]["from"] >= factor * bucket["to"]:
            groups.append(group)
            group = []
    if group and groups:
        groups[-1] += group  # too short for a point of its own
    elif group:
        groups.append(group)
    return [_point(group) for group in groups]


def _point(group: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    start, end = group[0]["from"], group[-1]["to"]
    nats = math.fsum(math.log(each["perplexity"]) * (each["to"] - each["from"]) for each in group)
    return (start + end) / 2, math.exp(nats / sum(each["to"] - each["from"] for each in group))
