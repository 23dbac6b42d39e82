"""One generate: its settings, its clock, and its life from the queue to its end.

    queued ──start──▶ running ──finish──▶ finished ──release_if_read──▶ over
      │                  │                   │                           ▲
      └──────────────────┴─────── cancel, fail, abandon ─────────────────┘

    queued     accepted; no step has carried it
    running    steps carry it: its prompt first, then its tokens one by one, which go to the stream
    finished   the last token is on the stream and the done event behind it; the reader has not taken them all
    over       what the reader took is history, the rest is forgotten, and the sequence rests

A token is history once the reader has taken it. So a cancel keeps what was taken, and a generate whose last
token was taken has ended by itself: it is over with its own done event, whatever is asked of it then.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property

from kakeya.engine.constraint import Constraint, LeastLength, is_last
from kakeya.engine.recall import TurnRecall
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.stream import EventStream
from kakeya.errors import InvalidArgument, InvariantViolation, StepFailed
from kakeya.types import DoneEvent, FailedEvent, SamplingParams, StopReason, TokenEvent

log = logging.getLogger(__name__)


class State(Enum):
    """Where a request is in its life."""

    QUEUED = auto()
    RUNNING = auto()
    FINISHED = auto()
    OVER = auto()


# Read several times a token: a module's name is found in a tenth of the time of `State.QUEUED`.
QUEUED, RUNNING, FINISHED, OVER = State


class RequestListener:
    """Is called around a generate, on the engine thread. The base class does nothing."""

    def make_stream(self, wake: Callable[[], None]) -> EventStream:
        """The stream that the reader gets. Called by the thread that starts the generate."""
        return EventStream(wake)

    def answered(self, request: "Request") -> None:
        """The last event was computed; the reader has not seen it yet. Called once."""

    def ended(self, request: "Request") -> None:
        """It is over: `terminal` is final, and what the reader took is history. Called once."""


def _leave_nothing(request: "Request") -> None:
    """Nobody has it in flight."""


@dataclass(eq=False)
class Request:
    """One generate in flight, and its clock. Owned by the engine thread."""

    sequence: TokenSequence
    stream: EventStream
    max_tokens: int
    sampling: SamplingParams
    listener: RequestListener = field(default_factory=RequestListener)
    constraint: Constraint | None = None
    prediction: Sequence[int] = ()
    """What the caller expects as the answer; empty where nothing is expected."""
    state: State = QUEUED
    prompt_length: int = 0
    cached_tokens: int = 0
    queued_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    ended_at: float = 0.0
    terminal: DoneEvent | FailedEvent | None = None
    served: int = 0
    number: int = 0
    """The how manieth of the scheduler's requests it is."""
    patience: int = 0
    """Prompt tokens of its owner that may still be computed before its own, though they came later."""
    matched: int = 0
    """First tokens of the history that other sessions were seen to have computed."""
    emitted: int = 0
    proposed: int = 0
    accepted: int = 0
    in_flight: int = 0
    """Tokens of launched steps that the host has not read yet."""
    recall: TurnRecall | None = None
    """What it brings back of the session's past; None where it is not to."""
    _leave: "Callable[[Request], None]" = _leave_nothing

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end it."""
        own = frozenset() if self.sampling.ignore_eos else self.sequence.eos_token_ids
        return own.union(self.sampling.stop_token_ids)

    @property
    def remaining(self) -> int:
        """How many tokens are still to be planned."""
        return self.max_tokens - self.emitted - self.in_flight

    @property
    def taken_length(self) -> int:
        """How long the history is with what the reader has taken."""
        return self.prompt_length + self.stream.taken

    @property
    def is_plain(self) -> bool:
        """Whether a device can choose its tokens by itself."""
        return self.constraint is None and self.sampling.is_plain

    @property
    def is_decoding(self) -> bool:
        """The prompt is computed, or will be when what is in flight has ended."""
        return self.emitted + self.in_flight > 0

    # From the queue to the last token.

    def queue(self, leave: "Callable[[Request], None]") -> None:
        """Go on from the committed history of the sequence, which rests no more.

        `leave` is called when the request is over.
        """
        self._leave = leave
        self.prompt_length, self.cached_tokens = self.sequence.committed, self.sequence.slab.written
        self.sequence.request = self
        self.sequence.observer.request_queued()

    def start(self) -> None:
        """The first step is about to carry it."""
        self.state = RUNNING
        self.started_at = time.monotonic()
        self.sequence.observer.request_started(self.started_at - self.queued_at, self.cached_tokens)

    def hold_to_least_length(self, vocab_size: int) -> None:
        """Choose no end token before `min_tokens`. Call it once, before it is queued. Raises InvalidArgument
        when that is more than may be generated at all."""
        least = self.sampling.min_tokens
        if least > self.max_tokens:
            raise InvalidArgument(f"min_tokens must be at most max_tokens, {self.max_tokens}, got {least}")
        if least and self.end_token_ids:
            self.constraint = LeastLength(least, self.end_token_ids, vocab_size, self.constraint)

    def advance(self, token_id: int) -> bool:
        """Tell the constraint of a chosen token. Whether the generate ends with it."""
        if self.constraint is not None:
            self.constraint.advance([token_id])
            if isinstance(self.constraint, LeastLength) and self.constraint.is_over:
                self.constraint = self.constraint.inner  # a device may choose by itself again
        return self.ends_with(token_id)

    def ends_with(self, token_id: int) -> bool:
        """Whether the generate ends with this token, of which the constraint was told."""
        return is_last(token_id, self.end_token_ids, self.constraint)

    def count_drafts(self, proposer: str, proposed: int, accepted: int) -> None:
        """The verifier has looked at guesses of a proposer."""
        self.proposed += proposed
        self.accepted += accepted
        self.sequence.observer.drafts(proposer, proposed, accepted)

    def emit(self, token: TokenEvent) -> None:
        """Put a token on the stream."""
        now = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at = now
            self.stream.cached_tokens = self.cached_tokens
            self.sequence.observer.first_token(now - self.queued_at)
        else:
            self.sequence.observer.next_token(now - self.last_token_at)
        self.last_token_at = now
        self.emitted += 1
        self.stream.put(token)

    def finish(self, reason: StopReason) -> None:
        """The token just emitted was the last one."""
        self.state = FINISHED
        self.stream.put(self._done(reason, self.emitted))

    # To the end.

    def release_if_read(self) -> None:
        """A finished request is over once its reader has taken the last token."""
        if self.state is not FINISHED or self.stream.unread_after_pause():
            return
        if self.stream.cancel_requested:  # its end may never come by itself
            self.cancel()
            return
        self.sequence.commit()
        self._end()

    def cancel(self) -> None:
        """Keep what the reader has taken, forget the rest."""
        self.stream.cut(self._end_of_cancelled)
        self._take_back()

    def fail(self, error: Exception) -> None:
        """End by an error of its own step; what the reader has taken stays."""
        if isinstance(error, InvariantViolation):
            self.sequence.fail(error)
            return
        log.error("a generate failed", exc_info=error)
        failure = error if isinstance(error, StepFailed) else StepFailed(f"the step failed: {error!r}")
        self.stream.cut(lambda taken: self._failed(failure))
        self._take_back()

    def abandon(self, error: Exception) -> None:
        """End by an error and leave the sequence as it is: it is broken, or the engine is."""
        self.stream.cut(lambda taken: self._failed(error))
        self._end()

    def bury(self, error: Exception) -> None:
        """End with a dead engine. An answer that is whole can still be read."""
        try:
            if self.state is FINISHED:
                self._end()
            else:
                self.abandon(error)
        except Exception:
            log.exception("a request could not be wound back")

    def _take_back(self) -> None:
        """End with a stream that was cut: what the reader took is history, the rest is forgotten."""
        try:
            self.sequence.commit()
        except InvariantViolation as error:
            self.sequence.fail(error)
            return
        if self.recall is not None:
            self.recall.end(self.stream.taken)
        self.sequence.rollback()
        self._end()

    def _end(self) -> None:
        self.state = OVER
        if self.recall is not None:
            self.recall.leave()
        if self.sequence.recall is not None and self.stream.taken:
            self.sequence.recall.answered(self.sequence.committed, self._recall_seconds)
        self._leave(self)
        self.sequence.request = None
        started = self.started_at is not None
        self.sequence.observer.request_ended(self.ended_at - self.queued_at, started=started)
        self._tell(self.listener.ended)

    # The event that ends it.

    def _end_of_cancelled(self, taken: int) -> DoneEvent | FailedEvent:
        if self.state is FINISHED and taken == self.emitted and self.terminal is not None:
            return self.terminal  # the reader has every token; only the done event is missing
        return self._done(StopReason.CANCELLED, taken)

    def _done(self, reason: StopReason, tokens: int) -> DoneEvent:
        self.ended_at = time.monotonic()
        recalled = self.sequence.slab.recalled if tokens else ()
        done = DoneEvent(
            stop_reason=reason,
            generated_token_count=tokens,
            prefill_duration_seconds=(self.first_token_at or self.ended_at) - self.queued_at,
            total_duration_seconds=self.ended_at - self.queued_at,
            cached_token_count=self.cached_tokens,
            accepted_draft_tokens=self.accepted,
            proposed_draft_tokens=self.proposed,
            recalled=recalled,
            recalled_token_ids=self.sequence.tokens_of(recalled),
            recall_duration_seconds=self._recall_seconds,
        )
        self._answer(done)
        return done

    @property
    def _recall_seconds(self) -> float:
        return self.recall.seconds if self.recall is not None else 0.0

    def _failed(self, error: Exception) -> FailedEvent:
        self.ended_at = time.monotonic()
        failed = FailedEvent(error)
        self._answer(failed)
        return failed

    def _answer(self, terminal: DoneEvent | FailedEvent) -> None:
        is_first = self.terminal is None
        self.terminal = terminal
        if is_first:
            self._tell(self.listener.answered)

    def _tell(self, hear: "Callable[[Request], None]") -> None:
        """A listener's errors stay its own."""
        try:
            hear(self)
        except Exception:
            log.exception("what should follow a generate failed")
