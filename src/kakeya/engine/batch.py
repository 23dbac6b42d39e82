"""What one engine step computes: segments of consecutive tokens, each of one sequence."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from kakeya.engine.sequence import Sequence


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of one sequence: a prefill block, or its newest token and the draft after it."""

    sequence: Sequence
    start: int
    tokens: Rows[int]
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
    def draft(self) -> Rows[int]:
        """The guesses among the tokens."""
        return self.tokens[self.rows - self.draft_count :]

    def undo(self) -> None:
        """Back to before the step: unread tokens of earlier steps stay, these rows go."""
        slab = self.sequence.slab
        if slab.committed == self.start:
            slab.rollback()
        slab.written = self.start


def decode_segment(sequence: Sequence, draft: Rows[int]) -> Segment:
    """The newest token and the guesses that follow it, all of whose logits are wanted."""
    tokens = [sequence.tokens[-1], *draft]
    return Segment(sequence, sequence.slab.written, tokens, len(draft), len(tokens))


def prefill_segment(sequence: Sequence, block: int) -> Segment:
    """The next canonical block of waiting tokens; the last one asks for the logits after it.

    Blocks are cut at fixed distances from where the uncomputed part began, because nothing but
    whole blocks is ever computed before the last one.
    """
    start = sequence.slab.written
    tokens = sequence.tokens[start : start + block]
    is_last = start + len(tokens) == len(sequence.tokens)
    return Segment(sequence, start, tokens, 0, 1 if is_last else 0)
