"""Event streams, read by waiting, by polling and by being told."""

import pytest

from kakeya.engine.stream import EventStream
from kakeya.types import DoneEvent, FailedEvent, StopReason, TokenEvent, TruncatedEvent

DONE = DoneEvent(StopReason.MAX_TOKENS, 1, 0.0, 0.0, 0)
CANCELLED = DoneEvent(StopReason.CANCELLED, 0, 0.0, 0.0, 0)


def stream() -> EventStream:
    return EventStream(lambda: None)


def test_polling_takes_what_is_there_and_never_waits() -> None:
    events = stream()
    assert events.poll() is None
    events.put(TokenEvent(3))
    events.put(DONE)
    assert (events.poll(), events.poll(), events.poll()) == (TokenEvent(3), DONE, None)
    assert events.taken() == 1


def test_a_subscriber_is_told_of_what_waits_and_of_what_comes() -> None:
    told = []
    events = stream()
    events.subscribe(lambda: told.append("early"))
    assert told == []
    events.put(TokenEvent(3))
    assert told == ["early"]
    events.subscribe(lambda: told.append("late"))
    assert told == ["early", "late"]
    events.cut(lambda taken: CANCELLED)
    assert told == ["early", "late", "late"]


def test_a_cut_drops_what_is_unread_and_ends_the_stream() -> None:
    events = stream()
    events.put(TruncatedEvent(5))
    events.put(TokenEvent(3))
    events.put(TokenEvent(4))
    assert events.next_event() == TruncatedEvent(5)
    assert events.next_event() == TokenEvent(3)
    taken = []
    events.cut(lambda count: (taken.append(count), CANCELLED)[1])
    assert taken == [1]
    assert list(events) == [CANCELLED]


def test_a_cut_after_the_end_was_seen_changes_nothing() -> None:
    events = stream()
    events.put(DONE)
    assert list(events) == [DONE]
    events.cut(lambda taken: CANCELLED)
    assert events.poll() is None


def test_nothing_follows_the_end() -> None:
    events = stream()
    events.put(DONE)
    with pytest.raises(AssertionError, match="after the terminal"):
        events.put(TokenEvent(3))


def test_a_failure_is_raised_as_its_error() -> None:
    events = stream()
    events.put(FailedEvent(KeyError("broken")))
    with pytest.raises(KeyError, match="broken"):
        list(events)
