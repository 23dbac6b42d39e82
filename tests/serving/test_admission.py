"""Admission: places, the queue for them, and every way out of it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from kakeya.config import AdmissionConfig
from kakeya.errors import ResourceExhausted, Unavailable
from kakeya.serving.admission import Admission, Place
from kakeya.types import AdmissionPolicy


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 10))


def house(**settings: Any) -> tuple[Admission, list[str]]:
    refusals: list[str] = []
    return Admission(AdmissionConfig(**settings), refusals.append), refusals


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def coming(admission: Admission, owner: str) -> "asyncio.Task[Place]":
    async def take() -> Place:
        return await admission.admit(owner)

    return asyncio.create_task(take())


def test_a_full_house_rejects_at_once() -> None:
    async def work() -> None:
        admission, refusals = house(max_concurrent=2, policy=AdmissionPolicy.REJECT)
        async with admission.admit("a"):
            place = await admission.admit("b")
            assert admission.running == 2
            with pytest.raises(ResourceExhausted, match="all 2 places"):
                await admission.admit("c")
            place.release()
            place.release()
            assert admission.running == 1
        async with await admission.admit("c"):
            assert admission.running == 1
        assert (admission.running, refusals) == (0, ["rejected"])

    run(work)


def test_a_place_goes_to_who_holds_fewest_then_to_who_came_first() -> None:
    async def work() -> None:
        admission, _ = house(max_concurrent=2)
        held = [await admission.admit("busy"), await admission.admit("busy")]
        order: list[str] = []

        async def visit(owner: str, name: str) -> None:
            async with admission.admit(owner):
                order.append(name)
                await settle()

        visits = [
            asyncio.create_task(visit(owner, name))
            for owner, name in (("busy", "b1"), ("x", "x1"), ("x", "x2"), ("y", "y1"))
        ]
        await settle()
        assert (admission.waiting, order) == (4, [])
        held[0].release()
        await asyncio.gather(*visits)
        assert order == ["x1", "x2", "y1", "b1"]
        assert (admission.running, admission.waiting) == (1, 0)

    run(work)


def test_equal_owners_are_served_in_turn_of_what_they_hold() -> None:
    async def work() -> None:
        admission, _ = house(max_concurrent=2)
        first, second = await admission.admit("x"), await admission.admit("y")
        waiting = [coming(admission, owner) for owner in ("x", "x", "y")]
        await settle()
        second.release()
        await settle()
        # y holds none now and x one, so y overtakes both.
        assert [task.done() for task in waiting] == [False, False, True]
        first.release()
        await settle()
        assert [task.done() for task in waiting] == [True, False, True]
        (await waiting[0]).release()
        (await waiting[1]).release()
        (await waiting[2]).release()
        assert admission.running == 0

    run(work)


def test_the_queue_is_bounded_in_length_and_time() -> None:
    async def work() -> None:
        admission, refusals = house(max_concurrent=1, queue_depth=1, queue_max_wait_s=0.05)
        async with admission.admit("a"):
            late = coming(admission, "b")
            await settle()
            with pytest.raises(ResourceExhausted, match="queue is full"):
                await admission.admit("c")
            with pytest.raises(ResourceExhausted, match="no place became free in 0.05 s"):
                await late
        assert (admission.running, admission.waiting) == (0, 0)
        assert refusals == ["queue_full", "timed_out"]

    run(work)


def test_zero_waits_for_ever() -> None:
    async def work() -> None:
        admission, _ = house(max_concurrent=1, queue_max_wait_s=0)
        place = await admission.admit("a")
        waiting = coming(admission, "b")
        await asyncio.sleep(0.1)
        assert not waiting.done()
        place.release()
        (await waiting).release()

    run(work)


@pytest.mark.parametrize("too_late", [False, True])
def test_who_gives_up_leaves_nothing_behind(too_late: bool) -> None:
    async def work() -> None:
        admission, refusals = house(max_concurrent=1)
        place = await admission.admit("a")
        impatient, patient = coming(admission, "b"), coming(admission, "c")
        await settle()
        if too_late:  # its place comes at the very moment of the cancellation
            place.release()
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        place.release()
        (await patient).release()
        assert (admission.running, admission.waiting, refusals) == (0, 0, [])

    run(work)


def test_a_draining_house_lets_nobody_in_and_throws_nobody_out() -> None:
    async def work() -> None:
        admission, _ = house(max_concurrent=1)
        place = await admission.admit("a")
        waiting, cancelled = coming(admission, "b"), coming(admission, "b")
        await settle()
        admission.close()
        cancelled.cancel()
        admission.close()
        for attempt in (waiting, admission.admit("c")):
            with pytest.raises(Unavailable, match="shutting down"):
                await _any(attempt)
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert admission.running == 1
        place.release()
        assert admission.running == 0

    run(work)


async def _any(attempt: Awaitable[Place]) -> Place:
    return await attempt
