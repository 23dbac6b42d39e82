"""Threads for the runtime's calls, which wait for the engine, at most one step each."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """Runs calls that block, so that the event loop does not."""

    def __init__(self, count: int = 64) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="kakeya-rpc")

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's answer. The function runs even if its caller is cancelled first, which then never
        learns the answer."""
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._pool, partial(function, *args, **kwargs)))

    async def call_or_undo(self, function: Callable[[], T], undo: Callable[[T], object]) -> T:
        """Like `call`, but an answer that comes after the caller was cancelled is given to `undo`, even if
        the event loop has ended by then."""
        answer = self._pool.submit(function)
        try:
            return await asyncio.shield(asyncio.wrap_future(answer))
        except asyncio.CancelledError:
            answer.add_done_callback(partial(self._undo, undo))
            raise

    def _undo(self, undo: Callable[[T], object], answer: Future[T]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            with suppress(RuntimeError):  # closed: the engine is gone, and the answer with it
                self._pool.submit(undo, answer.result())

    def close(self) -> None:
        """Take no more calls; those that run end with the engine."""
        self._pool.shutdown(wait=False, cancel_futures=True)
