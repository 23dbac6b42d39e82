"""What a step is filled with, on real sequences that nothing computes."""

import pytest
from hypothesis import given, settings, strategies as st

from kakeya.config import EngineConfig
from kakeya.engine.request import Request
from kakeya.engine.stream import EventStream
from kakeya.types import BackendChoice, StopReason, TokenEvent
from support import tiny
from support.engines import Room


def config(**changes: object) -> EngineConfig:
    return tiny.engine_config(capacity=64, prefill_block=8, max_batch_tokens=16, **changes)


def test_owners_share_by_tokens_and_not_by_sessions() -> None:
    room = Room(config())
    for _ in range(6):
        room.start("many", 800)
    room.start("one", 800)
    for _ in range(40):
        room.step()
    assert sum(room.served.values()) == 40 * 16
    assert abs(room.served["many"] - room.served["one"]) <= 16


@pytest.mark.parametrize("any_cut", [False, True])
def test_prompts_of_one_owner_are_computed_one_after_another(any_cut: bool) -> None:
    room = Room(config(), any_cut=any_cut)
    requests = [room.start("same", 160) for _ in range(4)]
    for _ in range(11):
        room.step()
    # A step holds two blocks, so two prompts are on their way.
    assert [request.emitted > 0 for request in requests] == [False, False, False, False]
    for _ in range(11):
        room.step()
    assert [request.emitted > 0 for request in requests] == [True, True, False, False]


def test_a_short_prompt_goes_before_long_ones() -> None:
    room = Room(config(), any_cut=True)
    for _ in range(8):
        room.start("same", 4000)
    room.step()
    short = room.start("same", 10)
    room.step()
    room.step()
    assert short.emitted > 0


@given(
    length=st.integers(20, 200),
    others=st.lists(st.lists(st.integers(1, 200), max_size=3), min_size=60, max_size=60),
)
@settings(max_examples=15, deadline=None)
def test_latecomers_pass_a_prompt_by_no_more_tokens_than_it_has(length: int, others: list[list[int]]) -> None:
    room = Room(tiny.engine_config(capacity=200, prefill_block=16, max_batch_tokens=16), any_cut=True)
    waiting = room.start("same", length)
    late: dict[Request, int] = {}
    for arrivals in others:
        late |= {room.start("same", other): other for other in arrivals}
        room.step()
        for request in late:
            if request.emitted:
                request.max_tokens = request.emitted  # it has said all it had to say
        if waiting.emitted:
            return
        assert sum(min(each.sequence.slab.written, asked) for each, asked in late.items()) <= length + 16
    raise AssertionError("it was passed over for ever")


def test_a_prompt_in_many_appends_has_the_place_of_one_in_one() -> None:
    one_at_a_time = tiny.engine_config(capacity=8, prefill_block=8, max_batch_tokens=8)
    room = Room(one_at_a_time, any_cut=True)
    pieces = room.start("same", 200, appends=200)
    whole, short = room.start("same", 200), room.start("same", 100)
    while not short.emitted:
        room.step()
    assert pieces.sequence.slab.written < 8  # what the last step of the short one left
    while not pieces.emitted:
        room.step()
    assert not whole.emitted


def test_rows_of_prompts_beside_streams_follow_the_pace() -> None:
    room = Room(config(max_stall_ms=40), any_cut=True)
    room.start("reader", 400)
    room.step()
    room.scheduler.learn(0.1)  # a row takes some 6 ms
    room.start("talker", 4, emitted=1)
    assert sorted(room.step()) == [("reader", 8), ("talker", 1)]


def test_where_blocks_stay_whole_one_goes_beside_streams() -> None:
    wide = tiny.engine_config(capacity=8, prefill_block=8, max_batch_tokens=64, max_stall_ms=40)
    room = Room(wide, any_cut=False)
    for _ in range(3):
        room.start("same", 400)
    assert room.step() == [("same", 8)] * 3
    room.scheduler.learn(0.1)  # a row takes some 4 ms
    room.start("talker", 4, emitted=1)
    assert room.step() == [("talker", 1), ("same", 8)]


def test_a_step_that_ends_a_prompt_carries_little_else() -> None:
    wide = tiny.engine_config(capacity=8, prefill_block=128, max_batch_tokens=128, max_stall_ms=40)
    room = Room(wide, any_cut=True)
    for _ in range(3):
        room.start("same", 400)
    assert room.step() == [("same", 128)]
    room.scheduler.learn(128 * 0.002)
    assert room.step() == [("same", 40)], "twice what fits into 40 ms"
    short = room.start("same", 5)
    assert room.step() == [("same", 5), ("same", 15)]
    assert short.emitted == 1


def test_every_stream_moves_while_a_prompt_is_read() -> None:
    room = Room(config())
    for index in range(5):
        room.start(f"talker {index}", 4, emitted=1)
    room.start("reader", 800)
    for _ in range(30):
        assert len(room.step()) == 6


def test_a_prompt_is_not_starved_by_many_streams() -> None:
    room = Room(config())
    for index in range(40):
        room.start(f"talker {index}", 4, emitted=1)
    reader = room.start("reader", 80)
    for _ in range(250):
        room.step()
    assert reader.emitted > 0


@pytest.mark.parametrize("owners", [1, 300])
def test_on_a_device_a_prompt_is_read_beside_every_stream(owners: int) -> None:
    room = Room(EngineConfig(backend=BackendChoice.CUDA, capacity=301))
    for index in range(300):
        room.start(f"talker {index % owners}", 4, emitted=1)
    for _ in range(3):
        room.step()
    room.check_prompt_beside_streams()


def test_prompts_that_do_not_fit_together_take_turns_beside_every_stream() -> None:
    room = Room(EngineConfig(backend=BackendChoice.CUDA, capacity=302))
    for index in range(300):
        room.start(f"talker {index}", 4, emitted=1)
    readers = [room.start("reader", 2 * 2048) for _ in range(2)]
    for _ in range(4):
        step = room.step()
        assert step.count(("reader", 2048)) == 1
        assert sum(owner != "reader" for owner, _ in step) == 300
    assert all(reader.sequence.slab.written >= 2 * 2048 for reader in readers)


def test_a_newcomer_neither_waits_for_the_past_nor_makes_up_for_it() -> None:
    room = Room(config())
    room.start("old", 10_000)
    for _ in range(100):
        room.step()
    room.start("new", 10_000)
    before = dict(room.served)
    for _ in range(20):
        room.step()
    assert abs((room.served["old"] - before["old"]) - room.served["new"]) <= 16


def test_drafts_ride_along_and_count_against_the_budget() -> None:
    room = Room(config())
    first, second = room.start("a", 4, emitted=1), room.start("b", 4, emitted=1)
    assert sorted(room.step({first: [5, 6, 7]})) == [("a", 4), ("b", 1)]
    assert room.step({second: [5] * 15, first: []})[0] == ("b", 16)


def test_the_draft_limit_counts_spare_slots_and_what_is_left_to_say() -> None:
    room = Room(config())
    request = room.start("a", 4, emitted=1)
    assert room.scheduler.draft_limit(request, 99) == 4
    request.stream.put(TokenEvent(3))
    assert room.scheduler.draft_limit(request, 99) == 3
    request.max_tokens = 2
    assert room.scheduler.draft_limit(request, 99) == 0


def test_a_reader_that_lags_is_passed_over_until_it_reads() -> None:
    woken = []
    room = Room(config())
    request = room.start("a", 4, emitted=1)
    stream = request.stream = EventStream(lambda: woken.append(True))
    for _ in range(5):
        stream.put(TokenEvent(3))
    assert room.scheduler.ready() == []
    stream.next_event()
    assert woken == [True]
    assert room.scheduler.ready() == [request]
    request.finish(StopReason.EOS)
    assert room.scheduler.ready() == []


def test_an_owner_is_forgotten_with_its_last_request() -> None:
    room = Room(config())
    first, second = room.start("a", 4), room.start("a", 4)
    first.cancel()
    room.step()
    second.cancel()
    assert room.scheduler.active == []
    assert room.scheduler._served == {}
