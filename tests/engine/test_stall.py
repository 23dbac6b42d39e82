"""How many rows of prompts go beside streams."""

import pytest

from kakeya.engine.stall import StallLimit


def taught(seconds: float, streams: float, row: float) -> StallLimit:
    limit = StallLimit(seconds)
    for _ in range(50):
        limit.learn(0, streams, has_streams=True)
        limit.learn(32, streams + 32 * row, has_streams=True)
    return limit


def test_a_step_keeps_within_the_limit() -> None:
    assert taught(0.040, 0.010, 0.001).rows(256) in (29, 30)


def test_what_came_alone_tells_the_price_of_a_row() -> None:
    limit = StallLimit(0.040)
    limit.learn(100, 0.1, has_streams=False)
    assert limit.rows(256) in (39, 40)


def test_prompts_alone_have_twice_as_long() -> None:
    assert taught(0.040, 0.010, 0.001).rows(256, is_awaited=False) in (79, 80)


def test_nothing_is_known_at_first() -> None:
    assert StallLimit(0.040).rows(256) == 256


def test_no_limit() -> None:
    assert taught(0.0, 0.010, 0.001).rows(256) == 256


def test_prompts_get_on_where_streams_alone_take_as_long() -> None:
    assert taught(0.040, 0.100, 0.001).rows(256) in (49, 50)


@pytest.mark.parametrize(("most", "expected"), [(256, 8), (5, 5), (0, 0)])
def test_some_rows_always_go(most: int, expected: int) -> None:
    assert taught(0.040, 0.001, 1.0).rows(most) == expected


def test_old_steps_are_forgotten() -> None:
    limit = taught(0.040, 0.010, 0.001)
    for _ in range(50):
        limit.learn(32, 0.010 + 32 * 0.0005, has_streams=True)
    assert limit.rows(256) in (59, 60)
