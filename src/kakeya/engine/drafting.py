"""The engine's side of the proposer seam: asks for guesses, shows hidden states, judges guesses.

Proposers stand in a row: who has no guess for a session leaves it to the next. A proposer that raises is left
out from there on for the sessions concerned: it may cost speed, never a request.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import index

from torch import Tensor

from kakeya.engine.batch import PlannedSegment, Segment
from kakeya.engine.blend import blend
from kakeya.engine.draft_length import DOUBT, FIRST_CHANCE, Acceptance, DraftLength, Offer, Price
from kakeya.engine.proposer import DraftRequest, DraftState, Proposer, WorksAhead
from kakeya.engine.request import Request
from kakeya.engine.session_drafts import Seat, SessionDrafts
from kakeya.types import TokenEvent

log = logging.getLogger(__name__)

_SHORT_ANSWER = 16  # tokens
_PATIENCE, _FIRST_REST = 2, 8  # steps
_LATELY = 4  # steps: who has guessed so lately has little to read before a guess
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
        return Offer(self.acceptance.sure_chance, len(self.tokens))


class Drafter:
    """Talks to the proposers for the engine. `length` None drafts all that they guess.

    Where nothing is drafted it rests for some steps, twice as many each time up to `most_rest`, and a device
    may run ahead.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        vocab_size: int,
        length: DraftLength | None = None,
        most_rest: int = 0,
    ) -> None:
        self._proposers, self._vocab_size, self._length = proposers, vocab_size, length
        self._most_rest = most_rest if length is not None else 0
        self._next_rest = min(_FIRST_REST, self._most_rest)
        self._resting = self._idle = self._step = self._streams = 0
        self._watched = False  # whether hidden states of the last step were kept
        self._round_seconds = [0.0] * len(proposers)
        self._proposing_seconds = 0.0  # before the last step
        self._overall = [Acceptance(right=FIRST_CHANCE * DOUBT) for _ in proposers]  # in all sessions
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
        for place, proposer in enumerate(self._proposers):
            seat = _drafts(request).seats[place]
            seat.acceptance.watched = None  # what the client has said since was not to be guessed
            if isinstance(proposer, WorksAhead):
                seat.acceptance.hope()
                seat.let(partial(self._foretell, proposer, request, place))
            elif proposer.is_free and request.prediction:
                seat.acceptance.trust()

    def propose(self, ready: Sequence[Request], limit_of: LimitOf) -> Mapping[Request, Sequence[int]]:
        """Guesses for requests that are decoding and have room for one: as many tokens of each as pay."""
        if self.rest():
            return {}
        began = time.perf_counter()
        self._step += 1
        # What a proposer is told must be whole: nothing may be on its way.
        streams = [request for request in ready if request.is_decoding and not request.in_flight]
        self._streams = len(streams)
        drafts: dict[Request, Sequence[int]] = {}
        for place in range(len(self._proposers)):
            waiting = [request for request in streams if request not in drafts]
            guesses = self._ask(place, waiting, limit_of, len(streams))
            for guess, count in zip(guesses, self._counts(place, guesses, len(streams)), strict=True):
                if count:
                    _drafts(guess.request).drafted_by = place
                    drafts[guess.request] = guess.tokens[:count]
                else:
                    guess.acceptance.watched = len(guess.request.sequence.tokens), guess.tokens
        if streams:
            self._perhaps_rest(drafts)
        self._proposing_seconds = time.perf_counter() - began
        return drafts

    def _foretell(self, proposer: WorksAhead, request: Request, place: int, _: DraftState) -> None:
        proposer.expect(self._draft_request(request, place, self._proposers[place].max_draft, 1))

    def _perhaps_rest(self, drafts: Mapping[Request, Sequence[int]]) -> None:
        """What was guessed and not drafted is compared with what has come when the rest is over."""
        if drafts:
            self._idle, self._next_rest = 0, min(_FIRST_REST, self._most_rest)
            return
        self._idle += 1
        if self._idle >= _PATIENCE:
            self._resting, self._next_rest = self._next_rest, min(2 * self._next_rest, self._most_rest)

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
        proposer, length = self._proposers[place], self._length
        may_nap = length is not None and proposer.is_free and not self._most_rest
        least = length.least_chance(streams) if length is not None and may_nap else 0.0
        limits: dict[Request, int] = {}
        for request in waiting:
            seat, tokens = _drafts(request).seats[place], request.sequence.tokens
            if seat.state is None or seat.acceptance.naps(len(tokens), least, streams):
                continue
            seat.acceptance.watch(tokens)
            if limit := limit_of(request, proposer.max_draft):
                limits[request] = limit
        if length is not None and not proposer.is_free:
            limits = self._worthwhile(place, limits, streams)
        return self._guesses(place, limits, streams) if limits else []

    def _guesses(self, place: int, limits: Mapping[Request, int], streams: int) -> list[_Guess]:
        """Its guesses for these requests. Notes how long one token for all of them took it."""
        proposer, began = self._proposers[place], time.perf_counter()
        try:
            found = proposer.propose(
                [self._draft_request(each, place, limit, streams) for each, limit in limits.items()]
            )
            guessed = [
                self._valid_prefix(tokens, limit)
                for tokens, limit in zip(found, limits.values(), strict=True)
            ]
        except Exception:
            log.exception("the proposer %s failed; its sessions go on without it", proposer.name)
            for request in limits:
                _drafts(request).seats[place].fail()
            return []
        self._note_seconds(place, limits, guessed, time.perf_counter() - began)
        guesses = [_Guess(request, place, tokens) for request, tokens in zip(limits, guessed, strict=True)]
        if isinstance(proposer, WorksAhead):
            for guess in guesses:
                if not guess.tokens:
                    guess.acceptance.missed()
        return [guess for guess in guesses if guess.tokens]

    def _note_seconds(
        self, place: int, asked: Iterable[Request], found: Sequence[Sequence[int]], seconds: float
    ) -> None:
        """How long one token for all took. Who has a history to read first takes longer than for a guess."""
        seats = [_drafts(request).seats[place] for request in asked]
        if all(map(len, found)) and all(self._step - seat.guessed_at <= _LATELY for seat in seats):
            each = seconds / max(map(len, found))
            self._round_seconds[place] = blend(self._round_seconds[place], each)
        for seat, guess in zip(seats, found, strict=True):
            seat.guessed_at = self._step if guess else seat.guessed_at

    def _draft_request(self, request: Request, place: int, limit: int, streams: int) -> DraftRequest:
        seat, sequence, proposer = _drafts(request).seats[place], request.sequence, self._proposers[place]
        assert seat.state is not None, "a proposer that has failed is not asked"
        chance, length = seat.acceptance.chance, self._length
        asked = (seat.state, sequence.tokens, limit, request.sampling, request.prompt_length)
        waits = not proposer.is_free or isinstance(proposer, WorksAhead)
        if length is None or not waits:
            return DraftRequest(*asked, request.prediction, chance)
        worth = partial(length.worth, streams, chance)
        saving = length.saving(streams, Offer(chance, limit), self._price(place))
        patience = max(0.0, saving) * _expected_tokens(request)
        return DraftRequest(*asked, request.prediction, chance, worth, patience)

    def _worthwhile(self, place: int, limits: Mapping[Request, int], streams: int) -> dict[Request, int]:
        """How many tokens to ask of a proposer that takes time. One that does not pay is thought better of at
        times, and so tried, whatever steps with drafts took before."""
        assert self._length is not None
        seats = [_drafts(request).seats[place].acceptance for request in limits]
        offers = [Offer(seat.chance, limit) for seat, limit in zip(seats, limits.values(), strict=True)]
        counts = self._length.counts(streams, offers, self._price(place))
        asked = {}
        for request, acceptance, count in zip(limits, seats, counts, strict=True):
            if count:
                acceptance.is_asked(self._step)
                asked[request] = count
            elif acceptance.take_heart(self._step):
                self._length.costs.doubt(streams)
            self._overall[place].pause = acceptance.pause
        return asked

    def _counts(self, place: int, guesses: Sequence[_Guess], streams: int) -> Sequence[int]:
        """How much of each guess is drafted: all of what a proposer that takes time was asked for. What does
        not pay, or less than what another one would guess, is left to the next."""
        if self._length is None or not guesses or not self._proposers[place].is_free:
            return [len(guess.tokens) for guess in guesses]
        counts = self._length.counts(streams, [guess.offer for guess in guesses])
        return [
            0 if count and self._is_outdone(guess, streams) else count
            for guess, count in zip(guesses, counts, strict=True)
        ]

    def _is_outdone(self, guess: _Guess, streams: int) -> bool:
        """Whether a later one that takes time would make more tokens a second all the same."""
        assert self._length is not None
        most = self._length.most_a_second(streams, guess.offer)
        for place in range(guess.place + 1, len(self._proposers)):
            proposer, seat = self._proposers[place], _drafts(guess.request).seats[place]
            if seat.state is not None and not proposer.is_free:
                offer = Offer(seat.acceptance.chance, proposer.max_draft)
                if self._length.most_a_second(streams, offer, self._price(place)) > most:
                    return True
        return False

    def _valid_prefix(self, guess: Sequence[int], limit: int) -> Sequence[int]:
        """As many tokens as were asked for, up to one that is outside the vocabulary. Raises TypeError for
        what is no whole number."""
        tokens = [index(token) for token in guess[:limit]]
        return list(takewhile(lambda token: 0 <= token < self._vocab_size, tokens))

    # After a step.

    def learn(self, streams: int, rows: int, seconds: float, *, ahead: bool) -> None:
        """A step of streams alone has taken so long, with its proposing; `ahead`: the device ran ahead."""
        if self._length is not None:
            taken = seconds - self._proposing_seconds
            self._length.learn(streams, rows, taken, watched=self._watched, ahead=ahead)

    def judged(self, segment: PlannedSegment, accepted: int) -> None:
        """The verifier kept so many tokens of a segment's draft."""
        drafts = _drafts(segment.request)
        seat = drafts.seats[drafts.drafted_by]
        for acceptance in (seat.acceptance, self._overall[drafts.drafted_by]):
            acceptance.count(accepted, int(accepted < segment.draft_count))
        segment.request.count_drafts(seat.name, segment.draft_count, accepted)

    def layers_to_see(self, segments: Sequence[Segment]) -> Sequence[int]:
        """Layers whose outputs are to be kept of these segments, which costs time: none while no draft of
        whoever looks at them is near."""
        self._watched = self._watches(segments)
        return self.hidden_layers if self._watched else ()

    def _watches(self, segments: Sequence[Segment]) -> bool:
        if not self.hidden_layers:
            return False
        is_plain = all(segment.rows == 1 for segment in segments)
        if self._length is not None and is_plain and not self._length.costs.is_sure(len(segments)):
            return False  # a plain step is measured first
        return any(any(self._watchers(segment)) for segment in segments)

    def observe(self, segment: Segment, hidden: Mapping[int, Tensor], rows: slice) -> None:
        """Show the hidden states of a segment's rows that stay to whoever may draft for its session soon."""
        if hidden:
            for seat, proposer in self._watchers(segment):
                shown = {layer: hidden[layer][rows] for layer in proposer.hidden_layers}
                seat.let(partial(_show, proposer, segment.start, shown))

    def _watchers(self, segment: Segment) -> Iterator[tuple[Seat, Proposer]]:
        seats = segment.sequence.draft.seats if segment.sequence.draft else ()
        for place, (seat, proposer) in enumerate(zip(seats, self._proposers, strict=False)):
            if proposer.hidden_layers and self._is_near(place, seat, segment):
                yield seat, proposer

    def _is_near(self, place: int, seat: Seat, segment: Segment) -> bool:
        """Whether a draft may come soon: also behind a prompt, if it would pay for one stream more."""
        if self._length is None or self._proposers[place].is_free or seat.acceptance.is_near(self._step):
            return True
        if segment.rows == 1:
            return False
        offer = Offer(seat.acceptance.chance, self._proposers[place].max_draft)
        return any(self._length.counts(self._streams + 1, [offer], self._price(place)))

    def _price(self, place: int) -> Price:
        if self._length is None or not self._proposers[place].hidden_layers:
            return Price(self._round_seconds[place])
        return Price(self._round_seconds[place], self._length.watching)

    # Sessions.

    def _seat(self, proposer: Proposer, state: DraftState) -> Seat:
        if proposer.is_free and not isinstance(proposer, WorksAhead):
            return Seat(proposer.name, state, Acceptance())
        # One that costs time is asked at once: it is thought to be as good as it was in other sessions.
        overall = self._overall[self._proposers.index(proposer)]
        return Seat(proposer.name, state, overall.for_a_session())

    def _restored(self, proposer: Proposer, tensors: Mapping[str, Tensor]) -> Seat:
        prefix = f"{proposer.name}."
        own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        return self._seat(proposer, proposer.restore(own) if own else proposer.new_state())


def _expected_tokens(request: Request) -> int:
    """How long an answer goes on is not known. One that has had many tokens often has as many more."""
    return min(request.remaining, max(request.emitted, _SHORT_ANSWER))


def _show(proposer: Proposer, start: int, shown: Mapping[int, Tensor], state: DraftState) -> None:
    proposer.observe(state, start, shown)


def _drafts(request: Request) -> SessionDrafts:
    drafts = request.sequence.draft
    assert drafts is not None, "only sessions with a proposer draft"
    return drafts


def accepted(segment: PlannedSegment, sampled: Sequence[TokenEvent]) -> Sequence[TokenEvent]:
    """The longest prefix of the draft that the sampler chose itself plus the token after it, up to the end.

    Tells the request's constraint of them.
    """
    draft, request = segment.draft, segment.request
    if request.constraint is None and not draft:
        return sampled
    for place, token in enumerate(sampled):
        stops = request.advance(token.token_id)
        if stops or place == len(draft) or token.token_id != draft[place]:
            return sampled[: place + 1]
    return sampled
