"""Completions: plain text and tokens, continued or only scored."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

from kakeya.errors import InvalidArgument, ResourceExhausted
from kakeya.http_server.completions.completion import Choice, Completion, Delta
from kakeya.http_server.completions.schema import CompletionRequest, GivenPrompt
from kakeya.http_server.errors import invalid
from kakeya.http_server.generation import Answer, check_least
from kakeya.http_server.text_sessions import TextSession, TextSessions
from kakeya.text import AnswerText, Tokenizer
from kakeya.text.answer import Piece, TextToken
from kakeya.types import SamplingParams, TokenEvent

_LABEL = "completion"
# Of one request; the others wait for these to end.
_AT_ONCE = 4
# Each is kept with the most probable tokens in its place until the answer is written.
_MOST_SCORED_TOKENS = 2**15


class Prompt:
    """A prompt as text and as ids. All choices that continue it share the one look at its tokens."""

    def __init__(self, given: GivenPrompt, tokenizer: Tokenizer) -> None:
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

    async def echo(self, sessions: TextSessions, owner: str, top: int | None) -> Piece:
        """The prompt as if it had been generated; its tokens are scored unless `top` is None."""
        async with self._looking:
            if self._piece is None:
                scored = [] if top is None else await sessions.score(owner, self.token_ids, top)
                self._piece = self.piece_of(scored)
        return self._piece

    def piece_of(self, scored: list[TokenEvent]) -> Piece:
        """The prompt with its tokens. What the tokenizer put in front is no part of the text."""
        front = [replace(token, offset=0) for token in self._read(scored[: self._hidden])]
        return Piece(self.text, (*front, *self._read(scored[self._hidden :])))

    def _read(self, scored: list[TokenEvent]) -> tuple[TextToken, ...]:
        reading = AnswerText(self._tokenizer, tells_tokens=True, special=True)
        for event in scored:
            reading.feed(event)
        reading.finish()
        return reading.ready().tokens


class PromptSessions:
    """Sessions for the choices of one prompt, as many at once as may run at once.

    They are forked before any of them is computed. So one computes the prompt, and the others copy it. A fork
    that waits for its choice is given up for a choice of another prompt that has no slab: `beside` are the
    sessions of all prompts of the request, which are opened one after the other (`opening`).
    """

    def __init__(
        self,
        prompt: Prompt,
        choices: int,
        at_once: int,
        owner: str,
        sessions: TextSessions,
        beside: "Sequence[PromptSessions]",
        opening: asyncio.Lock,
    ) -> None:
        self._token_ids = prompt.token_ids
        self._left = choices
        self._at_once = at_once
        self._owner = owner
        self._sessions = sessions
        self._beside = beside
        self._ready: list[TextSession] = []
        self._opening = opening

    async def take(self) -> TextSession:
        """A session for the next choice, which closes it."""
        async with self._opening:
            self._left -= 1
            if self._ready:
                return self._ready.pop()
            first = await self._start()
            try:
                await self._fork(first)
            except BaseException:
                self._sessions.close_soon(first)
                raise
            return first

    async def release(self) -> int:
        """Close those that no choice has taken; how many."""
        closed = 0
        while self._ready:
            await self._sessions.close(self._ready.pop())
            closed += 1
        return closed

    async def _start(self) -> TextSession:
        while True:
            try:
                return await self._sessions.start_tokens(self._owner, self._token_ids, _LABEL)
            except ResourceExhausted:
                if not any([await each.release() for each in self._beside]):
                    raise

    async def _fork(self, first: TextSession) -> None:
        for _ in range(min(self._left, self._at_once - 1)):
            try:
                self._ready.append(await self._sessions.fork(first))
            except ResourceExhausted:  # the choices that come later open their own, or are refused by name
                return


class TextChoice(Choice):
    """Continues a prompt, echoed and scored if need be. `places` says how many do so at a time.

    The first choice begins before its deltas are read, so that what is wrong with a request is told by the
    status; the others when there is a place for them. `text` includes the echo.
    """

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        request: CompletionRequest,
        sampling: SamplingParams,
        owner: str,
        sessions: TextSessions,
        own: PromptSessions,
        places: asyncio.Semaphore,
    ) -> None:
        super().__init__(index, sessions, len(prompt.token_ids))
        self._prompt = prompt
        self._own = own
        self._request = request
        self._sampling = sampling
        self._owner = owner
        self._places = places
        self._has_begun = False
        self._echo = Piece("", ())

    async def begin(self) -> None:
        """Look at the prompt and start generating, as far as either was asked for. Raises what is refused."""
        self._has_begun = True
        request, sessions, ids = self._request, self._sessions, self._prompt.token_ids
        if not request.most_tokens:
            # Nothing is generated, but the prompt is checked and charged for like any other.
            await sessions.close(await sessions.start_tokens(self._owner, ids, _LABEL))
        if request.echo:
            self._echo = await self._prompt.echo(sessions, self._owner, request.logprobs)
        if request.most_tokens:
            check_least(self._sampling, request.most_tokens)
            self._session = await self._own.take()
            reading = replace(request.reading, continues=ids, tells_end=True)
            self._answer = Answer(sessions, self._session, request.most_tokens, self._sampling, reading)
            await self._answer.begin()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        async with self._places:
            if not self._has_begun:
                await self.begin()
            if self._request.echo:
                yield self._remember(self._echo)
            if self._answer is not None:
                async with aclosing(aiter(self._answer)) as pieces:
                    async for piece in pieces:
                        yield self._remember(piece, len(self._echo.text))
            await self.release()
        yield Delta(finish_reason=self.finish_reason)

    def _remember(self, piece: Piece, before: int = 0) -> Delta:
        """The piece as a delta; `before` characters precede the text that it belongs to."""
        tokens = tuple(replace(token, offset=token.offset + before) for token in piece.tokens)
        self._said.append(piece.text)
        self.tokens += tokens
        return Delta(piece.text, tokens=tokens)


class TextCompletion(Completion):
    """Tells plain text."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _told(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text, "logprobs": self._told_logprobs(choice.tokens)}

    def _told_delta(self, delta: Delta) -> dict[str, Any]:
        return {"text": delta.text, "logprobs": self._told_logprobs(delta.tokens)}

    def _told_logprobs(self, tokens: Sequence[TextToken]) -> dict[str, Any] | None:
        if not self._request.wants_logprobs:
            return None
        return {
            "tokens": [_name(token.text, token.bytes) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


def _top(token: TextToken) -> dict[str, float] | None:
    """The most probable tokens, and the one that it was; nothing for a token that nothing comes before."""
    if token.logprob is None:
        return None
    named = {_name(text, data): logprob for text, data, logprob in reversed(token.top)}
    return {**named, _name(token.text, token.bytes): token.logprob}


def _name(text: str, data: list[int]) -> str:
    """A token's text, or its bytes where they are part of a character only: names must differ."""
    return text if "\ufffd" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


async def begin_completion(
    sessions: TextSessions, stack: AsyncExitStack, owner: str, request: CompletionRequest
) -> TextCompletion:
    """Start generating. What is taken for it is released by `stack`, which the caller closes.

    Raises ApiError or KakeyaError when the request cannot be answered.
    """
    runtime, state = sessions.runtime, sessions.state
    request.check(runtime)
    await stack.enter_async_context(state.admission.admit(owner))
    prompts = await state.workers.call(_read_prompts, request, runtime.tokenizer)
    at_once = min(_AT_ONCE, runtime.describe().capacity)
    places = asyncio.Semaphore(at_once)
    samplings = request.samplings(request.choice_count)
    choices: list[TextChoice] = []
    opened: list[PromptSessions] = []
    opening = asyncio.Lock()
    for prompt in prompts:
        own = PromptSessions(prompt, len(samplings), at_once, owner, sessions, opened, opening)
        opened.append(own)
        stack.push_async_callback(own.release)
        for sampling in samplings:
            choice = TextChoice(len(choices), prompt, request, sampling, owner, sessions, own, places)
            stack.push_async_callback(choice.release)
            choices.append(choice)
    # The first shows whether the request can be served at all, while that is not a matter of a stream.
    await choices[0].begin()
    return TextCompletion(request, runtime.fingerprint, choices)


def _read_prompts(request: CompletionRequest, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts, as tokens. Runs on a worker."""
    try:
        prompts = [Prompt(prompt, tokenizer) for prompt in request.prompt]
    except InvalidArgument as error:
        raise invalid("prompt", f"prompt: {error}") from error
    if not all(prompt.token_ids for prompt in prompts):
        raise invalid("prompt", "a prompt must hold at least one token")
    scored = sum(len(prompt.token_ids) for prompt in prompts)
    if request.echo and request.wants_logprobs and scored > _MOST_SCORED_TOKENS:
        message = f"at most {_MOST_SCORED_TOKENS} tokens of prompts are scored at once, got {scored}"
        raise invalid("prompt", message)
    return prompts
