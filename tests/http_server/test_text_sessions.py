"""Conversations on real sessions: pinned, extended by what is new, forked, and never left behind."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kakeya.config import Quotas, RuntimeConfig
from kakeya.errors import HistoryMismatch, InvalidArgument, ResourceExhausted, SessionNotFound
from kakeya.http_server.completions.held import HeldConversations
from kakeya.http_server.generation import Answer
from kakeya.http_server.state import HttpState
from kakeya.http_server.text_sessions import TextSession, TextSessions
from kakeya.runtime import Runtime
from kakeya.serving.commons import Commons
from kakeya.serving.config import HttpConfig
from kakeya.text.prompting import Message
from kakeya.types import SamplingParams
from support.http_serving import eventually
from support.loops import on_a_loop
from support.serving import ENGINE

HELLO = Message("user", "Hello")
SYSTEM = Message("system", "Be brief.")


async def say(sessions: TextSessions, session: TextSession) -> str:
    answer = Answer(sessions, session, 4, SamplingParams(logit_bias={0: -100.0}))
    said = "".join([piece.text async for piece in answer])
    session.record(Message("assistant", said), answer)
    return said


@on_a_loop
async def test_a_session_pins_its_opening(sessions: TextSessions, small_runtime: Runtime) -> None:
    async def start(*messages: Message) -> Any:
        session = await sessions.start("me", messages, label="a label")
        return small_runtime.info(session.session_id, owner="me")

    brief = await start(SYSTEM, HELLO)
    opening = len(small_runtime.tokenizer.encode("<|system|>Be brief.<|end|>\n<|user|>"))
    assert (brief.sink, brief.client_label) == (opening, "a label")
    assert (await start(HELLO)).sink == 2
    endless = await start(Message("system", "Q" * 100), HELLO)
    assert endless.sink == 32


@on_a_loop
async def test_extending_appends_what_is_new_alone(
    sessions: TextSessions, state: HttpState, small_runtime: Runtime
) -> None:
    session = await sessions.start("me", [SYSTEM, HELLO])
    assert session.history_length == len(small_runtime.tokenizer.chat_ids(_dicts([SYSTEM, HELLO])))
    await say(sessions, session)
    before = session.history_length
    new = Message("user", "And?")
    assert await sessions.extend(session, [new])
    added = small_runtime.tokenizer.encode("<|end|>\n<|user|>And?<|end|>\n<|assistant|>")
    assert session.history_length == before + len(added)
    assert session.messages[-1] == new
    assert small_runtime.info(session.session_id, owner="me").history_length == session.history_length


def _dicts(messages: list[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


@on_a_loop
async def test_a_template_that_rewrites_leaves_the_session_as_it_was(
    sessions: TextSessions, state: HttpState, small_runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await sessions.start("me", [HELLO])
    await say(sessions, session)
    before = replace(session)
    monkeypatch.setattr(sessions.prompter, "after_answer", lambda *args, **options: None)
    assert not await sessions.extend(session, [HELLO])
    assert session == before
    assert small_runtime.info(session.session_id, owner="me").history_length == before.history_length


@on_a_loop
async def test_what_happened_to_the_session_is_told(
    sessions: TextSessions, state: HttpState, small_runtime: Runtime
) -> None:
    session = await sessions.start("me", [HELLO])
    await say(sessions, session)
    small_runtime.append(session.session_id, [5], owner="me")
    with pytest.raises(HistoryMismatch):
        await sessions.extend(session, [HELLO])
    await sessions.close(session)
    await sessions.close(session)
    with pytest.raises(SessionNotFound):
        await sessions.extend(session, [HELLO])


@on_a_loop
async def test_a_fork_goes_its_own_way(sessions: TextSessions, small_runtime: Runtime) -> None:
    session = await sessions.start("me", [HELLO])
    await say(sessions, session)
    twin = await sessions.fork(session)
    assert replace(twin, session_id=session.session_id) == session
    await sessions.extend(twin, [Message("user", "And?")])
    assert await say(sessions, twin)
    assert session.history_length < twin.history_length
    await sessions.extend(session, [Message("user", "And?")])
    assert session.history_length == small_runtime.info(session.session_id, owner="me").history_length


@pytest.mark.parametrize("messages", [[], [Message("robot", "x")], [Message("user", "\ud800")]])
def test_a_start_that_fails_leaves_no_session(
    sessions: TextSessions, small_runtime: Runtime, messages: list[Message]
) -> None:
    with pytest.raises(InvalidArgument):
        asyncio.run(sessions.start("me", messages))
    assert small_runtime.free_slabs == 3


def test_an_append_that_is_refused_leaves_no_session(model: Path) -> None:
    quotas = RuntimeConfig(quotas=Quotas(tokens_per_minute=5))
    with Runtime.open(str(model), replace(ENGINE, capacity=3), quotas) as runtime:
        state = HttpState(HttpConfig(), Commons())
        asked: list[str] = []

        async def evict(owner: str, own_only: bool) -> bool:
            asked.append(owner)
            return True

        state.eviction.add(evict)
        with pytest.raises(ResourceExhausted, match="tokens_per_minute"):
            asyncio.run(TextSessions(runtime, state).start("me", [HELLO]))
        assert asked == [], "an eviction would not help"
        assert runtime.free_slabs == 3
        state.workers.close()


@on_a_loop
async def test_caches_give_way_in_turn(sessions: TextSessions, state: HttpState) -> None:
    one = HeldConversations(sessions, 9, 60)
    two = HeldConversations(sessions, 9, 60)
    state.eviction.add(one.evict)
    state.eviction.add(two.evict)
    for held, owner in ((one, "me"), (two, "me"), (two, "you")):
        session = await sessions.start(owner, [HELLO])
        await say(sessions, session)
        await held.hold(session)
    for kept in ((0, 2), (0, 1), (0, 0)):
        await sessions.start("me", [HELLO])
        assert (len(one), len(two)) == kept
    with pytest.raises(ResourceExhausted, match="no free slab"):
        await sessions.start("me", [HELLO])
    with pytest.raises(ResourceExhausted, match="no free slab"):
        await sessions.score("me", [5, 6], 0)


def test_whoever_is_cancelled_leaves_no_session(sessions: TextSessions, small_runtime: Runtime) -> None:
    async def leave() -> None:
        for delay in (0.0, 0.0002, 0.001, 0.002):
            for _ in range(5):
                task = asyncio.create_task(sessions.start("me", [HELLO]))
                await asyncio.sleep(delay)
                task.cancel()
                session = (await asyncio.gather(task, return_exceptions=True))[0]
                if isinstance(session, TextSession):
                    await sessions.close(session)
                else:
                    assert isinstance(session, asyncio.CancelledError)

    asyncio.run(leave())
    eventually(lambda: small_runtime.free_slabs == 3)


def test_scoring_ends_with_its_caller(
    sessions: TextSessions, small_runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, reached, go_on = 0, threading.Event(), threading.Event()
    score_next = small_runtime._engine.score_next

    def count(*asked: Any) -> Any:
        nonlocal blocks
        blocks += 1
        reached.set()
        go_on.wait(10)
        return score_next(*asked)

    monkeypatch.setattr(small_runtime._engine, "score_next", count)

    async def leave() -> None:
        task = asyncio.create_task(sessions.score("me", [5] * 4000, 0))
        await asyncio.to_thread(reached.wait, 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        go_on.set()

    asyncio.run(leave())
    eventually(lambda: small_runtime.free_slabs == 3)
    assert blocks == 1


@on_a_loop
async def test_a_session_of_tokens_ends_as_the_model_does(sessions: TextSessions) -> None:
    session = await sessions.start_tokens("me", [5, 6, 7])
    assert (session.history_length, session.end_token_ids, session.messages) == (3, {0}, ())
