"""How other threads reach the engine thread: a bounded queue of calls, each with a future for its answer."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from kakeya.errors import DeviceLost, ResourceExhausted, Unavailable

T = TypeVar("T")


@dataclass(frozen=True)
class _Call:
    """A function to run on the engine thread, and where its answer goes."""

    function: Callable[[], Any]
    reply: "Future[Any]"


class Inbox:
    """Bounded queue of calls. `ask`, `post` and `wake` from any thread, the rest from the engine thread.

    `run` runs a call's function. It raises DeviceLost for an error that was the end of the device.
    """

    def __init__(self, limit: int, run: Callable[[Callable[[], Any]], Any]) -> None:
        self._limit = limit
        self._run = run
        self._queue: queue.Queue[_Call | None] = queue.Queue(limit)
        self._door = threading.Lock()
        self._refusal: str | None = None

    def ask(self, function: Callable[[], T]) -> T:
        """Run on the engine thread and wait for the answer, or for the error it raised."""
        return self.post(function).result()

    def post(self, function: Callable[[], T]) -> "Future[T]":
        """Run on the engine thread, before whatever is asked later; its answer."""
        reply: Future[T] = Future()
        with self._door:
            if self._refusal is not None:
                raise Unavailable(self._refusal)
            try:
                self._queue.put_nowait(_Call(function, reply))
            except queue.Full:
                raise ResourceExhausted(f"{self._limit} calls wait for the engine already") from None
        return reply

    def wake(self) -> None:
        """Wake a waiting engine thread."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # a full inbox wakes the thread as well

    def answer(self, *, wait: bool) -> None:
        """Answer every waiting call; with `wait`, sleep until there is one.

        Raises DeviceLost after the call that found the device lost; later calls are not answered.
        """
        for call in self._calls(wait=wait):
            try:
                call.reply.set_result(self._run(call.function))
            except BaseException as error:
                # The caller gets whatever its call raises; what ends the engine is raised here as well.
                call.reply.set_exception(error)
                if isinstance(error, DeviceLost) or not isinstance(error, Exception):
                    raise

    def close(self, reason: str = "the engine is shut down") -> None:
        """Refuse calls from now on. The first reason that was given counts."""
        with self._door:
            self._refusal = self._refusal or reason
        self.wake()

    def refuse(self, reason: str) -> None:
        """Close, and refuse the calls that wait as well."""
        self.close(reason)
        for call in self._calls(wait=False):
            call.reply.set_exception(Unavailable(reason))

    def _calls(self, *, wait: bool) -> Iterator[_Call]:
        """The waiting calls, and those that arrive while these are answered."""
        try:
            call = self._queue.get(block=wait)
            while True:
                if call is not None:
                    yield call
                call = self._queue.get_nowait()
        except queue.Empty:
            return
