"""How a generate ends: read to its end, cancelled, failed, or with its engine. On the engine thread.

What its reader has taken is history then; the rest is forgotten, and the sequence rests.
"""

import logging

from kakeya.engine.observer import EngineObserver
from kakeya.engine.scheduler import Scheduler, request_of
from kakeya.engine.sequence import Sequence
from kakeya.engine.slab import SlabPool
from kakeya.errors import InvariantViolation, SessionBusy, StepFailed, Unavailable
from kakeya.types import StopReason

log = logging.getLogger(__name__)


class Ending:
    """Ends the requests that the scheduler has in flight."""

    def __init__(self, scheduler: Scheduler, pool: SlabPool, observer: EngineObserver) -> None:
        self._scheduler, self._pool, self._observer = scheduler, pool, observer

    def settled(self, sequence: Sequence) -> Sequence:
        """The sequence itself, once all that its reader has taken is history.

        A finished request ends here, when its reader has taken the last token.
        """
        if sequence.error is not None:
            return sequence
        request = sequence.request
        try:
            self._commit_taken(sequence)
        except InvariantViolation as error:
            self.fail_sequence(sequence, error)
            return sequence
        if request is not None and request.finished and request.stream.unread_after_pause() == 0:
            self._commit_taken(sequence)
            self._release(sequence)
        return sequence

    def resting(self, sequence: Sequence) -> Sequence:
        """The sequence itself, if it is usable and not generating; a cancel asked for comes first."""
        if sequence.request is not None and sequence.request.stream.cancel_requested:
            self.cancel(sequence)
        if sequence.error is None and self.settled(sequence).request is not None:
            raise SessionBusy("the session is generating: read its stream to the end or cancel it")
        if sequence.error is not None:
            raise sequence.error
        return sequence

    def end_requests(self) -> None:
        """Cancel what its reader gave up, release what its reader has read to the end."""
        for sequence in list(self._scheduler.active):
            request = request_of(sequence)
            if request.stream.cancel_requested:
                self.cancel(sequence)
            elif request.finished or request.taken_length != sequence.committed:
                self.settled(sequence)

    def cancel(self, sequence: Sequence) -> None:
        request = request_of(sequence)
        request.stream.cut(lambda taken: request.done(StopReason.CANCELLED, taken))
        self._take_back(sequence)

    def _take_back(self, sequence: Sequence) -> None:
        """End a request whose stream was cut: what the reader took stays, the rest is forgotten."""
        try:
            self._commit_taken(sequence)
        except InvariantViolation as error:
            self.fail_sequence(sequence, error)
            return
        sequence.rollback()
        self._release(sequence)

    def _commit_taken(self, sequence: Sequence) -> None:
        sequence.commit_taken()
        self.count_evicted(sequence)

    def count_evicted(self, sequence: Sequence) -> None:
        if dropped := sequence.newly_dropped():
            self._observer.tokens_evicted(dropped)

    def _release(self, sequence: Sequence) -> None:
        """The request is over and the sequence rests."""
        request = request_of(sequence)
        self._scheduler.remove(sequence)
        sequence.request = None
        request.ended(self._observer)

    def fail_request(self, sequence: Sequence, error: Exception) -> None:
        if isinstance(error, InvariantViolation):
            self.fail_sequence(sequence, error)
            return
        log.error("a generate failed", exc_info=error)
        failure = error if isinstance(error, StepFailed) else StepFailed(f"the step failed: {error!r}")
        request = request_of(sequence)
        request.stream.cut(lambda taken: request.failed(failure))
        self._take_back(sequence)

    def give_up(self, sequence: Sequence, error: Exception) -> None:
        """End a request by an error, whatever state its sequence is in."""
        request = request_of(sequence)
        request.stream.cut(lambda taken: request.failed(error))
        self._release(sequence)

    def fail_sequence(self, sequence: Sequence, error: InvariantViolation) -> None:
        """The bookkeeping of this sequence is broken: fail it for good and free its slab."""
        log.error("a session failed", exc_info=error)
        sequence.fail(error)
        self._observer.invariant_violated(error.invariant)
        if sequence.request is not None:
            self.give_up(sequence, error)
        self._pool.release(sequence.slab)

    def bury(self, sequence: Sequence, error: Unavailable) -> None:
        """End a request of the dead engine. An answer that is whole can still be read."""
        try:
            if request_of(sequence).finished:
                self._release(sequence)
            else:
                self.give_up(sequence, error)
        except Exception:
            log.exception("a request could not be wound back")
