"""How many tokens a backend with a drafter of its own guesses in a step.

Draft and verification are one launch there, for all sessions together, so all draft the same number: the one
with the most tokens a second. How often a guess is right is measured by its place in the draft, over all
sessions; what a step takes is measured for each number and size of the crowd. Where no number pays, the least
is tried now and then, so drafting ends by itself and comes back by itself; ever more seldom, as long as even
the first guess is seldom right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from kakeya.engine.blend import blend

NAME = "drafter"  # in metrics

_FIRST_STEPS = 4  # that each number is tried for, to learn what a step takes
_TRIAL = 8  # steps of a trial
_BETWEEN, _MOST_BETWEEN = 256, 1024  # steps between two trials
_HOPEFUL = 0.75  # the chance of a guess that nobody has judged
_DOUBT = 8.0  # guesses that this hope is worth
_REMEMBERED = 256.0  # guesses at one place that count


@dataclass
class _Place:
    """How often the guess at one place of a draft is right, if those before it are."""

    right: float = _HOPEFUL * _DOUBT
    judged: float = _DOUBT

    @property
    def chance(self) -> float:
        return self.right / self.judged

    def count(self, *, right: bool) -> None:
        if self.judged >= _REMEMBERED:
            self.right, self.judged = self.right / 2, self.judged / 2
        self.right += right
        self.judged += 1


@dataclass
class _Crowd:
    """What steps take with about so many sessions, by the tokens they draft for each."""

    seconds: dict[int, float]
    steps: dict[int, int] = field(default_factory=dict)
    last: int | None = None

    def learn(self, count: int, seconds: float) -> None:
        """The first step after another number is not measured: it waited for the other's last one."""
        self.steps[count] = self.steps.get(count, 0) + 1
        if count == self.last:
            self.seconds[count] = blend(self.seconds[count], seconds)
        self.last = count

    @property
    def untried(self) -> int | None:
        return next((count for count in self.seconds if self.steps.get(count, 0) < _FIRST_STEPS), None)


class OwnDrafts:
    """Decides for a backend that can draft `counts` tokens, for at most `most_sessions` at once."""

    def __init__(self, counts: Sequence[int], most_sessions: int) -> None:
        self._counts, self._most_sessions = (0, *counts), most_sessions
        self._places = [_Place() for _ in range(max(counts))]
        self._crowds: dict[int, _Crowd] = {}
        self._since_draft = 0
        self._between = _BETWEEN
        # Drafts since the last trial, and those whose first guess was right.
        self._tried = self._tried_right = 0

    def count(self, sessions: int) -> int:
        """How many tokens to draft for each of so many sessions; 0 for a plain step."""
        if sessions > self._most_sessions:
            return 0
        crowd = self._crowd(sessions)
        if crowd.untried is not None:
            return crowd.untried
        fastest = max(self._counts, key=lambda count: self._gain(count) / crowd.seconds[count])
        return fastest or (self._counts[1] if self._since_draft >= self._between else 0)

    def learn(self, sessions: int, count: int, seconds: float) -> None:
        """A step for so many sessions that drafted `count` tokens for each has taken so long."""
        if sessions > self._most_sessions:
            return
        self._crowd(sessions).learn(count, seconds)
        self._since_draft += 1
        if self._since_draft >= self._between + _TRIAL:
            self._end_trial()

    def _end_trial(self) -> None:
        is_hopeless = 2 * self._tried_right < self._tried
        self._between = min(2 * self._between, _MOST_BETWEEN) if is_hopeless else _BETWEEN
        self._since_draft = self._tried = self._tried_right = 0

    def judged(self, count: int, right: int) -> None:
        """Of `count` guesses for one session the first `right` were kept."""
        self._tried += 1
        self._tried_right += right > 0
        for place in range(min(count, right + 1)):
            self._places[place].count(right=place < right)

    def _gain(self, count: int) -> float:
        """How many tokens a session gets of a step that drafts so many, on the average."""
        kept: Iterator[float] = accumulate((place.chance for place in self._places[:count]), mul)
        return 1 + sum(kept)

    def _crowd(self, sessions: int) -> _Crowd:
        size = (sessions - 1).bit_length()
        if size not in self._crowds:
            self._crowds[size] = _Crowd(dict.fromkeys(self._counts, 0.0))
        return self._crowds[size]
