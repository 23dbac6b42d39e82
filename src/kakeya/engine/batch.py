"""What one engine step computes: segments of consecutive tokens, each of one sequence."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

from kakeya.engine.request import Request
from kakeya.engine.sequence import Sequence

PENDING = -1
"""In place of a token: the one that the step before, not read yet, chooses for this sequence."""


# Not frozen, which would make it dearer: every session has one in every step.
@dataclass(slots=True, eq=False)
class Segment:
    """Consecutive rows of one sequence: a prefill block, or its newest token and the draft after it."""

    sequence: Sequence
    start: int
    tokens: Rows[int]
    draft_count: int
    logit_rows: int
    """How many of the last rows need next-token logits; 0 inside a prompt."""
    request: Request | None = None
    """The generate it was planned for."""

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def draft(self) -> Rows[int]:
        """The guesses among the tokens."""
        return self.tokens[self.rows - self.draft_count :]

    @property
    def is_stale(self) -> bool:
        """Its generate has ended since it was planned: nobody waits for what it computes."""
        return self.sequence.request is not self.request or (
            self.request is not None and self.request.finished
        )

    def undo(self) -> None:
        """Back to before the step: unread tokens of earlier steps stay, these rows go."""
        if self.is_stale:
            return
        if self.request is not None and self.logit_rows:
            self.request.in_flight -= 1
        slab = self.sequence.slab
        if slab.committed == self.start:
            slab.rollback()
        slab.written = self.start

    def renewed(self) -> "Segment":
        """The same once more, with the token that was pending: by now the step before has been judged."""
        if self.tokens[0] != PENDING:
            return self
        return replace(self, tokens=[self.sequence.tokens[self.start]])


def decode_segment(sequence: Sequence, draft: Rows[int]) -> Segment:
    """The newest token and the guesses that follow it, all of whose logits are wanted."""
    request = sequence.request
    newest = PENDING if request is not None and request.in_flight else sequence.tokens[-1]
    tokens = [newest, *draft]
    return Segment(sequence, sequence.slab.written, tokens, len(draft), len(tokens), request)


def prefill_segment(sequence: Sequence, block: int) -> Segment:
    """The next canonical block of waiting tokens; the last one asks for the logits after it.

    Blocks are cut at fixed distances from where the uncomputed part began, because nothing but
    whole blocks is ever computed before the last one.
    """
    start = sequence.slab.written
    tokens = sequence.tokens[start : start + block]
    is_last = start + len(tokens) == len(sequence.tokens)
    return Segment(sequence, start, tokens, 0, 1 if is_last else 0, sequence.request)
