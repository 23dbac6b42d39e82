"""One choice of a completion: a prompt, echoed and scored if need be, and how it goes on."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kakeya.http_server.completions.schema import CompletionRequest, Prompt
from kakeya.http_server.generation import Answer, Piece, TextToken, TextTokens, Usage
from kakeya.http_server.threads import Thread
from kakeya.text import Detokenizer, Tokenizer
from kakeya.types import SamplingParams, TokenEvent

if TYPE_CHECKING:
    from kakeya.http_server.state import HttpState

_LABEL = "completion"


@dataclass(frozen=True)
class CompletionDelta:
    """What is new of a choice: text and the tokens behind it, or that it has ended."""

    text: str = ""
    tokens: tuple[TextToken, ...] = ()
    finish_reason: str | None = None


class CompletionPrompt:
    """A prompt as text and as ids. All choices that continue it share the one look at its tokens."""

    def __init__(self, given: Prompt, tokenizer: Tokenizer) -> None:
        """Raises InvalidArgument for what is no text, or no token id."""
        self._tokenizer = tokenizer
        if isinstance(given, str):
            self.token_ids = tokenizer.encode(given, bos=True)
            self.text = given
            self._hidden = len(self.token_ids) - len(tokenizer.encode(given))
        else:
            self.token_ids = given
            self.text = tokenizer.decode(given, special=True)
            self._hidden = 0
        self._piece: Piece | None = None
        self._looking = asyncio.Lock()

    async def echo(self, state: "HttpState", owner: str, top: int | None) -> Piece:
        """The prompt as if it had been generated; its tokens are scored unless `top` is None."""
        async with self._looking:
            if self._piece is None:
                scored = [] if top is None else await state.threads.score(owner, self.token_ids, top)
                self._piece = self._told(scored)
        return self._piece

    def _told(self, scored: list[TokenEvent]) -> Piece:
        # What the tokenizer put in front is no part of the text.
        front = [replace(token, offset=0) for token in self._read(scored[: self._hidden])]
        return Piece(self.text, (*front, *self._read(scored[self._hidden :])))

    def _read(self, scored: list[TokenEvent]) -> tuple[TextToken, ...]:
        reading = TextTokens(Detokenizer(self._tokenizer, special=True), self._tokenizer)
        for event in scored:
            reading.feed(event)
        reading.finish()
        return reading.ready().tokens


class CompletionChoice:
    """Continues a prompt on a session of its own. `places` says how many do so at a time.

    `release` must be called on every path.
    """

    def __init__(
        self,
        index: int,
        prompt: CompletionPrompt,
        request: CompletionRequest,
        sampling: SamplingParams,
        owner: str,
        state: "HttpState",
        places: asyncio.Semaphore,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self._request = request
        self._sampling = sampling
        self._owner = owner
        self._state = state
        self._places = places
        self._has_begun = False
        self._echo = Piece("", ())
        self._thread: Thread | None = None
        self._answer: Answer | None = None
        self._said: list[str] = []
        self.tokens: list[TextToken] = []

    @property
    def text(self) -> str:
        """What was said so far, the echo included."""
        return "".join(self._said)

    @property
    def finish_reason(self) -> str:
        return "length" if self._answer is None else self._answer.finish_reason

    @property
    def usage(self) -> Usage:
        if self._answer is None:
            return Usage(prompt_tokens=len(self.prompt.token_ids))
        return self._answer.usage

    async def begin(self) -> None:
        """Look at the prompt and start generating, as far as either was asked for. Raises what is refused."""
        self._has_begun = True
        request, threads, ids = self._request, self._state.threads, self.prompt.token_ids
        if not request.most_tokens:
            # Nothing is generated, but the prompt is checked and charged for like any other.
            await threads.close(await threads.start_tokens(self._owner, ids, _LABEL))
        if request.echo:
            self._echo = await self.prompt.echo(self._state, self._owner, request.logprobs)
        if request.most_tokens:
            self._thread = await threads.start_tokens(self._owner, ids, _LABEL)
            self._answer = Answer(
                self._state,
                self._thread,
                request.most_tokens,
                self._sampling,
                request.stop,
                continues=ids,
                tells_end=True,
            )
            await self._answer.begin()

    async def deltas(self) -> AsyncGenerator[CompletionDelta, None]:
        """What is new, as it comes; the last says why it ended."""
        async with self._places:
            if not self._has_begun:
                await self.begin()
            if self._request.echo:
                yield self._kept(self._echo)
            if self._answer is not None:
                async with aclosing(aiter(self._answer)) as pieces:
                    async for piece in pieces:
                        yield self._kept(piece, len(self._echo.text))
            await self.release()
        yield CompletionDelta(finish_reason=self.finish_reason)

    async def release(self) -> None:
        """End what runs and close what is open. Does nothing the second time."""
        if self._answer is not None:
            await self._answer.aclose()
        thread, self._thread = self._thread, None
        if thread is not None:
            await self._state.threads.close(thread)

    def _kept(self, piece: Piece, before: int = 0) -> CompletionDelta:
        """The piece, remembered; `before` characters precede the text that it belongs to."""
        tokens = tuple(replace(token, offset=token.offset + before) for token in piece.tokens)
        self._said.append(piece.text)
        self.tokens += tokens
        return CompletionDelta(piece.text, tokens)
