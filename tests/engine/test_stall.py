"""How many rows of prompts go beside streams."""

import pytest

from kakeya.engine.stall import StallLimit


def taught(seconds: float, streams: float, row: float) -> StallLimit:
    limit = StallLimit(seconds)
    for _ in range(50):
        limit.learn(0, 0, streams, has_streams=True)
        limit.learn(32, 0, streams + 32 * row, has_streams=True)
    return limit


def test_a_step_keeps_within_the_limit() -> None:
    assert taught(0.040, 0.010, 0.001).rows(256, 0) in (29, 30)


def test_what_came_alone_tells_the_price_of_a_row() -> None:
    limit = StallLimit(0.040)
    limit.learn(100, 0, 0.1, has_streams=False)
    assert limit.rows(256, 0) in (39, 40)


def test_prompts_alone_have_twice_as_long() -> None:
    assert taught(0.040, 0.010, 0.001).rows(256, 0, is_awaited=False) in (79, 80)


def test_nothing_is_known_at_first() -> None:
    assert StallLimit(0.040).rows(256, 0) == 256


def test_no_limit() -> None:
    assert taught(0.0, 0.010, 0.001).rows(256, 0) == 256


def test_prompts_get_on_where_streams_alone_take_as_long() -> None:
    assert taught(0.040, 0.100, 0.001).rows(256, 0) in (49, 50)


@pytest.mark.parametrize(("most", "expected"), [(256, 8), (5, 5), (0, 0)])
def test_some_rows_always_go(most: int, expected: int) -> None:
    assert taught(0.040, 0.001, 1.0).rows(most, 0) == expected


def test_old_steps_are_forgotten() -> None:
    limit = taught(0.040, 0.010, 0.001)
    for _ in range(50):
        limit.learn(32, 0, 0.010 + 32 * 0.0005, has_streams=True)
    assert limit.rows(256, 0) in (59, 60)


def taught_slots(row: float, slot: float) -> StallLimit:
    """It has seen prompts from their beginning to 1,000 slots."""
    limit = StallLimit(0.040)
    for _ in range(3):
        for seen in range(20, 1000, 40):
            limit.learn(40, 40 * seen, 40 * (row + slot * seen), has_streams=False)
    return limit


def test_rows_that_see_more_are_fewer() -> None:
    limit = taught_slots(0.0002, 0.0000004)  # 0.2 ms, and twice that where 500 slots are seen
    assert limit.rows(256, 0) in (198, 199, 200)
    assert limit.rows(256, 500) in (98, 99, 100)
    assert limit.rows(256, 1000) in (65, 66)


def test_slots_that_cost_nothing_change_nothing() -> None:
    limit = taught_slots(0.0004, 0.0)
    assert limit.rows(256, 0) in (99, 100)
    assert limit.rows(256, 1000) in (99, 100)


def test_rows_that_all_see_alike_do_not_tell_what_a_slot_costs() -> None:
    limit = StallLimit(0.040)
    for _ in range(200):
        limit.learn(40, 40 * 1000, 0.040, has_streams=False)
    assert limit.rows(256, 1000) in (39, 40)
    assert limit.rows(256, 0) in (39, 40)


def test_one_slow_step_counts_as_a_little_slow() -> None:
    limit = taught(0.040, 0.010, 0.001)
    limit.learn(32, 0, 1.0, has_streams=True)
    assert limit.rows(256, 0) in (26, 27)
