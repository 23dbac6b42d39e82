"""Conversations over runtime sessions: started from messages, extended by what is new, forked, closed."""

import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kakeya.errors import KakeyaError, ResourceExhausted
from kakeya.http_server.prompting import Message, Prompter, Tool, written_tools
from kakeya.serving.room import MakeRoom
from kakeya.text.grammar import GrammarCompiler
from kakeya.types import TokenEvent

if TYPE_CHECKING:  # torch takes a second to import, and the server listens before that
    from kakeya.http_server.generation import Answer
    from kakeya.http_server.state import HttpState
    from kakeya.runtime import Runtime

T = TypeVar("T")


@dataclass
class Thread:
    """A conversation and the session that holds it. Who has it is the only one to use it.

    `messages` is all that the session's history stands for; after an answer the last is the assistant's.
    `closed` says whether the token that ended the answer is in the history. `tools` is their JSON, empty for
    none. `end_token_ids` end an answer.
    """

    owner: str
    session_id: str
    messages: tuple[Message, ...]
    closed: bool
    tools: str
    history_length: int
    end_token_ids: frozenset[int]

    def record(self, message: Message, answer: "Answer") -> None:
        """The answer has ended, and this is what it said."""
        self.messages = (*self.messages, message)
        self.closed = answer.closed
        self.history_length = answer.usage.prompt_tokens + answer.usage.completion_tokens


class Threads:
    """Opens and closes threads. Used from one event loop; what waits for the engine runs on the workers.

    When there is no slab for a new session, what is only kept as a cache is closed to make room.
    """

    def __init__(self, state: "HttpState") -> None:
        self._state = state
        self._prompters: dict[Runtime, Prompter] = {}
        self._compilers: dict[Runtime, GrammarCompiler] = {}

    def makes_room(self, make_room: MakeRoom) -> None:
        """Ask `make_room` when a slab is missing, after those that were named before."""
        self._state.room.add(make_room)

    async def start(
        self, owner: str, messages: Sequence[Message], tools: Sequence[Tool] = (), label: str = ""
    ) -> Thread:
        """A new thread with the whole prompt in its history, the system message and the tools pinned, up
        to half the slab. Leaves no session behind if anything fails.

        Raises InvalidArgument when the template refuses, ResourceExhausted when there is no room.
        """
        runtime = self._state.ready_runtime()
        begin = partial(self._begin, runtime, owner, tuple(messages), written_tools(tools), label)
        return await self._opened(runtime, owner, begin)

    async def start_tokens(self, owner: str, token_ids: Sequence[int], label: str = "") -> Thread:
        """A new thread that continues plain tokens and has no messages."""
        runtime = self._state.ready_runtime()
        ends = frozenset(runtime.model_config.eos_token_ids)
        thread = Thread(owner, "", (), closed=False, tools="", history_length=0, end_token_ids=ends)
        return await self._opened(
            runtime, owner, partial(self._open, runtime, thread, list(token_ids), None, label)
        )

    async def extend(self, thread: Thread, new_messages: Sequence[Message]) -> bool:
        """Append what `new_messages` add behind the answer. False, and nothing is changed, when the template
        would write differently what came before: start a new thread then.

        Raises SessionNotFound when the session is gone, and HistoryMismatch when somebody else wrote to it.
        """
        runtime = self._state.ready_runtime()
        length = await self._state.workers.call(self._extend, runtime, thread, tuple(new_messages))
        if length is None:
            return False
        thread.messages = (*thread.messages, *new_messages)
        thread.closed = False
        thread.history_length = length
        return True

    async def score(self, owner: str, token_ids: Sequence[int], top: int) -> list[TokenEvent]:
        """The tokens with their log-probabilities and those of the `top` most probable in their place.

        It takes a slab for as long as it lasts. A caller who is cancelled ends it.
        """
        runtime = self._state.ready_runtime()
        left = threading.Event()

        def score() -> list[TokenEvent]:
            told: list[TokenEvent] = []
            with _no_room(), closing(runtime.score_tokens(token_ids, top)) as blocks:
                for some in blocks:
                    told += some
                    if left.is_set():
                        break
            return told

        try:
            return await self._until_room(runtime, owner, partial(self._state.workers.call, score))
        finally:
            left.set()

    async def fork(self, thread: Thread) -> Thread:
        """An independent thread with the same history."""
        runtime = self._state.ready_runtime()

        def fork() -> Thread:
            with _no_room():
                session_id = runtime.fork(thread.session_id, owner=thread.owner)
            return replace(thread, session_id=session_id)

        return await self._opened(runtime, thread.owner, fork)

    async def close(self, thread: Thread) -> None:
        """Free the session; quiet if it is gone already."""
        await self._state.workers.call(_discard, self._state.loaded_runtime(), thread)

    def prompter(self, runtime: "Runtime") -> Prompter:
        """Writes conversations for this runtime's model. Takes a moment at first: call it on a worker."""
        if runtime not in self._prompters:
            eos = runtime.model_config.eos_token_ids
            self._prompters[runtime] = Prompter(runtime.tokenizer, eos)
        return self._prompters[runtime]

    def compiler(self, runtime: "Runtime") -> GrammarCompiler:
        """Compiles grammars for answers on this runtime's threads. Call it on a worker, too."""
        if runtime not in self._compilers:
            ends = self.prompter(runtime).end_token_ids
            vocabulary = runtime.model_config.vocab_size
            self._compilers[runtime] = GrammarCompiler(runtime.tokenizer, ends, vocabulary)
        return self._compilers[runtime]

    async def _opened(self, runtime: "Runtime", owner: str, open_thread: Callable[[], Thread]) -> Thread:
        """The new thread. One that nobody waits for any more is closed."""
        call = partial(self._state.workers.call_or_undo, open_thread, partial(_discard, runtime))
        return await self._until_room(runtime, owner, call)

    async def _until_room(self, runtime: "Runtime", owner: str, take: Callable[[], Awaitable[T]]) -> T:
        """What `take` gives. Sessions that are only a cache give way to it."""
        try:
            return await self._state.room.until(runtime, owner, take, _NoRoom)
        except _NoRoom as refusal:
            raise refusal.reason from None

    def _begin(
        self, runtime: "Runtime", owner: str, messages: tuple[Message, ...], tools: str, label: str
    ) -> Thread:
        prompter, cache = self.prompter(runtime), runtime.config.cache
        token_ids = prompter.whole(messages, tools)
        pinned = max(cache.sink, min(prompter.opening_tokens(messages, tools), cache.capacity // 2))
        thread = Thread(
            owner,
            "",
            messages,
            closed=False,
            tools=tools,
            history_length=0,
            end_token_ids=prompter.end_token_ids,
        )
        return self._open(runtime, thread, token_ids, pinned, label)

    def _open(
        self, runtime: "Runtime", thread: Thread, token_ids: list[int], pinned: int | None, label: str
    ) -> Thread:
        """The thread with a session of its own, which holds `token_ids`."""
        with _no_room():
            thread.session_id = runtime.create_session(
                owner=thread.owner,
                client_label=label,
                eos_token_ids=sorted(thread.end_token_ids),
                pinned_prefix_tokens=pinned,
            )
        try:
            thread.history_length = runtime.append(thread.session_id, token_ids, owner=thread.owner)
        except BaseException:
            _discard(runtime, thread)
            raise
        return thread

    def _extend(self, runtime: "Runtime", thread: Thread, new: tuple[Message, ...]) -> int | None:
        prompter = self.prompter(runtime)
        added = prompter.after_answer(thread.messages, new, thread.tools, closed=thread.closed)
        if added is None:
            return None
        return runtime.append(thread.session_id, added, thread.history_length, owner=thread.owner)


class _NoRoom(Exception):
    """No session could be opened, for want of a slab or of quota. `reason` is what the caller is told."""

    def __init__(self, reason: ResourceExhausted) -> None:
        super().__init__(str(reason))
        self.reason = reason


@contextmanager
def _no_room() -> Iterator[None]:
    """Tells a refusal to open a session from all others, which closing sessions would not help."""
    try:
        yield
    except ResourceExhausted as error:
        raise _NoRoom(error) from error


def _discard(runtime: "Runtime", thread: Thread) -> None:
    with suppress(KakeyaError):
        runtime.close_session(thread.session_id, owner=thread.owner)
