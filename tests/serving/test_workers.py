"""Calls that block, on threads: made in any case, and undone where nobody waits for the answer."""

import asyncio
import threading

import pytest

from kakeya.serving.workers import Workers
from support.loops import on_a_loop


async def give_up(call: "asyncio.Task[object]") -> None:
    """Cancel a call that has begun to wait."""
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def until_filled(happened: list[str]) -> None:
    async with asyncio.timeout(5):
        while not happened:
            await asyncio.sleep(0.005)


@on_a_loop
async def test_an_answer_that_comes_too_late_is_undone() -> None:
    undone: list[str] = []
    workers, proceed = Workers(2), threading.Event()

    def slow() -> str:
        proceed.wait()
        return "late"

    await give_up(asyncio.create_task(workers.call_or_undo(slow, undone.append)))
    proceed.set()
    await until_filled(undone)
    assert await workers.call_or_undo(lambda: "in time", undone.append) == "in time"
    workers.close()
    assert undone == ["late"]


@on_a_loop
async def test_a_call_whose_caller_gives_up_at_once_is_made_all_the_same() -> None:
    """Otherwise what it was to close would stay open."""
    made: list[str] = []
    workers, proceed = Workers(1), threading.Event()
    busy = asyncio.create_task(workers.call(proceed.wait))
    await give_up(asyncio.create_task(workers.call(made.append, "made")))
    proceed.set()
    await busy
    await until_filled(made)
    workers.close()
    assert made == ["made"]
