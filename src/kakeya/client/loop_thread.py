"""The event loop on which plain clients run: one thread for all of them, while there is any."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop on its own thread. All clients share one, because gRPC polls once for a whole process."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _shared: ClassVar["LoopThread | None"] = None

    def __init__(self) -> None:
        self._users = 0
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._stop = asyncio.Event()
        # A daemon, so that a client nobody closed does not keep the program from ending.
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="kakeya-client", daemon=True
        )
        self._thread.start()
        self._loop = self._started.result()

    @classmethod
    def acquire(cls) -> "LoopThread":
        """The shared one, started if need be. Pair with `release`."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
            cls._shared._users += 1
            return cls._shared

    def release(self) -> None:
        """The last user ends the thread, and with it whatever still runs there."""
        with LoopThread._lock:
            self._users -= 1
            if self._users > 0:
                return
            LoopThread._shared = None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work on the loop and wait for its outcome. An interrupt of the waiting cancels the work.

        Raises RuntimeError when the thread has ended.
        """
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("this client is closed: make a new one")
        outcome = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return outcome.result()
        except BaseException:
            outcome.cancel()
            raise

    async def _serve(self) -> None:
        self._started.set_result(asyncio.get_running_loop())
        await self._stop.wait()
