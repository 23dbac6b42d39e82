"""How many tokens to draft: what a guess is worth, from how often guesses were right and what rows cost.

A step of n streams yields n tokens. A draft of k tokens of which each is right with probability p yields
p + p² + … + pᵏ more, and makes the step k rows longer. So many are drafted as make the most tokens a second.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul, neg

from kakeya.engine.blend import blend

_MEMORY = 0.9  # what a judged guess leaves of the weight of those before it: the last ten count
DOUBT = 3.0  # guesses that everybody starts with
_TRUST = 0.8  # of what a caller predicts
_LEAST_CHANCE = 0.2  # below it no guess is worth a row anywhere
_LEAST_GAIN = 1.03  # what is less is noise
_NAP = 4  # tokens
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512  # steps between two tries of a proposer that does not pay

_STALE = 256  # steps after which a time is forgotten and measured anew
# Numbers of rows with a time of their own. Between them it is interpolated.
_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass
class Acceptance:
    """How often the guesses of one proposer were right lately, in one session.

    A free proposer starts with doubt: it is compared with what comes before its first guess is drafted.
    """

    right: float = 0.0
    judged: float = DOUBT
    unpaid: int = 0
    pause: int = _FIRST_PAUSE
    watched: tuple[int, Sequence[int]] | None = None
    """A position and what was guessed from there on, and not drafted."""

    @property
    def chance(self) -> float:
        """That the next guess is right, given the one before it was."""
        return self.right / self.judged

    @property
    def has_a_chance(self) -> bool:
        """Whether a guess could be worth a row."""
        return self.chance >= _LEAST_CHANCE

    def count(self, right: int, wrong: int) -> None:
        """So many guesses in a row were right; then `wrong`, 0 or 1, was not."""
        for is_right in [1] * right + [0] * wrong:
            self.right = self.right * _MEMORY + is_right
            self.judged = self.judged * _MEMORY + 1

    def watch(self, tokens: Sequence[int]) -> None:
        """Compare the guess that was not drafted with what has come."""
        if self.watched is None or self.watched[0] >= len(tokens):
            return
        position, guess = self.watched
        come = tokens[position : position + len(guess)]
        wrong = next((place for place, token in enumerate(come) if token != guess[place]), None)
        self.count(len(come) if wrong is None else wrong, int(wrong is not None))
        self.watched = None

    def naps(self, position: int) -> bool:
        """Whether a free proposer that was wrong too often is left alone here: it is tried now and then."""
        return not self.has_a_chance and position % _NAP != 0

    def is_due(self) -> bool:
        """Called when drafting would not pay: whether to try all the same, ever more seldom."""
        self.unpaid += 1
        if self.unpaid < self.pause:
            return False
        self.unpaid, self.pause = 0, min(2 * self.pause, _LONGEST_PAUSE)
        return True

    def trust(self) -> None:
        """The caller has predicted what comes."""
        self.right, self.judged = _TRUST * DOUBT, DOUBT

    def has_paid(self) -> None:
        """Drafting pays: the next try after it ceases to is soon."""
        self.unpaid, self.pause = 0, _FIRST_PAUSE


class StepCosts:
    """Seconds of a step by its rows, as measured lately.

    What was not measured yet is thought to cost as much as the nearest smaller step that was. So it is tried,
    and known from then on.
    """

    def __init__(self) -> None:
        self._known: list[int] = []  # sorted
        self._seconds: dict[int, float] = {}
        self._learned_at: dict[int, int] = {}
        self._steps = 0

    def learn(self, rows: int, seconds: float) -> None:
        """A step of so many rows has taken so long."""
        self._steps += 1
        bucket = _ROWS[min(bisect_left(_ROWS, rows), len(_ROWS) - 1)]
        if bucket not in self._seconds:
            insort(self._known, bucket)
        self._seconds[bucket] = blend(self._seconds.get(bucket, 0.0), seconds)
        self._learned_at[bucket] = self._steps
        if self._steps % _STALE == 0:
            self._forget()

    def seconds(self, rows: int) -> float:
        """What a step of so many rows takes; 0 before any was measured."""
        if not self._known:
            return 0.0
        place = bisect_left(self._known, rows)
        if place == len(self._known):
            return self._seconds[self._known[-1]]
        above = self._known[place]
        if above == rows or place == 0:
            return self._seconds[above]
        below = self._known[place - 1]
        share = (rows - below) / (above - below)
        return self._seconds[below] * (1 - share) + self._seconds[above] * share

    def _forget(self) -> None:
        self._known = [rows for rows in self._known if self._steps - self._learned_at[rows] < _STALE]
        self._seconds = {rows: self._seconds[rows] for rows in self._known}


@dataclass(frozen=True)
class Offer:
    """What one session could draft: `most` tokens. If those before are right, one is with this `chance`."""

    chance: float
    most: int

    def values(self) -> list[float]:
        """The chance that each drafted token is kept."""
        return list(accumulate(repeat(self.chance, self.most), mul)) if self.chance >= _LEAST_CHANCE else []


class DraftLength:
    """Decides for all sessions of a step together."""

    def __init__(self) -> None:
        self.costs = StepCosts()

    def counts(self, streams: int, offers: Sequence[Offer], seconds_a_round: float = 0.0) -> list[int]:
        """How many tokens to draft for each offer in a step of so many streams.

        `seconds_a_round`: what the proposer takes for one more token of all sessions.
        """
        values = [offer.values() for offer in offers]
        best, most_a_second = [0] * len(offers), self._rate(streams, streams, 0.0) * _LEAST_GAIN
        for threshold in _some(sorted({value for each in values for value in each}, reverse=True)):
            counts = [bisect_right(each, -threshold, key=neg) for each in values]
            gained = sum(sum(each[:count]) for each, count in zip(values, counts, strict=True))
            proposing = max(counts) * seconds_a_round
            rate = self._rate(streams + gained, streams + sum(counts), proposing)
            if rate > most_a_second:
                best, most_a_second = counts, rate
        return best

    def _rate(self, tokens: float, rows: int, proposing: float) -> float:
        seconds = self.costs.seconds(rows) + proposing
        return tokens / seconds if seconds > 0 else float(tokens)


def _some(thresholds: Sequence[float], most: int = 16) -> Sequence[float]:
    """A few of many, from the highest to the lowest."""
    if len(thresholds) <= most:
        return thresholds
    return [thresholds[round(place * (len(thresholds) - 1) / (most - 1))] for place in range(most)]
