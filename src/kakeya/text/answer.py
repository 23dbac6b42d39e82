"""An answer's tokens as text that may be shown: whole characters, no stop strings, no end token.

All front ends read their answers through `AnswerText`. It does no I/O: the reader of a stream feeds it.
"""

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kakeya.errors import InvalidArgument
from kakeya.text.detokenizer import Detokenizer
from kakeya.text.stop import StopStrings
from kakeya.text.tokenizer import Tokenizer
from kakeya.types import TokenEvent


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
    """Text that is final, and the tokens that end in it, where they were asked for."""

    text: str
    tokens: tuple[TextToken, ...]


@dataclass(frozen=True)
class _Waiting:
    """A token, and the characters of the text between which it lies."""

    event: TokenEvent
    start: int
    end: int


class AnswerText:
    """Feed it the tokens of an answer, and take the pieces that are ready.

    A token that the tokenizer does not know has no text: a model's vocabulary may be padded. Pieces have
    tokens only with `tells_tokens`, each token in the piece that completes its text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_token_ids: Collection[int] = (),
        stop: Sequence[str] = (),
        *,
        continues: Sequence[int] = (),
        tells_tokens: bool = False,
        tells_end: bool = False,
        special: bool = False,
        shows_stop: bool = False,
    ) -> None:
        """`end_token_ids` end an answer. They have no text, and pieces have them as tokens only with
        `tells_end`. `continues` are the tokens before an answer that continues a text. With `special` the
        text spells special tokens out, with `shows_stop` it ends with the stop string that ended it.

        Raises InvalidArgument for a stop string that is empty.
        """
        self._tokenizer = tokenizer
        self._end_token_ids = end_token_ids
        self._tells_tokens = tells_tokens
        self._tells_end = tells_end
        self._detokenizer = Detokenizer(tokenizer, special=special)
        self._stops = StopStrings(stop, shows_match=shows_stop)
        self._made = 0  # characters that went into the stop filter
        self._shown = 0  # and came out
        self._waiting: deque[_Waiting] = deque()
        self._fresh: list[str] = []
        self._taken: list[str] = []
        self._finished = False
        self.token_count = 0
        self.last_token_id: int | None = None
        self.closed = False
        """Whether the last token was one that ends an answer: the history then holds it."""
        for token_id in continues:
            self._detokenizer.feed(token_id)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has come, if one has."""
        return self._stops.matched

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come. Nothing that follows it is shown or counted."""
        return self._stops.matched is not None

    @property
    def text(self) -> str:
        """All that was taken so far."""
        return "".join(self._taken)

    def feed(self, event: TokenEvent) -> None:
        """The next token. Ignored after a stop string."""
        if self.stopped:
            return
        self.token_count += 1
        self.last_token_id = event.token_id
        self.closed = event.token_id in self._end_token_ids
        if not self.closed or self._tells_end:
            self._read(event)

    def finish(self) -> None:
        """Nothing follows: show what was held back for a stop string or a character that did not come."""
        if not self.stopped:
            self._show(self._stops.feed(self._detokenizer.finish()))
        if not self.stopped:
            self._show(self._stops.finish())
            self._finished = True

    def ready(self) -> Piece:
        """What may be shown now and was not taken yet."""
        tokens = []
        while self._waiting and (self._finished or self._waiting[0].end <= self._shown):
            tokens.append(self._described(self._waiting.popleft()))
        text = "".join(self._fresh)
        self._fresh.clear()
        self._taken.append(text)
        return Piece(text, tuple(tokens))

    def _read(self, event: TokenEvent) -> None:
        start, text = self._made, ""
        with suppress(InvalidArgument):
            text = self._detokenizer.feed(event.token_id)
        self._made += len(text)
        if self._tells_tokens:
            # Part of a character ends with the character.
            end = self._made + self._detokenizer.is_within_character
            self._waiting.append(_Waiting(event, start, end))
        self._show(self._stops.feed(text))

    def _show(self, text: str) -> None:
        self._shown += len(text)
        self._fresh.append(text)

    def _described(self, waiting: _Waiting) -> TextToken:
        event = waiting.event
        top = tuple((*self._spelled(other.token_id), other.logprob) for other in event.top_logprobs)
        return TextToken(event.token_id, *self._spelled(event.token_id), event.logprob, top, waiting.start)

    def _spelled(self, token_id: int) -> tuple[str, list[int]]:
        try:
            data = self._tokenizer.token_bytes(token_id)
        except InvalidArgument:
            data = b""
        return data.decode("utf-8", errors="replace"), list(data)
