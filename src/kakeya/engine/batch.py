"""What one engine step computes: segments of consecutive tokens, each of one sequence."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kakeya.engine.recall import TurnRecall
from kakeya.engine.request import RUNNING, Request
from kakeya.engine.sampler import SampleRequest
from kakeya.engine.sequence import TokenSequence

PENDING = -1
"""In place of a token: the one that the step before, not read yet, chooses for this sequence."""


# Not frozen, because frozen ones are slower to make and every session has one in every step.
@dataclass(slots=True, eq=False)
class Segment:
    """Consecutive rows of one sequence: a prefill block, or its newest token and the draft after it."""

    sequence: TokenSequence
    start: int
    tokens: Sequence[int]
    draft_count: int
    logit_rows: int
    """How many of the last rows need next-token logits; 0 inside a prompt."""

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def draft(self) -> Sequence[int]:
        """The guesses among the tokens."""
        return self.tokens[self.rows - self.draft_count :]


@dataclass(slots=True, eq=False)
class PlannedSegment(Segment):
    """The part of a request that a step carries, and how many tokens the backend guesses behind it."""

    request: Request
    own_drafts: int = 0

    @property
    def is_stale(self) -> bool:
        """Whether its generate has ended since it was planned."""
        return self.request.state is not RUNNING

    def sample_requests(self, reach: int) -> list[SampleRequest]:
        """One for each logit row, as if the draft before it had been accepted.

        Penalties look back over `reach` tokens.
        """
        sampling, constraint = self.request.sampling, self.request.constraint
        if self.logit_rows == 1 and constraint is None and not self.draft_count:  # nearly always: be quick
            recent = self.sequence.tokens[-reach:] if sampling.has_penalties else ()
            return [SampleRequest(sampling, self.end, recent)]
        history = array("i")
        if self.logit_rows and sampling.has_penalties:
            history = self.sequence.tokens[-reach:]
            history.extend(self.draft)
        masks = self._masks()
        requests = []
        for row in range(self.logit_rows):
            known = len(history) - self.draft_count + row
            position = self.end - self.logit_rows + row + 1
            recent = history[max(0, known - reach) : max(0, known)]
            requests.append(SampleRequest(sampling, position, recent, masks[row]))
        return requests

    def _masks(self) -> Sequence[bytes | None]:
        """For each logit row the tokens that may be chosen there; None where all may."""
        constraint = self.request.constraint
        if constraint is None or not self.logit_rows:
            return [None] * self.logit_rows
        return constraint.masks(self.draft)

    def reserve(self) -> None:
        """Announce to its slab that the rows, and the guesses behind them, are about to be written."""
        self.sequence.slab.reserve(self.rows + self.own_drafts)

    def undo(self) -> None:
        """Back to before the step: unread tokens of earlier steps stay, these rows go."""
        if self.is_stale:
            return
        if self.logit_rows:
            self.request.in_flight -= 1 + self.own_drafts
        slab = self.sequence.slab
        if slab.committed == self.start:
            slab.rollback()
        slab.written = self.start

    def renewed(self) -> "PlannedSegment":
        """The same with its pending token filled in, once the step before has been judged."""
        if self.tokens[0] != PENDING:
            return self
        return replace(self, tokens=[self.sequence.tokens[self.start]])


@dataclass(slots=True, eq=False)
class RecallSegment(PlannedSegment):
    """Slots of the pinned region that are written anew. The history does not grow by them."""

    recall: TurnRecall = field(kw_only=True)

    def reserve(self) -> None:
        """Nothing is overwritten but what was copied before."""

    def undo(self) -> None:
        """The rows are computed again, into the same slots."""


def decode_segment(request: Request, draft: Sequence[int]) -> PlannedSegment:
    """The newest token and the guesses that follow it, all of whose logits are wanted."""
    sequence = request.sequence
    newest = PENDING if request.in_flight else sequence.tokens[-1]
    tokens = [newest, *draft]
    return PlannedSegment(sequence, sequence.slab.written, tokens, len(draft), len(tokens), request)


def prefill_segment(request: Request, block: int) -> PlannedSegment:
    """The next block of waiting tokens; the last one asks for the logits after it."""
    start, tokens, is_last = _next_block(request.sequence, block)
    return PlannedSegment(request.sequence, start, tokens, 0, 1 if is_last else 0, request)


def recall_segment(request: Request, recall: TurnRecall, block: int) -> RecallSegment:
    """The next slots that are written anew."""
    start, tokens = recall.next_rows(block)
    return RecallSegment(request.sequence, start, tokens, 0, 0, request, recall=recall)


def score_segment(sequence: TokenSequence, block: int) -> Segment:
    """The next block of waiting tokens, all of whose logits are wanted."""
    start, tokens, _ = _next_block(sequence, block)
    return Segment(sequence, start, tokens, 0, len(tokens))


def _next_block(sequence: TokenSequence, block: int) -> tuple[int, Sequence[int], bool]:
    """Where the next aligned block starts, its tokens, and whether it is the last.

    It is aligned because only whole blocks were computed before it.
    """
    start = sequence.slab.written
    tokens = sequence.tokens[start : start + block]
    return start, tokens, start + len(tokens) == len(sequence.tokens)
