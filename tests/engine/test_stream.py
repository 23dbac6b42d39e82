"""Event streams, read by waiting, by polling and by being told."""

from collections.abc import Callable

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
    assert events.taken == 1


def test_all_that_waits_can_be_taken_at_once() -> None:
    wakes: list[str] = []
    events = EventStream(lambda: wakes.append("engine"))
    events.put(TruncatedEvent(5))
    events.put(TokenEvent(3))
    events.put(TokenEvent(4))
    assert events.unread_after_pause() == 2
    assert events.poll_all() == [TruncatedEvent(5), TokenEvent(3), TokenEvent(4)]
    assert (events.taken, events.unread, wakes) == (2, 0, ["engine"])
    assert events.poll_all() == []
    events.put(DONE)
    assert events.poll_all() == [DONE]
    events.cut(lambda taken: CANCELLED)
    assert events.poll_all() == [], "the reader saw the end: nothing may follow it"


def test_a_reader_is_told_once_of_what_waits_or_of_what_comes() -> None:
    told = []
    events = stream()
    events.when_ready(lambda: told.append("early"))
    assert told == []
    events.put(TokenEvent(3))
    assert told == ["early"]
    events.put(TokenEvent(4))
    assert told == ["early"], "once"
    events.when_ready(lambda: told.append("late"))
    assert told == ["early", "late"]


def test_a_reader_is_told_when_enough_waits() -> None:
    told = []
    events = stream()
    events.when_ready(lambda: told.append("enough"), 3)
    events.put(TokenEvent(3))
    events.put(TokenEvent(4))
    assert told == []
    events.put(TokenEvent(5))
    assert told == ["enough"]


@pytest.mark.parametrize(
    "reason",
    [
        lambda events: events.put(DONE),
        lambda events: events.cut(lambda taken: CANCELLED),
        lambda events: events.unread_after_pause(),
    ],
    ids=["the end", "a cut", "an engine that waits for its reader"],
)
def test_a_reader_does_not_wait_for_more_than_there_will_be(reason: Callable[[EventStream], object]) -> None:
    told = []
    events = stream()
    events.put(TokenEvent(3))
    events.when_ready(lambda: told.append("now"), 3)
    assert told == []
    reason(events)
    assert told == ["now"]


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
