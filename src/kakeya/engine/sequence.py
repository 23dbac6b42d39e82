"""The engine's half of a session: its tokens, its slab and the generate that runs on it."""

import logging
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kakeya.engine.recall import Ranges, SessionRecall
from kakeya.engine.session_drafts import SessionDrafts
from kakeya.engine.slab import KVSlab
from kakeya.errors import InvariantViolation, SessionBusy, SessionNotFound
from kakeya.observer import UNOBSERVED, EngineObserver

if TYPE_CHECKING:
    from kakeya.engine.request import Request
    from kakeya.engine.shared_prompt import SharedPrompt

log = logging.getLogger(__name__)


class TokenSequence:
    """Token history over one slab. Owned by the engine thread.

    `tokens` holds the committed history, then tokens that were emitted and not yet taken by the reader. The
    newest committed token is never committed to the slab: the next turn begins with its logits, so it is
    computed then. A sequence rests when no `request` runs on it. Once it has an `error` it is unusable.
    `leave` is called before its slab is given away.
    """

    def __init__(
        self,
        slab: KVSlab,
        owner: str,
        eos_token_ids: Sequence[int],
        draft: SessionDrafts | None,
        observer: EngineObserver = UNOBSERVED,
        leave: "Callable[[TokenSequence], None]" = lambda sequence: None,
        recall: SessionRecall | None = None,
    ) -> None:
        self._leave = leave
        self.slab = slab
        self.owner = owner
        self.eos_token_ids = frozenset(eos_token_ids)
        self.draft = draft
        self.observer = observer
        self.tokens = array("i")
        self.committed = 0
        self.shareable = 0
        """How many first tokens were computed as any session would compute them."""
        self.copied = 0
        """Tokens that were copied from other sessions instead of computed."""
        self.recall = recall
        """None where nothing is ever brought back."""
        self.shared_prompt: SharedPrompt | None = None
        """Forks that wait for the same prompt."""
        self.is_lent = False
        """Others have its slab, or have given it away."""
        self.request: Request | None = None
        self.error: Exception | None = None
        self.inv1_violations = 0
        self.inv2_violations = 0
        self.inv4_violations = 0
        self._drops_reported = 0

    @property
    def dropped(self) -> int:
        """Committed tokens that the next one can no longer attend to."""
        return max(0, self.committed - self.slab.geometry.cache.capacity)

    def append(self, token_ids: Sequence[int]) -> None:
        """Extend the history; the tokens are computed by the next generate."""
        self.tokens.extend(token_ids)
        self.committed = len(self.tokens)
        self._report_evicted()

    def take_back(self, length: int) -> None:
        """Forget appended tokens that nothing was computed of."""
        self.leave_shared_prompt()
        del self.tokens[length:]
        self.committed = length
        self._drops_reported = self.dropped

    def restore(self, token_ids: Sequence[int]) -> None:
        """Take over a history whose evictions were counted where it was made."""
        self.tokens.extend(token_ids)
        self.committed = len(self.tokens)
        self._drops_reported = self.dropped

    def copy_from(self, other: "TokenSequence") -> None:
        """Become a copy of a resting sequence whose slab has the same pool and sink."""
        self.slab.copy_from(other.slab)
        self.restore(other.tokens)
        self.shareable = other.shareable
        self.replace_drafts(other.draft.fork() if other.draft is not None else None)

    def copy_prompt(self, other: "TokenSequence", length: int) -> None:
        """Take over the first `length` computed tokens of a sequence with the same history."""
        copied = length - self.slab.written
        self.slab.copy_from(other.slab, length)
        self.shareable = min(other.shareable, length)
        self.copied += copied
        if self.request is not None:
            self.request.cached_tokens += copied
        self.observer.prefix_copied(copied)

    def tokens_of(self, ranges: Ranges) -> tuple[tuple[int, ...], ...]:
        """What the history has there."""
        return tuple(tuple(self.tokens[each.start : each.end]) for each in ranges)

    def replace_drafts(self, draft: SessionDrafts | None) -> None:
        """Take over what proposers know of this history."""
        if self.draft is not None:
            self.draft.close()
        self.draft = draft

    def commit(self) -> None:
        """Make history of what the reader has taken. Raises InvariantViolation when the slab disagrees."""
        if self.request is not None:
            self.committed = self.request.taken_length
            if self.request.recall is not None:
                self.request.recall.settle(self.request.stream.taken)
        settled = min(max(self.committed - 1, 0), self.slab.written)
        if settled != self.slab.committed:
            self.slab.commit(settled)
        self._report_evicted()

    def settle(self) -> None:
        """Make history of what the reader has taken; a generate that was read to its end is then over."""
        if self.error is not None:
            return
        try:
            self.commit()
            if self.request is not None:
                self.request.release_if_read()
        except InvariantViolation as error:
            self.fail(error)

    def rest(self) -> None:
        """Make sure that no generate runs. A requested cancel is carried out first.

        Raises SessionBusy when one still runs, and the sequence's `error` if it has one.
        """
        if self.request is not None and self.request.stream.cancel_requested:
            self.request.cancel()
        self.settle()
        if self.error is not None:
            raise self.error
        if self.request is not None:
            raise SessionBusy("the session is generating: read its stream to the end or cancel it")
        self._audit()

    def _audit(self) -> None:
        """What it says of its slab is so."""
        try:
            if self.recall is not None:
                self.slab.check_recalled()
        except InvariantViolation as error:
            self.fail(error)
            raise

    def rollback(self) -> None:
        """Forget tokens that are not committed, here and in the slab and in the draft state."""
        del self.tokens[self.committed :]
        self.slab.rollback()
        if self.draft is not None:
            self.draft.rollback(self.slab.committed)

    def fail(self, error: InvariantViolation) -> None:
        """Its bookkeeping is broken: end what runs and free the slab. Unusable from here on."""
        log.error("a session failed", exc_info=error)
        self.inv1_violations += error.invariant == "INV-1"
        self.inv2_violations += error.invariant == "INV-2"
        self.inv4_violations += error.invariant == "INV-4"
        self.error = error
        self.observer.invariant_violated(error.invariant)
        if self.request is not None:
            self.request.abandon(error)
        self._release()

    def close(self) -> None:
        """Cancel what runs and free the slab. Unusable from here on."""
        self.settle()
        if self.request is not None:
            self.request.cancel()
        if self.error is None:
            self.error = SessionNotFound("the session is closed")
            self._release()

    def leave_shared_prompt(self) -> None:
        """Wait for no other sequence, and let none copy this one."""
        if self.shared_prompt is not None:
            self.shared_prompt.leave(self)

    def _release(self) -> None:
        self.leave_shared_prompt()
        self._leave(self)
        if self.draft is not None:
            self.draft.close()
        self.slab.pool.release(self.slab)

    def _report_evicted(self) -> None:
        dropped = self.dropped
        if dropped != self._drops_reported:
            before, self._drops_reported = self._drops_reported, dropped
            self.observer.tokens_evicted(dropped - before)
