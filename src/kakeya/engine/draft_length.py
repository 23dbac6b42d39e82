"""How many tokens to draft: what a guess is worth, from how often guesses were right and what rows cost.

A step of n streams yields n tokens. A draft of k tokens of which each is right with probability p yields
p + p² + … + pᵏ more, and makes the step k rows longer. So many are drafted as make the most tokens a second.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat, takewhile
from math import sqrt
from operator import mul

from kakeya.engine.blend import blend

_MEMORY = 0.9  # what a judged guess leaves of the weight of those before it: the last ten count
DOUBT = 3.0  # guesses that everybody starts with
FIRST_CHANCE = 0.75  # of a proposer that costs time and that nobody has tried
_HEART = 2.0  # guesses that count when it is tried again
_TRUST = 0.8  # of what a caller predicts
_HOPE = 0.3  # of what works ahead, at the beginning of a generate
_SILENCE = 0.98  # what a step without a guess leaves of its chance
_LEAST_CHANCE = 0.2  # below it no guess is worth a row anywhere
_LEAST_VALUE = 0.05  # tokens: below it a guess behind others is not worth one
_LEAST_GAIN = 1.03  # what is less is noise
_NAP, _LONGEST_NAP = 4, 16  # tokens
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512  # steps between two tries of a proposer that does not pay
_COOLING = 8  # steps after its last draft in which the next one is still thought to be near

_STALE = 256  # steps after which a time is forgotten and measured anew
_FRESH = 16  # steps in which nobody doubts it
_SURE = 4  # measurements: one alone may be of a bad moment
_FEW_ROWS = 8
# Numbers of rows with a time of their own. Between them it is interpolated.
_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass
class Acceptance:
    """How often the guesses of one proposer were right lately, in one session.

    A free proposer starts with doubt: it is compared with what comes before its first guess is drafted.
    """

    right: float = 0.0
    judged: float = DOUBT
    pause: int = _FIRST_PAUSE
    asked_at: int = -_COOLING
    asked: int = 0
    """How often since the last try: one that goes on does pay."""
    watched: tuple[int, Sequence[int]] | None = None
    """A position and what was guessed from there on, and not drafted."""

    @property
    def chance(self) -> float:
        """That the next guess is right, given the one before it was."""
        return self.right / self.judged

    @property
    def sure_chance(self) -> float:
        """The chance less its standard error: of many sessions, those whose guesses were right by luck look
        as if drafting paid."""
        return self.chance - sqrt(max(0.0, self.chance * (1 - self.chance)) / self.judged)

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

    def naps(self, position: int, least: float, streams: int) -> bool:
        """Whether a free proposer is left alone here, as it is right less often than `least`: it is tried now
        and then, in a crowd more seldom, as asking for one takes time of all."""
        return self.chance < least and position % min(max(_NAP, streams), _LONGEST_NAP) != 0

    def take_heart(self, step: int) -> bool:
        """Called when drafting would not pay: now and then, ever more seldom, think well of it again. Returns
        whether this is such a step.

        Those who have as long a pause do so in the same step: many guesses at once cost little more than one,
        and what they need is kept for all of them at the same time.
        """
        if step % self.pause:
            return False
        self.pause, self.asked = min(2 * self.pause, _LONGEST_PAUSE), 0
        self.right, self.judged = max(FIRST_CHANCE, self.chance) * _HEART, _HEART
        return True

    def is_near(self, step: int) -> bool:
        """Whether a draft may come soon of a proposer that costs time: it paid lately, or a try comes."""
        until = self.pause - step % self.pause
        return step - self.asked_at < _COOLING or until <= max(_FIRST_PAUSE, self.pause // 8)

    def for_a_session(self) -> "Acceptance":
        """What a session begins with, if this is what came out in others."""
        return Acceptance(self.chance * DOUBT, pause=self.pause)

    def hope(self) -> None:
        """Give it another try."""
        self.right = max(self.right, _HOPE * self.judged)

    def missed(self) -> None:
        """It was asked and said nothing."""
        self.right *= _SILENCE

    def trust(self) -> None:
        """The caller has predicted what comes."""
        self.right, self.judged = _TRUST * DOUBT, DOUBT

    def is_asked(self, step: int) -> None:
        """Drafting is thought to pay. If it goes on so, the next try after it ceases to is soon."""
        self.asked_at, self.asked = step, self.asked + 1
        if self.asked > _COOLING:
            self.pause = _FIRST_PAUSE


class StepCosts:
    """Seconds of a step by its rows, as measured lately.

    What was not measured yet is thought to cost as much as the nearest smaller step that was. So it is tried,
    and known from then on: the next larger number first, because a much larger one may cost many steps.
    """

    def __init__(self) -> None:
        self._known: list[int] = []  # sorted
        self._seconds: dict[int, float] = {}
        self._learned_at: dict[int, int] = {}
        self._measurements: Counter[int] = Counter()
        self._steps = 0

    def learn(self, rows: int, seconds: float) -> None:
        """A step of so many rows has taken so long."""
        self._steps += 1
        bucket = _bucket(rows)
        if bucket not in self._seconds:
            insort(self._known, bucket)
        self._seconds[bucket] = blend(self._seconds.get(bucket, 0.0), seconds)
        self._learned_at[bucket] = self._steps
        self._measurements[bucket] += 1
        if self._steps % _STALE == 0:
            self._forget()

    def is_sure(self, rows: int) -> bool:
        """Whether steps of about so many rows were measured often enough lately."""
        return self._measurements[_bucket(rows)] >= _SURE

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

    def growth(self, rows: int) -> float:
        """How much of a step of so many rows one row more takes, where longer steps cost least."""
        base, longer = self.seconds(rows), self._known[bisect_right(self._known, rows) :]
        if base <= 0:
            return 0.0
        shares = [(self._seconds[known] / base - 1) / (known - rows) for known in longer]
        return max(0.0, min(shares, default=0.0))

    def doubt(self, rows: int) -> None:
        """Forget what longer steps took some time ago: the machine may have been slow just then."""
        self._keep(lambda known: known <= rows or self._steps - self._learned_at[known] < _FRESH)

    @property
    def farthest(self) -> int:
        """The most rows that may be tried; 0 before any were measured.

        Of few rows twice as many: where two cost much more than one, as on a device, eight may cost no more.
        """
        if not self._known:
            return 0
        most = self._known[-1]
        following = _ROWS[min(bisect_left(_ROWS, most) + 1, len(_ROWS) - 1)]
        return max(following, min(2 * most, _FEW_ROWS))

    def _forget(self) -> None:
        self._keep(lambda known: self._steps - self._learned_at[known] < _STALE)

    def _keep(self, wanted: Callable[[int], bool]) -> None:
        self._known = list(filter(wanted, self._known))
        self._seconds = {rows: self._seconds[rows] for rows in self._known}
        self._measurements = Counter({rows: self._measurements[rows] for rows in self._known})


def _bucket(rows: int) -> int:
    return _ROWS[min(bisect_left(_ROWS, rows), len(_ROWS) - 1)]


@dataclass(frozen=True)
class Price:
    """Seconds that a proposer takes: `a_round` for one more token of all sessions, and `a_step` for what is
    kept of every step for it."""

    a_round: float = 0.0
    a_step: float = 0.0


NOTHING = Price()


@dataclass(frozen=True)
class Offer:
    """What one session could draft: `most` tokens. If those before are right, one is with this `chance`."""

    chance: float
    most: int

    def values(self) -> list[float]:
        """The chance that each drafted token is kept, up to where it is no longer worth a thought."""
        if self.chance < _LEAST_CHANCE:
            return []
        kept = accumulate(repeat(self.chance, self.most), mul)
        return list(takewhile(lambda value: value >= _LEAST_VALUE, kept))


class DraftLength:
    """Decides for all sessions of a step together. `watching`: seconds that a step takes longer where hidden
    states are kept and shown."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self.watching = 0.0
        self._ahead = StepCosts()

    def learn(
        self, streams: int, rows: int, seconds: float, *, watched: bool = False, ahead: bool = False
    ) -> None:
        """A step of so many streams and `rows` has taken so long; `watched`: hidden states were kept;
        `ahead`: a device ran ahead, which it cannot do where somebody drafts.

        What watching takes must not count as the price of plain decoding, which goes without.
        """
        if ahead:
            self._ahead.learn(rows, seconds)
        elif not watched:
            self.costs.learn(rows, seconds)
        elif rows > streams:
            self.costs.learn(rows, max(0.0, seconds - self.watching))
        else:
            self.watching = blend(self.watching, max(0.0, seconds - self.costs.seconds(rows)))

    def counts(self, streams: int, offers: Sequence[Offer], price: Price = NOTHING) -> list[int]:
        """How many tokens to draft for each offer in a step of so many streams."""
        return self._best(streams, offers, price)[0]

    def least_chance(self, streams: int) -> float:
        """What is right less often is not worth a row in a step of so many streams."""
        return max(_LEAST_CHANCE, streams * self.costs.growth(streams))

    def most_a_second(self, streams: int, offer: Offer, price: Price = NOTHING) -> float:
        """Tokens a second where as much of an offer is drafted as pays."""
        return self._best(streams, [offer], price)[1]

    def _best(self, streams: int, offers: Sequence[Offer], price: Price) -> tuple[list[int], float]:
        guesses = [
            (-value, depth, place)
            for place, offer in enumerate(offers)
            for depth, value in enumerate(offer.values(), start=1)
        ]
        guesses.sort()  # the likeliest first, and none before the one that it follows
        gained = list(accumulate(-value for value, _, _ in guesses))
        rounds = list(accumulate((depth for _, depth, _ in guesses), max))
        best, most_a_second = 0, self._plain_rate(streams) * _LEAST_GAIN
        for last in _some(range(min(len(guesses), self.costs.farthest - streams))):
            proposing = rounds[last] * price.a_round + price.a_step
            rate = self._rate(streams + gained[last], streams + last + 1, proposing)
            if rate > most_a_second:
                best, most_a_second = last + 1, rate
        counts = Counter(place for _, _, place in guesses[:best])
        return [counts[place] for place in range(len(offers))], most_a_second

    def worth(self, streams: int, chance: float, count: int) -> float:
        """Seconds that a step of so many streams may wait for a draft of `count` tokens of one of them.

        So much less does a token then cost. Who does not wait loses less than the whole draft: it comes
        during the step, and often what follows its first token can still be used.
        """
        kept = sum(Offer(chance, count).values())
        drafted = self.costs.seconds(streams + count) * streams / (streams + kept)
        return max(0.0, self.costs.seconds(streams) - drafted)

    def saving(self, streams: int, offer: Offer, price: Price) -> float:
        """Seconds that a token of one of so many streams takes less where all of this offer is drafted."""
        kept = sum(offer.values())
        proposing = (offer.most * price.a_round + price.a_step) * streams / (streams + kept)
        return self.worth(streams, offer.chance, offer.most) - proposing

    def _plain_rate(self, streams: int) -> float:
        """Tokens a second where nothing is drafted: then a device may run ahead."""
        ahead = self._ahead.seconds(streams)
        return max(self._rate(streams, streams, 0.0), streams / ahead if ahead > 0 else 0.0)

    def _rate(self, tokens: float, rows: int, proposing: float) -> float:
        seconds = self.costs.seconds(rows) + proposing
        return tokens / seconds if seconds > 0 else float(tokens)


def _some(places: Sequence[int], most: int = 16) -> Sequence[int]:
    """A few of many, from the first to the last."""
    if len(places) <= most:
        return places
    return [places[round(index * (len(places) - 1) / (most - 1))] for index in range(most)]
