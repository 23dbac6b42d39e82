"""One generate as text: whole characters, no stop strings, tokens together with their text."""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kakeya.errors import InvalidArgument, SessionNotFound, Unavailable
from kakeya.http_server.threads import Thread
from kakeya.serving.reader import EventReader, EventSource
from kakeya.text import Detokenizer, StopStrings, Tokenizer
from kakeya.types import DoneEvent, Event, FailedEvent, SamplingParams, StopReason, TokenEvent

if TYPE_CHECKING:  # torch takes a second to import, and the server listens before that
    from kakeya.http_server.state import HttpState


@dataclass(frozen=True)
class TextToken:
    """A token as clients see it. `text` shows part of a character as U+FFFD; `bytes` says what it is.

    `logprob` is None where none was asked for; `top` are (text, bytes, logprob) of the most probable.
    `offset` is the character of the text at which it begins.
    """

    token_id: int
    text: str
    bytes: list[int]
    logprob: float | None
    top: tuple[tuple[str, list[int], float], ...] = ()
    offset: int = 0


@dataclass(frozen=True)
class Piece:
    """Text that is final, and the tokens that end in it, where log-probabilities were asked for."""

    text: str
    tokens: tuple[TextToken, ...]


@dataclass(frozen=True)
class Usage:
    """What one generate, or several for the same prompt, took.

    `prompt_tokens` is all of the history when it began, `cached_tokens` what of it was computed before,
    `dropped_tokens` what of the history has left the window by its end.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    dropped_tokens: int = 0

    def to_chat(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "dropped_tokens": self.dropped_tokens,
        }

    def to_responses(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "dropped_tokens": self.dropped_tokens,
        }


class Answer:
    """Generates on a thread. Iterate once for the pieces; then `finish_reason`, `usage` and the rest say how
    it went.

    `begin` starts the engine's work, and raises what the engine refuses; iterating does so too. Whoever makes
    an Answer calls `aclose` on every path. Iterating raises what made the generate fail, Unavailable when the
    server shut down meanwhile, and SessionNotFound when somebody closed the session.
    """

    def __init__(
        self,
        state: "HttpState",
        thread: Thread,
        max_tokens: int,
        sampling: SamplingParams,
        stop: Sequence[str] = (),
        constraint: Any = None,
        continues: Sequence[int] = (),
        tells_end: bool = False,
    ) -> None:
        """`continues` are the tokens whose text the answer goes on with, where it is not a text of its own.
        With `tells_end` the token that ends an answer is among its tokens. It never has a text.

        Raises InvalidArgument for a stop string that is empty.
        """
        runtime = state.ready_runtime()
        self._state = state
        self._generate: Callable[[], EventSource] = partial(
            runtime.generate,
            thread.session_id,
            max_tokens,
            sampling,
            owner=thread.owner,
            constraint=constraint,
        )
        self._capacity = runtime.config.cache.capacity
        detokenizer = Detokenizer(runtime.tokenizer)
        self._text = TextTokens(detokenizer, runtime.tokenizer, stop, tells_tokens=sampling.logprobs)
        self._text.skip(continues)
        self._end_token_ids = thread.end_token_ids
        self._tells_end = tells_end
        self._stream: EventSource | None = None
        self._prompt_tokens = thread.history_length
        self._tokens = 0
        self._closed = False
        self._failure: Exception | None = None
        self._done: DoneEvent | None = None
        self._said: list[str] = []

    @property
    def text(self) -> str:
        """What was said so far."""
        return "".join(self._said)

    @property
    def finish_reason(self) -> str:
        """`stop`, or `length` when it was cut at `max_tokens`. Known once it has ended."""
        assert self._done is not None, "the answer has not ended"
        ended = self._done.stop_reason is StopReason.EOS or self.stopped_by_string
        return "stop" if ended else "length"

    @property
    def stopped_by_string(self) -> bool:
        """Whether a stop string ended it. The session's history then has more than the client was shown."""
        return self._text.stopped

    @property
    def closed(self) -> bool:
        """Whether the token that ends an answer is in the history. A constraint can end it without one."""
        return self._closed

    @property
    def usage(self) -> Usage:
        """What it took. Known once it has ended."""
        assert self._done is not None, "the answer has not ended"
        history = self._prompt_tokens + self._tokens
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._tokens,
            cached_tokens=self._done.cached_token_count,
            dropped_tokens=max(0, history - self._capacity),
        )

    async def begin(self) -> None:
        """Start the engine's work, if that was not done yet."""
        if self._stream is None:
            stream = await self._state.workers.call_or_undo(self._generate, lambda late: late.cancel())
            self._stream = stream
            self._state.streams.add(stream)
            if self._state.interrupted:  # it came too late to be interrupted with the others
                stream.cancel()

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        try:
            await self.begin()
            assert self._stream is not None
            with self._state.pace.stream():
                reader = EventReader(self._stream, self._state.pace)
                while self._done is None:
                    piece = self._take(await reader.next_events())
                    if piece.text or piece.tokens:
                        self._said.append(piece.text)
                        yield piece
                    if self._failure is not None:
                        raise self._failure
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """End the engine's work, within a step. Does nothing the second time, or when it has ended."""
        stream, self._generate = self._stream, _refuse_to_begin
        if stream is not None:
            self._state.streams.discard(stream)
            if self._done is None:
                stream.cancel()

    def _take(self, events: Sequence[Event]) -> Piece:
        """The text that these events complete."""
        for event in events:
            if isinstance(event, TokenEvent) and not self._text.stopped:
                self._tokens += 1
                self._closed = event.token_id in self._end_token_ids
                if self._tells_end or not self._closed:
                    self._text.feed(event)
            elif isinstance(event, DoneEvent):
                self._end(event)
            elif isinstance(event, FailedEvent):
                self._failure = event.error
        if self._text.stopped and self._done is None:
            assert self._stream is not None
            self._stream.cancel()  # and read on: the end says what was cached
        return self._text.ready()

    def _end(self, done: DoneEvent) -> None:
        if done.stop_reason is not StopReason.CANCELLED or self._text.stopped:
            self._text.finish()
            self._done = done
        elif self._state.interrupted:
            self._failure = Unavailable("the server is shutting down and stopped this generate")
        else:
            self._failure = SessionNotFound("the session was closed while it was generating")


@dataclass(frozen=True)
class _Waiting:
    """A token, and the characters of the text between which it lies."""

    event: TokenEvent
    start: int
    end: int


def _refuse_to_begin() -> EventSource:
    raise AssertionError("the answer was closed before it began")


class TextTokens:
    """Turns tokens into text that may be shown, and keeps every token back until its text is.

    A model's vocabulary may be padded beyond the tokenizer's: such a token has no text.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        tells_tokens: bool = True,
    ) -> None:
        self._tells_tokens = tells_tokens
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop)
        self._made = 0  # characters that went into the stop filter
        self._shown = 0  # and came out
        self._waiting: deque[_Waiting] = deque()
        self._pieces: list[str] = []
        self._finished = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come. Nothing that follows it is shown."""
        return self._stops.matched is not None

    def skip(self, token_ids: Sequence[int]) -> None:
        """These come before, and are not shown."""
        for token_id in token_ids:
            self._detokenizer.feed(token_id)

    def feed(self, event: TokenEvent) -> None:
        start, text = self._made, ""
        with suppress(InvalidArgument):
            text = self._detokenizer.feed(event.token_id)
        self._made += len(text)
        if self._tells_tokens:
            # Part of a character ends with the character.
            end = self._made + self._detokenizer.is_within_character
            self._waiting.append(_Waiting(event, start, end))
        self._show(self._stops.feed(text))

    def finish(self) -> None:
        """Nothing follows: show what was held back for a stop string or a character that did not come."""
        if not self.stopped:
            self._show(self._stops.feed(self._detokenizer.finish()))
        if not self.stopped:
            self._show(self._stops.finish())
            self._finished = True

    def ready(self) -> Piece:
        """What may be shown now and was not yet."""
        tokens = []
        while self._waiting and (self._finished or self._waiting[0].end <= self._shown):
            tokens.append(self._described(self._waiting.popleft()))
        text, self._pieces = "".join(self._pieces), []
        return Piece(text, tuple(tokens))

    def _show(self, text: str) -> None:
        self._shown += len(text)
        self._pieces.append(text)

    def _described(self, waiting: _Waiting) -> TextToken:
        event = waiting.event
        top = tuple((*self._spelt(other.token_id), other.logprob) for other in event.top_logprobs)
        return TextToken(event.token_id, *self._spelt(event.token_id), event.logprob, top, waiting.start)

    def _spelt(self, token_id: int) -> tuple[str, list[int]]:
        try:
            data = self._tokenizer.token_bytes(token_id)
        except InvalidArgument:
            data = b""
        return data.decode("utf-8", errors="replace"), list(data)
