"""One generate of the engine, read as text on the event loop."""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from kakeya.errors import SessionNotFound, Unavailable
from kakeya.http_server.errors import invalid
from kakeya.http_server.text_sessions import TextSession, TextSessions
from kakeya.serving.reader import EventReader, EventSource
from kakeya.text.answer import AnswerText, Piece, TextToken
from kakeya.text.grammar import Grammar
from kakeya.text.tool_calls import CallEnd, TextPiece, ToolCallParser, ToolEvent
from kakeya.types import DoneEvent, Event, FailedEvent, SamplingParams, StopReason, TokenEvent


@dataclass(frozen=True)
class RecalledText:
    """A piece of the history that had left the window and was seen again."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Usage:
    """What one or more generates took.

    `prompt_tokens` is the whole history when it began, `cached_tokens` the part that was computed before, and
    `dropped_tokens` the part that has left the window by its end. Of what left it, `recalled_tokens` were
    seen again. Of the guesses of a proposer that were verified, so many were right and so many wrong.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    dropped_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    recalled_tokens: int = 0
    recalled: tuple[RecalledText, ...] = ()

    def to_chat(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted_prediction_tokens,
                "rejected_prediction_tokens": self.rejected_prediction_tokens,
            },
            "dropped_tokens": self.dropped_tokens,
            "recalled_tokens": self.recalled_tokens,
        }

    def to_responses(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cache_write_tokens": self.prompt_tokens - self.cached_tokens,
            },
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "dropped_tokens": self.dropped_tokens,
            "recalled_tokens": self.recalled_tokens,
            **({"recalled": [asdict(each) for each in self.recalled]} if self.recalled else {}),
        }

    def to_messages(self) -> dict[str, Any]:
        """Anthropic's count: what came from the cache is no part of `input_tokens`."""
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached_tokens,
            "output_tokens": self.completion_tokens,
            "dropped_tokens": self.dropped_tokens,
            "recalled_tokens": self.recalled_tokens,
        }


@dataclass(frozen=True)
class Reading:
    """How an answer's tokens become the text that is shown.

    Stop strings and stop tokens end it, and are part of it only with `shows_stop`. `special` spells special
    tokens out, and an EOS that was ignored is one of them. `continues` are tokens whose text it continues.
    With `tells_end` the token that ended it is among its tokens; it never has a text.
    """

    stop: Sequence[str] = ()
    special: bool = False
    shows_stop: bool = False
    continues: Sequence[int] = ()
    tells_end: bool = False


PLAIN_READING = Reading()


def check_least(sampling: SamplingParams, max_tokens: int) -> None:
    """Raises ApiError for an answer that must be longer than it may be. Ask before a session is opened."""
    least = sampling.min_tokens
    if least > max_tokens:
        raise invalid("min_tokens", f"min_tokens is {least}, but only {max_tokens} may be generated")


def logprob_of(token: TextToken) -> dict[str, Any]:
    """A token's log-probability, as chat completions and responses tell it."""
    top = [{"token": text, "bytes": data, "logprob": logprob} for text, data, logprob in token.top]
    return {"token": token.text, "bytes": token.bytes, "logprob": token.logprob, "top_logprobs": top}


# A part of an answer, and the tokens that came with it.
Part = tuple[ToolEvent, tuple[TextToken, ...]]


class PartReader:
    """Splits an answer into text and function calls. Without `reads_calls` all of it is text.

    Tokens go with the first part that comes after them; the end of a call takes none.
    """

    def __init__(self, *, reads_calls: bool) -> None:
        self._parser = ToolCallParser() if reads_calls else None
        self._tokens: tuple[TextToken, ...] = ()

    def feed(self, piece: Piece) -> Iterator[Part]:
        """The parts that this piece completes. Read them all."""
        self._tokens += piece.tokens
        if self._parser is not None:
            yield from self._with_tokens(self._parser.feed(piece.text))
        elif piece.text:
            yield from self._with_tokens([TextPiece(piece.text)])

    def finish(self) -> Iterator[Part]:
        """What was held back. Tokens that are left come with an empty text."""
        if self._parser is not None:
            yield from self._with_tokens(self._parser.finish())
        if self._tokens:
            yield from self._with_tokens([TextPiece("")])

    def _with_tokens(self, events: Sequence[ToolEvent]) -> Iterator[Part]:
        for event in events:
            tokens: tuple[TextToken, ...] = ()
            if not isinstance(event, CallEnd):
                tokens, self._tokens = self._tokens, ()
            yield event, tokens


class Answer:
    """Generates on a session. Iterate once for the pieces; then `finish_reason` and `usage` are known.

    `begin` starts the engine's work, and raises what the engine refuses; iterating does so too. The owner of
    an Answer calls `aclose` on every path. Iterating raises what made the generate fail, Unavailable when the
    server shuts down, and SessionNotFound when somebody closed the session.
    """

    def __init__(
        self,
        sessions: TextSessions,
        session: TextSession,
        max_tokens: int,
        sampling: SamplingParams,
        reading: Reading = PLAIN_READING,
        grammar: Grammar | None = None,
        prediction: Sequence[int] = (),
    ) -> None:
        """`prediction` is what the answer may say. Raises InvalidArgument for an empty stop string."""
        self._state, self._runtime = sessions.state, sessions.runtime
        self._closing = session.end_token_ids
        self._generate: Callable[[], EventSource] = partial(
            self._runtime.generate,
            session.session_id,
            max_tokens,
            sampling,
            owner=session.owner,
            constraint=None if grammar is None else grammar.start(),
            prediction=prediction,
        )
        self._text = AnswerText(
            self._runtime.tokenizer,
            _hidden_ends(session, sampling, reading),
            reading.stop,
            continues=reading.continues,
            tells_tokens=sampling.logprobs,
            tells_end=reading.tells_end,
            special=reading.special,
            shows_stop=reading.shows_stop,
        )
        self._stream: EventSource | None = None
        self._is_closed = False
        self._prompt_tokens = session.history_length
        self._failure: Exception | None = None
        self._done: DoneEvent | None = None

    @property
    def finish_reason(self) -> str:
        """`stop`, or `length` when it was cut at `max_tokens`. Known once it has ended."""
        assert self._done is not None, "the answer has not ended"
        ended = self._done.stop_reason is StopReason.EOS or self._text.stopped
        return "stop" if ended else "length"

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended it, if one did."""
        return self._text.stopped_by

    @property
    def shows_all(self) -> bool:
        """Whether the client was shown what the session's history has. Behind a stop string the history has
        more, and a stop token is hidden."""
        return not self._text.stopped and (self.closed or not self._text.closed)

    @property
    def closed(self) -> bool:
        """Whether the token that closes an answer is in the history. A constraint can end it without one."""
        return self._text.last_token_id in self._closing

    @property
    def token_counts(self) -> tuple[int, int]:
        """Tokens of the prompt, and of the answer so far."""
        return self._prompt_tokens, self._text.token_count

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were computed before. Known once there is a piece."""
        assert self._stream is not None, "the answer has not begun"
        return self._stream.cached_tokens

    @property
    def usage(self) -> Usage:
        """What it took. Known once it has ended."""
        assert self._done is not None, "the answer has not ended"
        history = self._prompt_tokens + self._text.token_count
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._text.token_count,
            cached_tokens=self._done.cached_token_count,
            dropped_tokens=max(0, history - self._runtime.config.cache.capacity),
            recalled_tokens=self._done.recalled_tokens,
            recalled=self._recalled(self._done),
            accepted_prediction_tokens=self._done.accepted_draft_tokens,
            rejected_prediction_tokens=self._done.proposed_draft_tokens - self._done.accepted_draft_tokens,
        )

    def _recalled(self, done: DoneEvent) -> tuple[RecalledText, ...]:
        decode, pieces = (
            self._runtime.tokenizer.decode,
            zip(done.recalled, done.recalled_token_ids, strict=True),
        )
        return tuple(RecalledText(each.start, each.end, decode(token_ids)) for each, token_ids in pieces)

    async def begin(self) -> None:
        """Start the engine's work, if that was not done yet."""
        if self._stream is None:
            assert not self._is_closed, "the answer was closed before it began"
            self._state.check_takes_work(self._runtime)
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
                        yield piece
                    if self._failure is not None:
                        raise self._failure
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """End the engine's work, within a step. Does nothing the second time, or when it has ended."""
        stream, self._is_closed = self._stream, True
        if stream is not None:
            self._state.streams.discard(stream)
            if self._done is None:
                stream.cancel()

    def _take(self, events: Sequence[Event]) -> Piece:
        """The text that these events complete."""
        for event in events:
            if isinstance(event, TokenEvent):
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


def _hidden_ends(session: TextSession, sampling: SamplingParams, reading: Reading) -> frozenset[int]:
    """The tokens that end the answer and have no text."""
    closing = frozenset() if sampling.ignore_eos else session.end_token_ids
    return closing if reading.shows_stop else closing.union(sampling.stop_token_ids)
