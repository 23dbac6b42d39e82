"""One generate: its settings, its clock, its end, and who follows it."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kakeya.engine.constraint import Constraint
from kakeya.engine.observer import EngineObserver
from kakeya.engine.stream import EventStream
from kakeya.types import DoneEvent, FailedEvent, SamplingParams, StopReason, TokenEvent

log = logging.getLogger(__name__)


class Follower:
    """What whoever started a generate does around it, on the engine thread. By itself nothing."""

    def make_stream(self, wake: Callable[[], None]) -> EventStream:
        """The stream that the reader gets. Called by the thread that starts the generate."""
        return EventStream(wake)

    def answered(self, request: "Request") -> None:
        """The last event was computed; the reader has not seen it yet. Called once."""

    def ended(self, request: "Request") -> None:
        """It is over: `terminal` is final, and what the reader took is history. Called once."""


@dataclass
class Request:
    """One generate in flight, and its clock."""

    stream: EventStream
    max_tokens: int
    sampling: SamplingParams
    follower: Follower = field(default_factory=Follower)
    constraint: Constraint | None = None
    prompt_length: int = 0
    cached_tokens: int = 0
    started_at: float = field(default_factory=time.monotonic)
    computing_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    ended_at: float = 0.0
    terminal: DoneEvent | FailedEvent | None = None
    served: int = 0
    emitted: int = 0
    proposed: int = 0
    accepted: int = 0
    in_flight: int = 0
    """Tokens that launched steps will choose and nobody has read yet."""
    finished: bool = False

    @property
    def remaining(self) -> int:
        """How many tokens are still to be planned."""
        return self.max_tokens - self.emitted - self.in_flight

    @property
    def taken_length(self) -> int:
        """How long the history is with what the reader has taken."""
        return self.prompt_length + self.stream.taken

    @property
    def is_decoding(self) -> bool:
        """The prompt is computed, or will be when what is in flight has ended."""
        return self.emitted + self.in_flight > 0

    def planned(self, observer: EngineObserver) -> None:
        """A step is about to carry it."""
        if self.computing_at is None:
            self.computing_at = time.monotonic()
            observer.request_started(self.computing_at - self.started_at, self.cached_tokens)

    def judged(self, guessed: int, wrong: int, observer: EngineObserver) -> None:
        """The verifier has looked at guesses of the proposer."""
        self.proposed += guessed
        self.accepted += guessed - wrong
        observer.drafts(guessed, guessed - wrong)

    def emit(self, token: TokenEvent, observer: EngineObserver) -> None:
        """Put a token on the stream."""
        self._count_token(observer)
        self.stream.put(token)

    def finish(self, reason: StopReason) -> None:
        """The token just emitted was the last one."""
        self.finished = True
        self.stream.put(self.done(reason, self.emitted))

    def _count_token(self, observer: EngineObserver) -> None:
        now = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at = now
            observer.first_token(now - self.started_at)
        else:
            observer.next_token(now - self.last_token_at)
        self.last_token_at = now
        self.emitted += 1

    def done(self, reason: StopReason, tokens: int) -> DoneEvent:
        """The event that ends it, with `tokens` generated."""
        self.ended_at = time.monotonic()
        done = DoneEvent(
            stop_reason=reason,
            generated_token_count=tokens,
            prefill_duration_seconds=(self.first_token_at or self.ended_at) - self.started_at,
            total_duration_seconds=self.ended_at - self.started_at,
            cached_token_count=self.cached_tokens,
            accepted_draft_tokens=self.accepted,
            proposed_draft_tokens=self.proposed,
        )
        self._answer(done)
        return done

    def failed(self, error: Exception) -> FailedEvent:
        """The event that ends it by an error."""
        self.ended_at = time.monotonic()
        failed = FailedEvent(error)
        self._answer(failed)
        return failed

    def ended(self, observer: EngineObserver) -> None:
        """Nothing more will happen to it."""
        observer.request_ended(self.ended_at - self.started_at, started=self.computing_at is not None)
        self._tell(self.follower.ended)

    def _answer(self, terminal: DoneEvent | FailedEvent) -> None:
        is_first = self.terminal is None
        self.terminal = terminal
        if is_first:
            self._tell(self.follower.answered)

    def _tell(self, hear: "Callable[[Request], None]") -> None:
        """A follower's errors stay its own."""
        try:
            hear(self)
        except Exception:
            log.exception("what should follow a generate failed")
