"""One generate as text: pieces while it runs, a report when it is over."""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kakeya.text import AnswerText
from kakeya.types import DoneEvent, Event, SamplingParams, StopReason, TokenEvent

if TYPE_CHECKING:
    from kakeya.engine.stream import EventStream
    from kakeya.runtime import Runtime


@dataclass(frozen=True)
class AnswerReport:
    """How an answer went. The reader took the times, except the prefill, which the engine took."""

    text: str
    stop_reason: StopReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    time_to_first_token_seconds: float | None
    prefill_seconds: float
    total_seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Speed after the first token; None when there were fewer than two."""
        if self.time_to_first_token_seconds is None or self.completion_tokens < 2:
            return None
        elapsed = self.total_seconds - self.time_to_first_token_seconds
        return (self.completion_tokens - 1) / elapsed if elapsed > 0 else None


class Answer:
    """Appends `token_ids` to a session and answers them. Iterate once for the pieces of text.

    `start` begins the work and raises what the engine raises; iterating starts it too. `cancel` may be called
    from any thread once it has started; the pieces then end soon. A reader who leaves early cancels, so the
    session rests however the iteration ends. `report` is set then, unless the engine failed.
    """

    def __init__(
        self,
        runtime: "Runtime",
        session_id: str,
        token_ids: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams,
        end_token_ids: Collection[int] = (),
    ) -> None:
        self._runtime = runtime
        self._session_id = session_id
        self._token_ids = token_ids
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._text = AnswerText(runtime.tokenizer, end_token_ids)
        self._stream: EventStream | None = None
        self._started_at = 0.0
        self._first_token_at: float | None = None
        self.report: AnswerReport | None = None

    @property
    def text(self) -> str:
        """What was said so far."""
        return self._text.text

    @property
    def closed(self) -> bool:
        """Whether the token that ends an answer is in the history."""
        return self._text.closed

    def start(self) -> "EventStream":
        """Append and begin to generate, if that was not done yet."""
        if self._stream is None:
            self._started_at = time.monotonic()
            self._runtime.append(self._session_id, self._token_ids)
            self._stream = self._runtime.generate(self._session_id, self._max_tokens, self._sampling)
        return self._stream

    def cancel(self) -> None:
        assert self._stream is not None, "what has not started cannot be cancelled"
        self._stream.cancel()

    def __iter__(self) -> Iterator[str]:
        events = iter(self.start())
        try:
            for event in events:
                if piece := self._take(event):
                    yield piece
        except GeneratorExit:
            self.cancel()
            for event in events:
                self._take(event)
            raise

    def _take(self, event: Event) -> str:
        if isinstance(event, TokenEvent):
            if self._first_token_at is None:
                self._first_token_at = time.monotonic()
            self._text.feed(event)
        elif isinstance(event, DoneEvent):
            self._text.finish()
        piece = self._text.ready().text
        if isinstance(event, DoneEvent):
            self.report = self._reported(event)
        return piece

    def _reported(self, done: DoneEvent) -> AnswerReport:
        first = self._first_token_at
        return AnswerReport(
            text=self.text,
            stop_reason=done.stop_reason,
            prompt_tokens=len(self._token_ids),
            completion_tokens=done.generated_token_count,
            cached_tokens=done.cached_token_count,
            time_to_first_token_seconds=None if first is None else first - self._started_at,
            prefill_seconds=done.prefill_duration_seconds,
            total_seconds=time.monotonic() - self._started_at,
        )
