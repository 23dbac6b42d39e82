"""The engine's side of the proposer seam: asks for guesses, shows hidden states, judges guesses.

A proposer that raises is left out from there on for the sessions concerned: it may cost speed,
never a request.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from kakeya.engine.batch import PlannedSegment, Segment
from kakeya.engine.constraint import is_last
from kakeya.engine.proposer import DraftRequest, DraftState, Proposer
from kakeya.engine.request import Request
from kakeya.types import TokenEvent

log = logging.getLogger(__name__)


class Drafter:
    """Talks to a proposer for the engine."""

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self._proposer = proposer
        self._vocab_size = vocab_size

    @property
    def hidden_layers(self) -> Sequence[int]:
        return self._proposer.hidden_layers

    def new_state(self) -> DraftState:
        return self._proposer.new_state()

    def restore(self, tensors: Mapping[str, Tensor]) -> DraftState:
        """The exported state; a fresh one when the session was exported without a proposer."""
        return self._proposer.restore(tensors) if tensors else self.new_state()

    def propose(
        self, ready: Sequence[Request], limit_of: Callable[[Request, int], int]
    ) -> Mapping[Request, Sequence[int]]:
        """Guesses for the requests that are decoding and have room for one."""
        wanting: list[Request] = []
        asked: list[DraftRequest] = []
        for request in ready:
            limit, sequence = limit_of(request, self._proposer.max_draft), request.sequence
            if sequence.draft is not None and request.is_decoding and limit > 0:
                wanting.append(request)
                asked.append(DraftRequest(sequence.draft, sequence.tokens, limit))
        if not asked:
            return {}
        try:
            guesses = self._proposer.propose(asked)
        except Exception:
            log.exception("the proposer failed; its sessions go on without drafts")
            for request in wanting:
                request.sequence.draft = None
            return {}
        return {
            request: self._valid_prefix(guess[: draft.limit])
            for request, draft, guess in zip(wanting, asked, guesses, strict=True)
        }

    def observe(self, segment: Segment, hidden: Mapping[int, Tensor], rows: slice) -> None:
        """Show the proposer the hidden states of a segment's rows that stay."""
        draft = segment.sequence.draft
        if draft is None:
            return
        try:
            self._proposer.observe(draft, segment.start, {layer: h[rows] for layer, h in hidden.items()})
        except Exception:
            log.exception("the proposer failed; the session goes on without drafts")
            segment.sequence.draft = None

    def _valid_prefix(self, guess: Sequence[int]) -> Sequence[int]:
        for index, token in enumerate(guess):
            if not 0 <= token < self._vocab_size:
                return guess[:index]
        return guess


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
