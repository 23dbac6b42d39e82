"""What the trials come to: shares with their intervals, by memory, kind of fact and distance."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kakeya.bench.stats import Samples, percentile

# 95 % of a normal distribution lie within so many standard deviations.
_Z = 1.96


@dataclass(frozen=True)
class Share:
    """So many of so many, and between which shares the true one lies with 95 % (Wilson)."""

    count: int
    trials: int

    @property
    def share(self) -> float | None:
        return self.count / self.trials if self.trials else None

    @property
    def low(self) -> float | None:
        return self._bound(-1)

    @property
    def high(self) -> float | None:
        return self._bound(1)

    def _bound(self, sign: int) -> float | None:
        if not self.trials:
            return None
        share, n, z = self.count / self.trials, self.trials, _Z
        middle = share + z * z / (2 * n)
        spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        return min(1.0, max(0.0, (middle + sign * spread) / (1 + z * z / n)))

    def __str__(self) -> str:
        if self.share is None:
            return "–"
        return f"{self.count}/{self.trials} ({self.low:.0%} to {self.high:.0%})"


@dataclass(frozen=True)
class Asked:
    """One trial: whether the facts were brought back (None where nothing was), and the answer, unless it is
    one of too many to keep."""

    found: bool | None
    right: bool
    answer: str


@dataclass(frozen=True)
class RecallRow:
    """One memory, one kind of fact, one distance. `left_out`: tokens of the histories that no model read."""

    memory: str
    kind: str
    distance: int
    asked: tuple[Asked, ...]
    left_out: int = 0

    @property
    def found(self) -> Share:
        judged = [each for each in self.asked if each.found is not None]
        return Share(sum(bool(each.found) for each in judged), len(judged))

    @property
    def right_given_found(self) -> Share:
        found = [each for each in self.asked if each.found]
        return Share(sum(each.right for each in found), len(found))

    @property
    def right(self) -> Share:
        return Share(sum(each.right for each in self.asked), len(self.asked))


@dataclass(frozen=True)
class SearchCost:
    """What searching took at one distance: seconds of a lookup, and bytes on the host with the ids."""

    distance: int
    lookup: Samples
    bytes_a_token: float


@dataclass(frozen=True)
class Harm:
    """Surprise of ordinary text in nats a token, with recall and without, and how many tokens that is of."""

    tokens: int
    recalling: float
    plain: float

    @property
    def ratio(self) -> float:
        """Perplexity with recall over perplexity without."""
        return math.exp(self.recalling - self.plain)


@dataclass(frozen=True)
class TurnCost:
    """Seconds of a turn of a few tokens: without recall, with what was there, with other pages."""

    history: int
    plain: Samples
    unchanged: Samples
    changed: Samples
    device_bytes: int


@dataclass(frozen=True)
class StreamCost:
    """Seconds between the tokens of streams, beside so many turns of others."""

    beside: str
    gap: Samples
    turns: int

    @property
    def p95(self) -> float | None:
        return percentile(self.gap.samples, 95)


def share_of(rows: Iterable[RecallRow], memory: str, kinds: Sequence[str], what: str) -> float | None:
    """Over all distances of these kinds; None where nothing was asked."""
    shares = [getattr(row, what) for row in rows if row.memory == memory and row.kind in kinds]
    trials = sum(each.trials for each in shares)
    return sum(each.count for each in shares) / trials if trials else None


def least_share(rows: Iterable[RecallRow], memory: str, kinds: Sequence[str], what: str) -> float | None:
    """At the worst of all distances of these kinds; None where nothing was asked."""
    by_distance: dict[int, list[RecallRow]] = {}
    for row in rows:
        by_distance.setdefault(row.distance, []).append(row)
    shares = [share_of(each, memory, kinds, what) for each in by_distance.values()]
    return min((share for share in shares if share is not None), default=None)
