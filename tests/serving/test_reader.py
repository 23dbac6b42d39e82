"""Reading a stream on an event loop: one by one, in groups, at a pace shared with other streams."""

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest

from kakeya.config import EngineConfig
from kakeya.engine.stream import EventStream
from kakeya.serving.pace import Pace
from kakeya.serving.reader import EventReader
from kakeya.types import DoneEvent, Event, StopReason, TokenEvent
from support.loops import on_a_loop

DONE = DoneEvent(StopReason.EOS, 0, 0.0, 0.0, 0)


def tokens(count: int) -> list[Event]:
    return [TokenEvent(number) for number in range(count)]


def put_later(stream: EventStream, *events: Event, after_s: float = 0.01) -> None:
    for event in events:
        asyncio.get_running_loop().call_later(after_s, stream.put, event)


@on_a_loop
async def test_events_come_one_by_one() -> None:
    stream = EventStream(lambda: None)
    reader = EventReader(stream)
    put_later(stream, *tokens(2), DONE)
    assert [await reader.next_event() for _ in range(3)] == [*tokens(2), DONE]


@on_a_loop
async def test_what_waits_comes_together() -> None:
    stream = EventStream(lambda: None)
    for event in tokens(3):
        stream.put(event)
    reader = EventReader(stream)
    assert await reader.next_events() == tokens(3)
    put_later(stream, DONE)
    assert await reader.next_events() == [DONE]


def crowded(pace: Pace, stack: ExitStack, streams: int) -> Pace:
    for _ in range(streams):
        stack.enter_context(pace.stream())
    return pace


async def group_sizes(stream: EventStream, pace: Pace) -> list[int]:
    """How many events came together, up to the end."""
    reader, sizes = EventReader(stream, pace), []
    while True:
        events = await reader.next_events()
        sizes.append(len(events))
        if isinstance(events[-1], DoneEvent):
            return sizes


@on_a_loop
async def test_a_lone_stream_never_rests() -> None:
    stream = EventStream(lambda: None)
    with ExitStack() as stack:
        pace = crowded(Pace(messages_per_second=0.1, longest_pause_s=10), stack, 1)
        for number, event in enumerate([*tokens(3), DONE]):
            put_later(stream, event, after_s=0.01 * (number + 1))
        async with asyncio.timeout(5):  # one rest would take longer
            assert sum(await group_sizes(stream, pace)) == 4


@on_a_loop
async def test_a_crowd_of_streams_gets_several_tokens_at_a_time() -> None:
    stream = EventStream(lambda: None)
    with ExitStack() as stack:
        pace = crowded(Pace(messages_per_second=10, longest_pause_s=0.2), stack, 3)
        for number, event in enumerate([*tokens(6), DONE]):
            put_later(stream, event, after_s=0.02 * number)
        sizes = await group_sizes(stream, pace)
    assert sum(sizes) == 7
    assert len(sizes) <= 4


@pytest.mark.parametrize("events", [[*tokens(8)], [*tokens(1), DONE]], ids=["many", "the end"])
@on_a_loop
async def test_a_rest_ends_early_when_it_would_hold_something_up(events: list[Event]) -> None:
    stream = EventStream(lambda: None)
    with ExitStack() as stack:
        reader = EventReader(stream, crowded(Pace(0.001, longest_pause_s=1000), stack, 2))
        stream.put(TokenEvent(99))
        assert await reader.next_events() == [TokenEvent(99)]
        put_later(stream, *events)
        async with asyncio.timeout(5):
            assert await reader.next_events() == events


def test_streams_of_a_crowd_rest_until_the_same_moment() -> None:
    with ExitStack() as stack:
        pace = crowded(Pace(messages_per_second=100, longest_pause_s=0.1), stack, 6)
        assert pace.rests_until(10.001) == pace.rests_until(10.049) == pytest.approx(10.05)
        crowded(pace, stack, 1000)
        assert pace.rests_until(10.001) == pytest.approx(10.1), "no rest is longer than the longest"
    assert pace.rests_until(10.001) == 10.001, "the streams are gone"


def test_by_default_no_stream_rests_longer_than_a_step_beside_prompts_takes() -> None:
    with ExitStack() as stack:
        pace = crowded(Pace(), stack, 1000)
        assert pace.rests_until(0.0) <= EngineConfig.max_stall_ms / 1000


def test_a_reader_outlived_by_its_source_harms_nobody() -> None:
    stream = EventStream(lambda: None)

    async def give_up() -> Any:
        reader = EventReader(stream)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.next_event(), 0.01)

    asyncio.run(give_up())
    stream.put(TokenEvent(1))  # announces to a loop that is closed
