"""Room that is made before it is needed."""

import threading

import pytest

from kakeya.errors import StorageFailed
from kakeya.sessions.reserve import Reserve


def test_room_is_made_after_each_look_until_the_end() -> None:
    made = threading.Semaphore(0)
    reserve = Reserve(made.release)
    reserve.start()
    for _ in range(3):
        reserve.look()
        assert made.acquire(timeout=30)
    reserve.stop()
    reserve.look()
    assert not made.acquire(blocking=False)
    reserve.stop()


def test_a_reserve_that_never_started_can_be_stopped() -> None:
    Reserve(lambda: None).stop()


@pytest.mark.parametrize("kind", [StorageFailed, RuntimeError])
def test_a_failure_is_reported_and_the_next_look_tries_again(
    caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    tried = threading.Semaphore(0)

    def fail() -> None:
        tried.release()
        raise kind("the disk tier is full")

    reserve = Reserve(fail)
    reserve.start()
    for _ in range(2):
        reserve.look()
        assert tried.acquire(timeout=30)
    reserve.stop()
    assert caplog.text.count("no slab is kept in reserve") == 2
