"""Conversations over runtime sessions: started from messages, extended by what is new, forked, closed."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

from kakeya.errors import KakeyaError, ResourceExhausted
from kakeya.http_server.state import HttpState
from kakeya.text.grammar import GrammarCompiler
from kakeya.text.prompting import Message, Prompter, Tool, written_tools
from kakeya.text.turns import End, pinned_tokens
from kakeya.types import TokenEvent

if TYPE_CHECKING:  # torch takes a second to import, and the server listens before that
    from kakeya.http_server.generation import Answer
    from kakeya.runtime import Runtime

T = TypeVar("T")
# Whose sessions these are: one that nothing leads to after a crash is closed.
HOLDER = "http"


@dataclass
class TextSession:
    """A conversation and the session that holds it. Only its holder may use it.

    `messages` is all that the session's history stands for; after an answer the last is the assistant's.
    `closed` says whether the token that ended the answer is in the history. `tools` is their JSON, empty for
    none, and `variables` what the template is told besides. `end_token_ids` end an answer.
    """

    owner: str
    end_token_ids: frozenset[int]
    messages: tuple[Message, ...] = ()
    closed: bool = False
    tools: str = ""
    session_id: str = ""
    history_length: int = 0
    variables: str = ""

    def record(self, message: Message, answer: "Answer") -> None:
        """The answer has ended, and this is what it said."""
        self.messages = (*self.messages, message)
        self.closed = answer.closed
        self.history_length = answer.usage.prompt_tokens + answer.usage.completion_tokens


class TextSessions:
    """Opens and closes text sessions. Used from one event loop; what waits for the engine runs on workers.

    When there is no slab for a new session, cached ones are evicted. Whatever is new work raises Unavailable
    once the server drains and when the engine is dead.
    """

    def __init__(self, runtime: "Runtime", state: HttpState) -> None:
        self.runtime = runtime
        self.state = state
        self._closing: set[asyncio.Task[None]] = set()

    @cached_property
    def prompter(self) -> Prompter:
        """Writes conversations for the model. Takes a moment at first: ask for it on a worker.

        Raises InvalidArgument for a model without a chat template.
        """
        return Prompter(self.runtime.tokenizer, self.runtime.model_config.eos_token_ids)

    @cached_property
    def compiler(self) -> GrammarCompiler:
        """Compiles grammars for answers. Ask for it on a worker, too."""
        vocabulary = self.runtime.model_config.vocab_size
        return GrammarCompiler(self.runtime.tokenizer, self.prompter.end_token_ids, vocabulary)

    async def start(
        self,
        owner: str,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        label: str = "",
        variables: str = "",
        end: End = End.ANSWER,
    ) -> TextSession:
        """A new session with the whole prompt in its history, the system message and the tools pinned, up
        to half the slab. It recalls what left its window, where the server does. Leaves no session behind if
        anything fails. Where its end is within the last message, that message is the beginning of the answer
        and none of the session's messages.

        Raises InvalidArgument when the template refuses, ResourceExhausted when there is no slab.
        """
        written = written_tools(tools)

        def start() -> TextSession:
            prompter, cache = self.prompter, self.runtime.config.cache
            token_ids = prompter.whole(messages, written, variables, end)
            opening = prompter.opening_tokens(messages, written, variables)
            pinned = pinned_tokens(opening, cache.sink, cache.window)
            held = tuple(messages[:-1] if end is End.WITHIN else messages)
            ends = prompter.end_token_ids
            session = TextSession(owner, ends, held, tools=written, variables=variables)
            return self._fill(session, token_ids, pinned, label, cache.recall)

        return await self._open(owner, start)

    async def start_tokens(self, owner: str, token_ids: Sequence[int], label: str = "") -> TextSession:
        """A new session that continues plain tokens and has no messages."""
        ends = frozenset(self.runtime.model_config.eos_token_ids)
        session = TextSession(owner, ends)
        return await self._open(owner, partial(self._fill, session, token_ids, None, label))

    async def extend(self, session: TextSession, new_messages: Sequence[Message]) -> bool:
        """Append what `new_messages` add behind the answer. False, and nothing is changed, when the template
        would write differently what came before: start a new session then.

        Raises SessionNotFound when the session is gone, and HistoryMismatch when somebody else wrote to it.
        """
        self.state.check_takes_work(self.runtime)

        def extend() -> int | None:
            added = self.prompter.after_answer(
                session.messages, new_messages, session.tools, session.variables, closed=session.closed
            )
            if added is None:
                return None
            return self.runtime.append(session.session_id, added, session.history_length, owner=session.owner)

        length = await self.state.workers.call(extend)
        if length is None:
            return False
        session.messages = (*session.messages, *new_messages)
        session.closed = False
        session.history_length = length
        return True

    async def score(self, owner: str, token_ids: Sequence[int], top: int) -> list[TokenEvent]:
        """The tokens with their log-probabilities and those of the `top` most probable in their place.

        It takes a slab for as long as it lasts. A caller who is cancelled ends it.
        """
        left = threading.Event()

        def score() -> list[TokenEvent]:
            scored: list[TokenEvent] = []
            with _no_slab(), closing(self.runtime.score_tokens(token_ids, top)) as blocks:
                for block in blocks:
                    scored += block
                    if left.is_set():
                        break
            return scored

        try:
            return await self._until_taken(owner, partial(self.state.workers.call, score))
        finally:
            left.set()

    async def fork(self, session: TextSession) -> TextSession:
        """An independent session with the same history."""

        def fork() -> TextSession:
            with _no_slab():
                session_id, _ = self.runtime.fork(session.session_id, owner=session.owner, holder=HOLDER)
            return replace(session, session_id=session_id)

        return await self._open(session.owner, fork)

    async def close(self, session: TextSession) -> None:
        """Free the session; quiet if it is gone already."""
        await self.state.workers.call(self._discard, session)

    def close_soon(self, session: TextSession) -> None:
        """Close a session where nobody can wait for it."""
        task = asyncio.get_running_loop().create_task(self.close(session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def settle(self) -> None:
        """Wait until all that was to be closed soon is closed."""
        while self._closing:
            await asyncio.wait(tuple(self._closing))

    async def _open(self, owner: str, open_session: Callable[[], TextSession]) -> TextSession:
        """The new session. One that nobody waits for any more is closed."""
        open_or_undo = partial(self.state.workers.call_or_undo, open_session, self._discard)
        return await self._until_taken(owner, open_or_undo)

    async def _until_taken(self, owner: str, take: Callable[[], Awaitable[T]]) -> T:
        """What `take` gives. Cached sessions are evicted for it."""
        self.state.check_takes_work(self.runtime)
        return await self.state.eviction.until_taken(self.runtime, owner, take, _NoSlab)

    def _fill(
        self, session: TextSession, token_ids: Sequence[int], pinned: int | None, label: str, recall: int = 0
    ) -> TextSession:
        """The same with a session of the runtime's, which holds `token_ids`. Runs on a worker."""
        with _no_slab():
            session.session_id = self.runtime.create_session(
                owner=session.owner,
                client_label=label,
                eos_token_ids=sorted(session.end_token_ids),
                pinned_prefix_tokens=pinned,
                recall_tokens=recall,
                holder=HOLDER,
            )
        try:
            session.history_length = self.runtime.append(session.session_id, token_ids, owner=session.owner)
        except BaseException:
            self._discard(session)
            raise
        return session

    def discard(self, owner: str, session_id: str) -> None:
        """Close a session of the runtime's, on a worker; quiet if that cannot be."""
        with suppress(KakeyaError):
            self.runtime.close_session(session_id, owner=owner)

    def _discard(self, session: TextSession) -> None:
        self.discard(session.owner, session.session_id)


class _NoSlab(ResourceExhausted):
    """No session could be opened, for want of a slab or of quota. Eviction does not help other refusals."""


@contextmanager
def _no_slab() -> Iterator[None]:
    try:
        yield
    except ResourceExhausted as error:
        raise _NoSlab(*error.args, retry_after=error.retry_after) from error
