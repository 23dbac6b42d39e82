"""Threads over real sessions: pinned, extended by what is new, forked, and never left behind."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kakeya.config import CacheConfig, HttpConfig, Quotas, RuntimeConfig
from kakeya.errors import (
    HistoryMismatch,
    InvalidArgument,
    ResourceExhausted,
    SessionNotFound,
    StepFailed,
    Unavailable,
)
from kakeya.http_server.chat.held import HeldConversations
from kakeya.http_server.completions.choice import CompletionPrompt
from kakeya.http_server.generation import Answer, Piece
from kakeya.http_server.prompting import Message
from kakeya.http_server.state import HttpState
from kakeya.http_server.threads import Thread
from kakeya.runtime import Runtime
from kakeya.serving.commons import Commons
from kakeya.serving.keys import KeyRing
from kakeya.serving.workers import Workers
from kakeya.text import Tokenizer
from kakeya.types import Event, FailedEvent, SamplingParams, TokenEvent
from support.http_serving import eventually
from support.serving import ENGINE
from support.vocabularies import sentencepiece_files

SMALL = replace(ENGINE, cache=CacheConfig(sink=2, window=62, spare=8), capacity=3)
HELLO = Message("user", "Hello")
SYSTEM = Message("system", "Be brief.")


@pytest.fixture
def runtime(model: Path) -> Iterator[Runtime]:
    with Runtime.open(str(model), SMALL) as runtime:
        yield runtime


@pytest.fixture
def state(runtime: Runtime) -> Iterator[HttpState]:
    workers = Workers(4)
    state = HttpState(HttpConfig(), KeyRing(()), workers, Commons())
    state.open(runtime)
    yield state
    workers.close()


async def say(state: HttpState, thread: Thread, count: int = 4) -> str:
    answer = Answer(state, thread, count, SamplingParams(logit_bias={0: -100.0}))
    async for _ in answer:
        pass
    thread.record(Message("assistant", answer.text), answer)
    return answer.text


def test_a_thread_pins_its_opening(state: HttpState, runtime: Runtime) -> None:
    async def start(*messages: Message) -> Any:
        thread = await state.threads.start("me", messages, label="a label")
        return runtime.info(thread.session_id, owner="me")

    brief = asyncio.run(start(SYSTEM, HELLO))
    opening = len(runtime.tokenizer.encode("<|system|>Be brief.<|end|>\n<|user|>"))
    assert (brief.sink, brief.client_label) == (opening, "a label")
    assert asyncio.run(start(HELLO)).sink == 2
    endless = asyncio.run(start(Message("system", "Q" * 100), HELLO))
    assert endless.sink == SMALL.cache.capacity // 2


def test_extending_appends_what_is_new_alone(state: HttpState, runtime: Runtime) -> None:
    async def talk() -> None:
        thread = await state.threads.start("me", [SYSTEM, HELLO])
        assert thread.history_length == len(runtime.tokenizer.chat_ids(_dicts([SYSTEM, HELLO])))
        await say(state, thread)
        before = thread.history_length
        new = Message("user", "And?")
        assert await state.threads.extend(thread, [new])
        added = runtime.tokenizer.encode("<|end|>\n<|user|>And?<|end|>\n<|assistant|>")
        assert thread.history_length == before + len(added)
        assert thread.messages[-1] == new
        assert runtime.info(thread.session_id, owner="me").history_length == thread.history_length

    asyncio.run(talk())


def _dicts(messages: list[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def test_a_template_that_rewrites_leaves_the_thread_as_it_was(
    state: HttpState, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk() -> None:
        thread = await state.threads.start("me", [HELLO])
        await say(state, thread)
        before = replace(thread)
        prompter = state.threads.prompter(runtime)
        monkeypatch.setattr(prompter, "after_answer", lambda *args, **options: None)
        assert not await state.threads.extend(thread, [HELLO])
        assert thread == before
        assert runtime.info(thread.session_id, owner="me").history_length == before.history_length

    asyncio.run(talk())


def test_what_happened_to_the_session_is_told(state: HttpState, runtime: Runtime) -> None:
    async def talk() -> None:
        thread = await state.threads.start("me", [HELLO])
        await say(state, thread)
        runtime.append(thread.session_id, [5], owner="me")
        with pytest.raises(HistoryMismatch):
            await state.threads.extend(thread, [HELLO])
        await state.threads.close(thread)
        await state.threads.close(thread)
        with pytest.raises(SessionNotFound):
            await state.threads.extend(thread, [HELLO])

    asyncio.run(talk())


def test_a_fork_goes_its_own_way(state: HttpState, runtime: Runtime) -> None:
    async def talk() -> None:
        thread = await state.threads.start("me", [HELLO])
        await say(state, thread)
        twin = await state.threads.fork(thread)
        assert replace(twin, session_id=thread.session_id) == thread
        await state.threads.extend(twin, [Message("user", "And?")])
        assert await say(state, twin)
        assert thread.history_length < twin.history_length
        await state.threads.extend(thread, [Message("user", "And?")])
        assert thread.history_length == runtime.info(thread.session_id, owner="me").history_length

    asyncio.run(talk())


@pytest.mark.parametrize("messages", [[], [Message("robot", "x")], [Message("user", "\ud800")]])
def test_a_start_that_fails_leaves_no_session(
    state: HttpState, runtime: Runtime, messages: list[Message]
) -> None:
    with pytest.raises(InvalidArgument):
        asyncio.run(state.threads.start("me", messages))
    assert runtime.free_slabs == 3


def test_an_append_that_is_refused_leaves_no_session(model: Path) -> None:
    quotas = RuntimeConfig(quotas=Quotas(tokens_per_minute=5))
    with Runtime.open(str(model), SMALL, quotas) as runtime:
        workers = Workers(2)
        state = HttpState(HttpConfig(), KeyRing(()), workers, Commons())
        state.open(runtime)
        asked: list[str] = []

        async def make_room(owner: str, own_only: bool) -> bool:
            asked.append(owner)
            return True

        state.threads.makes_room(make_room)
        with pytest.raises(ResourceExhausted, match="tokens_per_minute"):
            asyncio.run(state.threads.start("me", [HELLO]))
        assert asked == [], "room would not help"
        assert runtime.free_slabs == 3
        workers.close()


def test_caches_give_way_in_turn(state: HttpState, runtime: Runtime) -> None:
    async def crowd() -> None:
        one = HeldConversations(state.threads, 9, 60)
        two = HeldConversations(state.threads, 9, 60)
        for held, owner in ((one, "me"), (two, "me"), (two, "you")):
            thread = await state.threads.start(owner, [HELLO])
            await say(state, thread)
            await held.hold(thread)
        for kept in ((0, 2), (0, 1), (0, 0)):
            await state.threads.start("me", [HELLO])
            assert (len(one), len(two)) == kept
        with pytest.raises(ResourceExhausted, match="no free slab"):
            await state.threads.start("me", [HELLO])
        with pytest.raises(ResourceExhausted, match="no free slab"):
            await state.threads.score("me", [5, 6], 0)

    asyncio.run(crowd())


def test_whoever_is_cancelled_leaves_no_session(state: HttpState, runtime: Runtime) -> None:
    async def leave() -> None:
        for delay in (0.0, 0.0002, 0.001, 0.002):
            for _ in range(5):
                task = asyncio.create_task(state.threads.start("me", [HELLO]))
                await asyncio.sleep(delay)
                task.cancel()
                thread = (await asyncio.gather(task, return_exceptions=True))[0]
                if isinstance(thread, Thread):
                    await state.threads.close(thread)
                else:
                    assert isinstance(thread, asyncio.CancelledError)

    asyncio.run(leave())
    eventually(lambda: runtime.free_slabs == 3)


def test_scoring_ends_with_its_caller(
    state: HttpState, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, reached, go_on = 0, threading.Event(), threading.Event()
    score_next = runtime._engine.score_next

    def count(*asked: Any) -> Any:
        nonlocal blocks
        blocks += 1
        reached.set()
        go_on.wait(10)
        return score_next(*asked)

    monkeypatch.setattr(runtime._engine, "score_next", count)

    async def leave() -> None:
        task = asyncio.create_task(state.threads.score("me", [5] * 4000, 0))
        await asyncio.to_thread(reached.wait, 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        go_on.set()

    asyncio.run(leave())
    eventually(lambda: runtime.free_slabs == 3)
    assert blocks == 1


def test_a_thread_of_tokens_ends_as_the_model_does(state: HttpState, runtime: Runtime) -> None:
    async def start() -> Thread:
        return await state.threads.start_tokens("me", [5, 6, 7])

    thread = asyncio.run(start())
    assert (thread.history_length, thread.end_token_ids, thread.messages) == (3, {0}, ())


def test_an_answer_that_was_closed_cannot_begin(state: HttpState, runtime: Runtime) -> None:
    async def close() -> None:
        thread = await state.threads.start("me", [HELLO])
        answer = Answer(state, thread, 5, SamplingParams())
        await answer.aclose()
        await answer.aclose()
        with pytest.raises(AssertionError, match="closed before"):
            await answer.begin()
        assert not answer.closed

    asyncio.run(close())


def test_an_answer_that_begins_too_late_is_interrupted(state: HttpState) -> None:
    async def interrupt() -> None:
        thread = await state.threads.start("me", [HELLO])
        answer = Answer(state, thread, 10**6, SamplingParams(logit_bias={0: -100.0}))
        state.interrupt()
        with pytest.raises(Unavailable, match="shutting down"):
            async for _ in answer:
                pass
        assert not state.streams

    asyncio.run(interrupt())


def test_an_answer_that_is_left_ends_at_once(state: HttpState, runtime: Runtime) -> None:
    async def leave() -> None:
        thread = await state.threads.start("me", [HELLO])
        answer = Answer(state, thread, 10**6, SamplingParams(logit_bias={0: -100.0}))
        pieces = aiter(answer)
        await anext(pieces)
        await answer.aclose()
        await pieces.aclose()
        assert not state.streams
        # It would be busy otherwise.
        assert runtime.append(thread.session_id, [5], owner="me") > thread.history_length

    asyncio.run(leave())


def test_what_the_tokenizer_puts_in_front_is_no_part_of_a_prompt() -> None:
    tokenizer = Tokenizer(sentencepiece_files())

    async def told() -> tuple[list[int], Piece]:
        prompt = CompletionPrompt("hello world", tokenizer)
        return prompt.token_ids, prompt._told([TokenEvent(token_id) for token_id in prompt.token_ids])

    ids, piece = asyncio.run(told())
    assert ids[0] == tokenizer.bos_id
    assert piece.text == "hello world"
    texts = [token.text for token in piece.tokens]
    assert "".join(texts) == "<s> hello world"
    assert piece.tokens[0].offset == piece.tokens[1].offset == 0
    assert all(piece.text[token.offset :].startswith(token.text) for token in piece.tokens[3:])
    assert piece.tokens[-1].offset == len("hello world") - len(texts[-1])


def test_what_was_said_before_a_failure_is_told_before_it(state: HttpState) -> None:
    async def fail() -> str:
        thread = await state.threads.start("me", [HELLO])
        answer = Answer(state, thread, 9, SamplingParams(logit_bias={0: -100.0}))
        letters = state.loaded_runtime().tokenizer.encode("QZ")
        events = [*map(TokenEvent, letters), FailedEvent(StepFailed("it broke"))]
        answer._generate = lambda: ScriptedStream(events)
        with pytest.raises(StepFailed, match="it broke"):
            async for _ in answer:
                pass
        return answer.text

    assert asyncio.run(fail()) == "QZ"


class ScriptedStream:
    """A generate that says what it was told to."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def poll_all(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def cancel(self) -> None:
        pass
