"""What is counted, logged and traced about a generate, from its acceptance to its end."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kakeya.engine.constraint import Constraint
from kakeya.engine.engine import Engine
from kakeya.engine.request import Request, RequestListener
from kakeya.engine.stream import EventStream
from kakeya.errors import (
    DeviceLost,
    InvalidArgument,
    InvariantViolation,
    NoFreeSlab,
    ResourceExhausted,
    Restarting,
    SessionBusy,
    SessionNotFound,
    StorageFailed,
    Unavailable,
)
from kakeya.observer import EngineObserver
from kakeya.sessions.answers import Call
from kakeya.sessions.keeping import Keeping
from kakeya.sessions.limits import Limits
from kakeya.sessions.recording import RecordedStream
from kakeya.sessions.session import Session
from kakeya.tracing import GenerateSpan, Tracing
from kakeya.types import DoneEvent, FailedEvent, SamplingParams, TurnRecord

log = logging.getLogger(__name__)
_REFUSALS: dict[type[BaseException], str] = {
    InvalidArgument: "invalid",
    SessionNotFound: "not_found",
    SessionBusy: "busy",
    ResourceExhausted: "exhausted",
    NoFreeSlab: "exhausted",
    StorageFailed: "exhausted",
    InvariantViolation: "failed",
    Unavailable: "unavailable",
    Restarting: "unavailable",
    DeviceLost: "unavailable",
}


@contextmanager
def counting_admission(observer: EngineObserver) -> Iterator[None]:
    """Count a generate that the body starts as accepted, or under the name of what refused it."""
    try:
        yield
    except BaseException as error:
        observer.admission(_REFUSALS.get(type(error), "error"))
        raise
    observer.admission("accepted")


@dataclass
class GenerateListener(RequestListener):
    """One generate of a session, counted against its owner's quotas until it is answered."""

    session: Session
    call: Call
    limits: Limits
    keeping: Keeping
    recorded_events: int
    """How many events to keep for a repeat of the request id."""
    span: GenerateSpan | None = None

    def make_stream(self, wake: Callable[[], None]) -> EventStream:
        """A stream that records its events, if the call can be repeated."""
        return self.keeping.stream(self.session, self.call, wake, self.recorded_events)

    def refused(self, error: BaseException) -> None:
        """It was counted and then refused."""
        self.limits.end_request(self.session.owner, 0)
        if self.span is not None:
            self.span.refused(error)

    def answered(self, request: Request) -> None:
        # Before the reader sees the end, because it may start the next generate at once.
        self.limits.end_request(self.session.owner, request.emitted)

    def ended(self, request: Request) -> None:
        self.session.touch()
        assert request.terminal is not None
        self._log(request.terminal, request.stream.taken)
        self._keep_figures(request)
        if self.span is not None:
            self.span.end(request.terminal, request.prompt_length, request.stream.taken)
        self.keeping.rested(self.session)

    def _keep_figures(self, request: Request) -> None:
        tokens, sequence = request.stream.taken, request.sequence
        if tokens == 0 or not isinstance(request.terminal, DoneEvent):
            return
        self.session.turn_ended(
            TurnRecord(
                history_length=sequence.committed,
                computed_tokens=request.prompt_length - request.cached_tokens,
                generated_tokens=tokens,
                first_token_seconds=request.terminal.prefill_duration_seconds,
                seconds=request.terminal.total_duration_seconds,
                kv_live_bytes=self.session.live_bytes,
            )
        )

    def _log(self, terminal: DoneEvent | FailedEvent, tokens: int) -> None:
        ids = {"session_id": self.session.session_id, "request_id": self.call.request_id}
        if isinstance(terminal, FailedEvent):
            log.error(
                "generate failed", extra=ids | {"error": type(terminal.error).__name__, "tokens": tokens}
            )
            return
        log.info(
            "generate ended",
            extra=ids
            | {
                "stop_reason": terminal.stop_reason.value,
                "tokens": tokens,
                "cached_tokens": terminal.cached_token_count,
                "prefill_s": round(terminal.prefill_duration_seconds, 6),
                "total_s": round(terminal.total_duration_seconds, 6),
            },
        )


@dataclass(frozen=True)
class Generates:
    """Starts the generates of sessions, each with its listener, and tells what they gave once more."""

    engine: Engine
    limits: Limits
    keeping: Keeping
    tracing: Tracing | None
    recorded_events: int

    def start(
        self,
        session: Session,
        max_tokens: int,
        sampling: SamplingParams,
        call: Call,
        constraint: Constraint | None,
        prediction: Sequence[int],
    ) -> EventStream:
        """Raises what refuses it; then nothing is counted and nothing has changed."""
        self.limits.start_request(session.owner)
        listener = GenerateListener(session, call, self.limits, self.keeping, self.recorded_events)
        try:
            if self.tracing is not None:
                span = self.tracing.generate(session.session_id, call.request_id, max_tokens, sampling)
                listener.span = span
            with self.keeping.working(session) as sequence:
                return self.engine.generate(sequence, max_tokens, sampling, listener, constraint, prediction)
        except BaseException as error:
            listener.refused(error)
            raise

    def tell_again(self, session: Session, first: EventStream) -> EventStream:
        """What the reader of a first call took. Raises SessionBusy while that still generates."""
        stored = self.keeping.tell_again(session, first)
        if stored is not None:
            return stored
        assert isinstance(first, RecordedStream), "a call with a request id is recorded"
        if first.cancel_requested and not first.is_settled and session.sequence is not None:
            self.engine.rest(session.sequence)
        return first.replay()
