"""One generate as text: pieces while it runs, a report when it is over."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kakeya.text import Detokenizer
from kakeya.types import DoneEvent, Event, SamplingParams, StopReason, TokenEvent

if TYPE_CHECKING:
    from kakeya.runtime import Runtime


@dataclass(frozen=True)
class AnswerReport:
    """How an answer went. Times are the reader's own, but for the engine's prefill."""

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

    `cancel` may be called from any thread; the pieces then end soon. However the iteration ends, the
    engine is done with the session: a reader who leaves early cancels. `report` is there afterwards,
    unless the engine failed.
    """

    def __init__(
        self,
        runtime: "Runtime",
        session_id: str,
        token_ids: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams,
    ) -> None:
        self._started = time.monotonic()
        self._first_token_at: float | None = None
        self._prompt_tokens = len(token_ids)
        self._detokenizer = Detokenizer(runtime.tokenizer)
        self._pieces: list[str] = []
        self.report: AnswerReport | None = None
        runtime.append(session_id, token_ids)
        self._stream = runtime.generate(session_id, max_tokens, sampling)

    @property
    def text(self) -> str:
        """What was said so far."""
        return "".join(self._pieces)

    def cancel(self) -> None:
        self._stream.cancel()

    def __iter__(self) -> Iterator[str]:
        events = iter(self._stream)
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
        piece = ""
        if isinstance(event, TokenEvent):
            if self._first_token_at is None:
                self._first_token_at = time.monotonic()
            piece = self._detokenizer.feed(event.token_id)
        elif isinstance(event, DoneEvent):
            piece = self._detokenizer.finish()
        self._pieces.append(piece)
        if isinstance(event, DoneEvent):
            self.report = self._reported(event)
        return piece

    def _reported(self, done: DoneEvent) -> AnswerReport:
        first = self._first_token_at
        return AnswerReport(
            text=self.text,
            stop_reason=done.stop_reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=done.generated_token_count,
            cached_tokens=done.cached_token_count,
            time_to_first_token_seconds=None if first is None else first - self._started,
            prefill_seconds=done.prefill_duration_seconds,
            total_seconds=time.monotonic() - self._started,
        )
