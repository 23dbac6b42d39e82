"""One generate: begun, read, left, interrupted, split into text and calls, and what it took."""

import pytest

from kakeya.errors import StepFailed, Unavailable
from kakeya.http_server.generation import Answer, PartReader, Usage
from kakeya.http_server.state import HttpState
from kakeya.http_server.text_sessions import TextSessions
from kakeya.runtime import Runtime
from kakeya.text.answer import Piece, TextToken
from kakeya.text.prompting import Message
from kakeya.text.tool_calls import CallBegin, TextPiece, write_tool_call
from kakeya.types import Event, FailedEvent, SamplingParams, TokenEvent
from support.loops import on_a_loop

HELLO = Message("user", "Hello")


@on_a_loop
async def test_an_answer_that_was_closed_cannot_begin(
    sessions: TextSessions, state: HttpState, small_runtime: Runtime
) -> None:
    session = await sessions.start("me", [HELLO])
    answer = Answer(sessions, session, 5, SamplingParams())
    await answer.aclose()
    await answer.aclose()
    with pytest.raises(AssertionError, match="closed before"):
        await answer.begin()
    assert not answer.closed


@on_a_loop
async def test_an_answer_that_begins_too_late_is_interrupted(
    sessions: TextSessions, state: HttpState, small_runtime: Runtime
) -> None:
    session = await sessions.start("me", [HELLO])
    answer = Answer(sessions, session, 10**6, SamplingParams(logit_bias={0: -100.0}))
    state.interrupt()
    with pytest.raises(Unavailable, match="shutting down"):
        async for _ in answer:
            pass
    assert not state.streams


@on_a_loop
async def test_an_answer_that_is_left_ends_at_once(
    sessions: TextSessions, state: HttpState, small_runtime: Runtime
) -> None:
    session = await sessions.start("me", [HELLO])
    answer = Answer(sessions, session, 10**6, SamplingParams(logit_bias={0: -100.0}))
    pieces = aiter(answer)
    await anext(pieces)
    await answer.aclose()
    await pieces.aclose()
    assert not state.streams
    # It would be busy otherwise.
    assert small_runtime.append(session.session_id, [5], owner="me") > session.history_length


@on_a_loop
async def test_what_was_said_before_a_failure_is_told_before_it(
    sessions: TextSessions, state: HttpState, small_runtime: Runtime
) -> None:
    session = await sessions.start("me", [HELLO])
    answer = Answer(sessions, session, 9, SamplingParams(logit_bias={0: -100.0}))
    letters = small_runtime.tokenizer.encode("QZ")
    events = [*map(TokenEvent, letters), FailedEvent(StepFailed("it broke"))]
    answer._generate = lambda: ScriptedStream(events)
    said = ""
    with pytest.raises(StepFailed, match="it broke"):
        async for piece in answer:
            said += piece.text
    assert said == "QZ"


class ScriptedStream:
    """A generate that says what it was told to."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def poll_all(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def cancel(self) -> None:
        pass


def test_tokens_come_with_what_they_say() -> None:
    reader = PartReader(reads_calls=True)
    said = f"Well {write_tool_call('rest', '{}')}"
    pieces = [Piece(each, (TextToken(at, each, [], None),)) for at, each in enumerate(said)]
    parts = [*(part for piece in pieces for part in reader.feed(piece)), *reader.finish()]
    assert [token.token_id for _, tokens in parts for token in tokens] == list(range(len(said)))
    texts = [(event.text, tokens[-1].text) for event, tokens in parts if isinstance(event, TextPiece)]
    # The end of the call has no text; its tokens come last.
    assert texts == [*zip("Well", "Well", strict=True), ("", ">")]
    [begin] = [tokens for event, tokens in parts if isinstance(event, CallBegin)]
    assert begin[-1].text == "{", "a call is told with its name, before its arguments"
    assert sum(bool(tokens) for _, tokens in parts) > 6


def test_an_answer_without_calls_is_all_text() -> None:
    reader = PartReader(reads_calls=False)
    token = TextToken(1, "", [], None)
    call = write_tool_call("rest", "{}")
    assert list(reader.feed(Piece("", (token,)))) == [], "it waits for a text"
    assert list(reader.feed(Piece(call, ()))) == [(TextPiece(call), (token,))]
    assert list(reader.finish()) == []
    assert list(reader.feed(Piece("", (token,)))) == []
    assert list(reader.finish()) == [(TextPiece(""), (token,))]


def test_usage_in_both_shapes() -> None:
    usage = Usage(10, 3, 4, 2, 1, 5)
    assert usage.to_chat() == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 5},
        "dropped_tokens": 2,
        "recalled_tokens": 0,
    }
    assert usage.to_responses() == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 6},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
        "dropped_tokens": 2,
        "recalled_tokens": 0,
    }
