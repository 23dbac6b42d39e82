"""What is counted, logged and traced about a generate, from its acceptance to its end."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kakeya.engine.request import Request, RequestListener
from kakeya.engine.stream import EventStream
from kakeya.errors import (
    DeviceLost,
    InvalidArgument,
    InvariantViolation,
    NoFreeSlab,
    ResourceExhausted,
    SessionBusy,
    SessionNotFound,
    StorageFailed,
    Unavailable,
)
from kakeya.sessions.answers import Call
from kakeya.sessions.keeping import Keeping
from kakeya.sessions.limits import Limits
from kakeya.sessions.session import Session
from kakeya.tracing import GenerateSpan
from kakeya.types import DoneEvent, FailedEvent, TurnRecord

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
    DeviceLost: "unavailable",
}


def admission_result(error: BaseException) -> str:
    """The name under which a refused generate is counted."""
    return _REFUSALS.get(type(error), "error")


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
