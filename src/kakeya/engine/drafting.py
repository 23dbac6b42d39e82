"""The engine's side of the proposer seam: asks for guesses, shows hidden states, judges guesses.

A proposer that raises is left out from there on for the sessions concerned: it may cost speed,
never a request.
"""

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence as Tokens

from torch import Tensor

from kakeya.engine.batch import Segment
from kakeya.engine.constraint import is_last
from kakeya.engine.proposer import DraftRequest, DraftState, Proposer
from kakeya.engine.sampler import SampleRequest
from kakeya.engine.scheduler import request_of
from kakeya.engine.sequence import Sequence
from kakeya.types import TokenEvent

log = logging.getLogger(__name__)


class Drafter:
    """Talks to an optional proposer for the engine."""

    def __init__(self, proposer: Proposer | None, vocab_size: int) -> None:
        self._proposer = proposer
        self._vocab_size = vocab_size

    @property
    def is_active(self) -> bool:
        """There is a proposer, which wants to see every token before the next step is planned."""
        return self._proposer is not None

    @property
    def hidden_layers(self) -> Tokens[int]:
        return self._proposer.hidden_layers if self._proposer is not None else ()

    def new_state(self) -> DraftState | None:
        return self._proposer.new_state() if self._proposer is not None else None

    def restore(self, tensors: Mapping[str, Tensor]) -> DraftState | None:
        """The exported state; a fresh one when the session was exported without a proposer."""
        if self._proposer is None or not tensors:
            return self.new_state()
        return self._proposer.restore(tensors)

    def propose(
        self, ready: Tokens[Sequence], limit_of: Callable[[Sequence, int], int]
    ) -> Mapping[int, Tokens[int]]:
        """Guesses by id(sequence), for those that are decoding and have room for one."""
        if self._proposer is None:
            return {}
        wanting: list[Sequence] = []
        requests: list[DraftRequest] = []
        for sequence in ready:
            limit = limit_of(sequence, self._proposer.max_draft)
            if sequence.draft is not None and sequence.is_decoding and limit > 0:
                wanting.append(sequence)
                requests.append(DraftRequest(sequence.draft, sequence.tokens, limit))
        if not requests:
            return {}
        try:
            guesses = self._proposer.propose(requests)
        except Exception:
            log.exception("the proposer failed; its sessions go on without drafts")
            for sequence in wanting:
                sequence.draft = None
            return {}
        return {
            id(sequence): self._valid_prefix(guess[: request.limit])
            for sequence, request, guess in zip(wanting, requests, guesses, strict=True)
        }

    def observe(self, segment: Segment, hidden: Mapping[int, Tensor], rows: slice) -> None:
        """Show the proposer the hidden states of a segment's rows that stay."""
        draft = segment.sequence.draft
        if self._proposer is None or draft is None:
            return
        try:
            self._proposer.observe(draft, segment.start, {layer: h[rows] for layer, h in hidden.items()})
        except Exception:
            log.exception("the proposer failed; the session goes on without drafts")
            segment.sequence.draft = None

    def _valid_prefix(self, guess: Tokens[int]) -> Tokens[int]:
        """Up to the first guess that is no token id."""
        for index, token in enumerate(guess):
            if not 0 <= token < self._vocab_size:
                return guess[:index]
        return guess


def accepted(segment: Segment, sampled: Tokens[TokenEvent]) -> Tokens[TokenEvent]:
    """The longest prefix of the draft that the sampler chose itself plus the token after it, up to the end.

    Tells the request's constraint of them.
    """
    sequence, draft = segment.sequence, segment.draft
    constraint = request_of(sequence).constraint
    if constraint is None and not draft:
        return sampled
    for index, token in enumerate(sampled):
        if constraint is not None:
            constraint.advance([token.token_id])
        stops = is_last(token.token_id, sequence.eos_token_ids, constraint)
        if stops or index == len(draft) or token.token_id != draft[index]:
            return sampled[: index + 1]
    return sampled


def sample_requests(segment: Segment, reach: int) -> list[SampleRequest]:
    """One request for each logit row, as if the draft before it had been accepted.

    Penalties look back over `reach` tokens.
    """
    request = request_of(segment.sequence)
    sampling = request.sampling
    if segment.logit_rows == 1 and request.constraint is None and not sampling.has_penalties:
        return [SampleRequest(sampling, segment.end)]
    history = array("i")
    if segment.logit_rows and sampling.has_penalties:
        history = segment.sequence.tokens[-reach:]
        history.extend(segment.draft)
    masks = _masks(segment)
    requests = []
    for row in range(segment.logit_rows):
        known = len(history) - segment.draft_count + row
        position = segment.end - segment.logit_rows + row + 1
        recent = history[max(0, known - reach) : max(0, known)]
        requests.append(SampleRequest(sampling, position, recent, masks[row]))
    return requests


def _masks(segment: Segment) -> Tokens[bytes | None]:
    """For each logit row the tokens that may be chosen there; None where all may."""
    constraint = request_of(segment.sequence).constraint
    if constraint is None or not segment.logit_rows:
        return [None] * segment.logit_rows
    return constraint.masks(segment.draft)
