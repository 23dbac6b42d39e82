"""Signals as requests for an end."""

import asyncio
import os
import signal
import time

import pytest

from kakeya.bench.interrupts import Interruption, interruptible


def test_work_goes_on_until_somebody_asks() -> None:
    cancelled: list[bool] = []

    async def work(seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return "done"

    async def broken() -> None:
        raise ValueError("broken")

    async def story() -> None:
        interruption = Interruption()
        assert await interruption.unless_asked(work(0)) == "done"
        with pytest.raises(ValueError, match="broken"):
            await interruption.unless_asked(broken())
        asyncio.get_running_loop().call_later(0.05, interruption.ask, "first")
        assert await interruption.unless_asked(work(60)) is None
        assert cancelled == [True]
        interruption.ask("second")
        assert interruption.reason == "first"
        began = time.monotonic()
        await interruption.sleep(60)
        assert time.monotonic() - began < 10

    asyncio.run(story())


def test_signals_ask_meanwhile_and_do_what_they_did_afterwards() -> None:
    def ours(*_: object) -> None:
        pass

    async def story() -> str | None:
        interruption = Interruption()
        with interruptible(interruption):
            os.kill(os.getpid(), signal.SIGTERM)
            await interruption.sleep(30)
        return interruption.reason

    before = signal.signal(signal.SIGTERM, ours)
    try:
        assert asyncio.run(story()) == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)
