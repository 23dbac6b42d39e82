"""Ending a run early and still getting its report: SIGINT and SIGTERM as a request, not as an end."""

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Whether somebody wants the run to end, and who: `reason` is the signal's name."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._asked = asyncio.Event()

    def ask(self, reason: str) -> None:
        """The run should end now. The first reason stays."""
        self.reason = self.reason or reason
        self._asked.set()

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` gives; None when the run should end, and then the work is cancelled first."""
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            asked.cancel()
            task.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    async def sleep(self, seconds: float) -> None:
        """Wait, but not when the run should end."""
        await self.unless_asked(asyncio.sleep(max(0.0, seconds)))


@contextmanager
def interruptible(interruption: Interruption) -> Iterator[None]:
    """Signals ask for the end meanwhile, on the running event loop; afterwards they do what they did."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        loop.add_signal_handler(number, interruption.ask, number.name)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
