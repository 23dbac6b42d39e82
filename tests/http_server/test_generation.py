"""One generate: begun, read, left, interrupted, and what it took as the APIs tell it."""

import asyncio

import pytest

from kakeya.errors import StepFailed, Unavailable
from kakeya.http_server.generation import Answer, Usage
from kakeya.http_server.state import HttpState
from kakeya.http_server.text_sessions import TextSessions
from kakeya.runtime import Runtime
from kakeya.text.prompting import Message
from kakeya.types import Event, FailedEvent, SamplingParams, TokenEvent

HELLO = Message("user", "Hello")


def test_an_answer_that_was_closed_cannot_begin(
    sessions: TextSessions, state: HttpState, small_runtime: Runtime
) -> None:
    async def close() -> None:
        session = await sessions.start("me", [HELLO])
        answer = Answer(sessions, session, 5, SamplingParams())
        await answer.aclose()
        await answer.aclose()
        with pytest.raises(AssertionError, match="closed before"):
            await answer.begin()
        assert not answer.closed

    asyncio.run(close())


def test_an_answer_that_begins_too_late_is_interrupted(
    sessions: TextSessions, state: HttpState, small_runtime: Runtime
) -> None:
    async def interrupt() -> None:
        session = await sessions.start("me", [HELLO])
        answer = Answer(sessions, session, 10**6, SamplingParams(logit_bias={0: -100.0}))
        state.interrupt()
        with pytest.raises(Unavailable, match="shutting down"):
            async for _ in answer:
                pass
        assert not state.streams

    asyncio.run(interrupt())


def test_an_answer_that_is_left_ends_at_once(
    sessions: TextSessions, state: HttpState, small_runtime: Runtime
) -> None:
    async def leave() -> None:
        session = await sessions.start("me", [HELLO])
        answer = Answer(sessions, session, 10**6, SamplingParams(logit_bias={0: -100.0}))
        pieces = aiter(answer)
        await anext(pieces)
        await answer.aclose()
        await pieces.aclose()
        assert not state.streams
        # It would be busy otherwise.
        assert small_runtime.append(session.session_id, [5], owner="me") > session.history_length

    asyncio.run(leave())


def test_what_was_said_before_a_failure_is_told_before_it(
    sessions: TextSessions, state: HttpState, small_runtime: Runtime
) -> None:
    async def fail() -> str:
        session = await sessions.start("me", [HELLO])
        answer = Answer(sessions, session, 9, SamplingParams(logit_bias={0: -100.0}))
        letters = small_runtime.tokenizer.encode("QZ")
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


def test_usage_in_both_shapes() -> None:
    usage = Usage(10, 3, 4, 2)
    assert usage.to_chat() == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4},
        "dropped_tokens": 2,
    }
    assert usage.to_responses() == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 6},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
        "dropped_tokens": 2,
    }
