"""The engine's side of the proposer seam: asks for guesses, shows hidden states, judges guesses.

Proposers stand in a row: who has no guess for a session leaves it to the next. A proposer that raises is left
out from there on for the sessions concerned: it may cost speed, never a request.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kakeya.engine.batch import PlannedSegment, Segment
from kakeya.engine.blend import blend
from kakeya.engine.constraint import is_last
from kakeya.engine.draft_length import DOUBT, Acceptance, DraftLength, Offer
from kakeya.engine.proposer import DraftRequest, DraftState, Proposer
from kakeya.engine.request import Request
from kakeya.engine.session_drafts import Seat, SessionDrafts
from kakeya.types import TokenEvent

log = logging.getLogger(__name__)

_FIRST_CHANCE = 0.75  # of a proposer that nobody has tried
_TRY = 2  # tokens that are drafted to see whether a proposer has become better
LimitOf = Callable[[Request, int], int]


@dataclass
class _Guess:
    """What one proposer guessed for one request."""

    request: Request
    place: int
    tokens: Sequence[int]

    @property
    def acceptance(self) -> Acceptance:
        return _drafts(self.request).seats[self.place].acceptance

    @property
    def offer(self) -> Offer:
        return Offer(self.acceptance.chance, len(self.tokens))


class Drafter:
    """Talks to the proposers for the engine. `length` None drafts all that they guess.

    While no guess has a chance it rests for `rest_steps` steps at a time, and a device may run ahead.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        vocab_size: int,
        length: DraftLength | None = None,
        rest_steps: int = 0,
    ) -> None:
        self._proposers, self._vocab_size, self._length = proposers, vocab_size, length
        self._rest_steps = rest_steps if length is not None else 0
        self._resting = 0
        self._round_seconds = [0.0] * len(proposers)
        self._proposing_seconds = 0.0  # before the last step
        self._overall = [Acceptance(right=_FIRST_CHANCE * DOUBT) for _ in proposers]  # in all sessions
        self.hidden_layers = sorted({layer for each in proposers for layer in each.hidden_layers})

    def new_drafts(self) -> SessionDrafts:
        return SessionDrafts([self._seat(each, each.new_state()) for each in self._proposers])

    def restore(self, tensors: Mapping[str, Tensor]) -> SessionDrafts:
        """The exported state; a fresh one for a proposer that the session was exported without."""
        return SessionDrafts([self._restored(each, tensors) for each in self._proposers])

    # Before a step.

    def expect(self, request: Request) -> None:
        """A generate begins. What its caller predicts is drafted from the first token on."""
        self._resting = 0
        if request.prediction and request.sequence.draft is not None:
            for seat, proposer in zip(request.sequence.draft.seats, self._proposers, strict=True):
                if proposer.is_free:
                    seat.acceptance.trust()

    def propose(self, ready: Sequence[Request], limit_of: LimitOf) -> Mapping[Request, Sequence[int]]:
        """Guesses for requests that are decoding and have room for one: as many tokens of each as pay."""
        if self.rest():
            return {}
        began = time.perf_counter()
        # What a proposer is told must be whole: nothing may be on its way.
        streams = [request for request in ready if request.is_decoding and not request.in_flight]
        guesses: list[_Guess] = []
        waiting = streams
        for place in range(len(self._proposers)):
            guesses += self._ask(place, waiting, limit_of, len(streams))
            guessed = {guess.request for guess in guesses}
            waiting = [request for request in streams if request not in guessed]
        counts = self._counts(len(streams), guesses)
        drafts: dict[Request, Sequence[int]] = {}
        for guess, count in zip(guesses, counts, strict=True):
            if count:
                _drafts(guess.request).drafted_by = guess.place
                drafts[guess.request] = guess.tokens[:count]
            else:
                guess.acceptance.watched = len(guess.request.sequence.tokens), guess.tokens
        if streams and not any(map(_has_a_chance, streams)):
            self._resting = self._rest_steps
        self._proposing_seconds = time.perf_counter() - began
        return drafts

    @property
    def is_resting(self) -> bool:
        """Whether nothing is drafted in the next steps, and nobody looks at hidden states."""
        return self._resting > 0 and not self.hidden_layers

    def rest(self) -> bool:
        """Whether nothing is drafted in the step that is planned now."""
        self._resting = max(0, self._resting - 1)
        self._proposing_seconds = 0.0
        return self._resting > 0

    def _ask(self, place: int, waiting: Sequence[Request], limit_of: LimitOf, streams: int) -> list[_Guess]:
        """What the proposer at `place` guesses for those that have no guess yet."""
        proposer = self._proposers[place]
        may_nap = self._length is not None and proposer.is_free and not self._rest_steps
        limits: dict[Request, int] = {}
        for request in waiting:
            seat, tokens = _drafts(request).seats[place], request.sequence.tokens
            seat.acceptance.watch(tokens)
            if seat.state is None or (may_nap and seat.acceptance.naps(len(tokens))):
                continue
            if limit := limit_of(request, proposer.max_draft):
                limits[request] = limit
        if self._length is not None and not proposer.is_free:
            limits = self._worthwhile(place, limits, streams)
        return self._guesses(place, limits) if limits else []

    def _guesses(self, place: int, limits: Mapping[Request, int]) -> list[_Guess]:
        """Its guesses for these requests. Notes how long one token for all of them took it."""
        proposer, began = self._proposers[place], time.perf_counter()
        try:
            found = proposer.propose([_draft_request(each, place, limit) for each, limit in limits.items()])
            pairs = list(zip(limits.items(), found, strict=True))
        except Exception:
            log.exception("the proposer %s failed; its sessions go on without it", proposer.name)
            for request in limits:
                _drafts(request).seats[place].fail()
            return []
        if all(map(len, found)):  # who still reads a history takes longer than for a guess
            seconds = (time.perf_counter() - began) / max(map(len, found))
            self._round_seconds[place] = blend(self._round_seconds[place], seconds)
        guesses = ((request, self._valid_prefix(tokens[:limit])) for (request, limit), tokens in pairs)
        return [_Guess(request, place, tokens) for request, tokens in guesses if tokens]

    def _worthwhile(self, place: int, limits: Mapping[Request, int], streams: int) -> dict[Request, int]:
        """How many tokens to ask of a proposer that takes time. One that does not pay is tried at times."""
        assert self._length is not None
        seats = [_drafts(request).seats[place].acceptance for request in limits]
        offers = [Offer(seat.chance, limit) for seat, limit in zip(seats, limits.values(), strict=True)]
        counts = self._length.counts(streams, offers, self._round_seconds[place])
        asked = {}
        for (request, limit), acceptance, count in zip(limits.items(), seats, counts, strict=True):
            if count:
                acceptance.has_paid()
                asked[request] = count
            elif acceptance.is_due():
                asked[request] = min(limit, _TRY)
        return asked

    def _counts(self, streams: int, guesses: Sequence[_Guess]) -> Sequence[int]:
        """How much of each guess is drafted: all of what a proposer that takes time was asked for."""
        if self._length is None or not guesses:
            return [len(guess.tokens) for guess in guesses]
        free = [guess for guess in guesses if self._proposers[guess.place].is_free]
        counts = dict(zip(map(id, free), self._length.counts(streams, [g.offer for g in free]), strict=True))
        return [counts.get(id(guess), len(guess.tokens)) for guess in guesses]

    def _valid_prefix(self, guess: Sequence[int]) -> Sequence[int]:
        for index, token in enumerate(guess):
            if not 0 <= token < self._vocab_size:
                return guess[:index]
        return guess

    # After a step.

    def learn(self, rows: int, seconds: float) -> None:
        """A step of streams alone has taken so long, with its proposing."""
        if self._length is not None:
            self._length.costs.learn(rows, seconds - self._proposing_seconds)

    def judged(self, segment: PlannedSegment, accepted: int) -> None:
        """The verifier kept so many tokens of a segment's draft."""
        drafts = _drafts(segment.request)
        seat = drafts.seats[drafts.drafted_by]
        for acceptance in (seat.acceptance, self._overall[drafts.drafted_by]):
            acceptance.count(accepted, int(accepted < segment.draft_count))
        segment.request.count_drafts(seat.name, segment.draft_count, accepted)

    def observe(self, segment: Segment, hidden: Mapping[int, Tensor], rows: slice) -> None:
        """Show the proposers the hidden states of a segment's rows that stay."""
        drafts = segment.sequence.draft
        if drafts is None:
            return
        for seat, proposer in zip(drafts.seats, self._proposers, strict=True):
            shown = {layer: hidden[layer][rows] for layer in proposer.hidden_layers}
            if shown:
                seat.let(partial(_show, proposer, segment.start, shown))

    # Sessions.

    def _seat(self, proposer: Proposer, state: DraftState) -> Seat:
        if proposer.is_free:
            return Seat(proposer.name, state, Acceptance())
        # One that costs time is asked at once: it is thought to be as good as it was in other sessions.
        chance = self._overall[self._proposers.index(proposer)].chance
        return Seat(proposer.name, state, Acceptance(right=chance * DOUBT))

    def _restored(self, proposer: Proposer, tensors: Mapping[str, Tensor]) -> Seat:
        prefix = f"{proposer.name}."
        own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        return self._seat(proposer, proposer.restore(own) if own else proposer.new_state())


def _show(proposer: Proposer, start: int, shown: Mapping[int, Tensor], state: DraftState) -> None:
    proposer.observe(state, start, shown)


def _has_a_chance(request: Request) -> bool:
    seats = _drafts(request).seats
    return any(seat.state is not None and seat.acceptance.has_a_chance for seat in seats)


def _drafts(request: Request) -> SessionDrafts:
    drafts = request.sequence.draft
    assert drafts is not None, "only sessions with a proposer draft"
    return drafts


def _draft_request(request: Request, place: int, limit: int) -> DraftRequest:
    state, sequence = _drafts(request).seats[place].state, request.sequence
    assert state is not None, "a proposer that has failed is not asked"
    return DraftRequest(
        state, sequence.tokens, limit, request.sampling, request.prompt_length, request.prediction
    )


def accepted(segment: PlannedSegment, sampled: Sequence[TokenEvent]) -> Sequence[TokenEvent]:
    """The longest prefix of the draft that the sampler chose itself plus the token after it, up to the end.

    Tells the request's constraint of them.
    """
    draft, constraint = segment.draft, segment.request.constraint
    if constraint is None and not draft:
        return sampled
    for index, token in enumerate(sampled):
        if constraint is not None:
            constraint.advance([token.token_id])
        stops = is_last(token.token_id, segment.sequence.eos_token_ids, constraint)
        if stops or index == len(draft) or token.token_id != draft[index]:
            return sampled[: index + 1]
    return sampled
