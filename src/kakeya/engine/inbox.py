"""How other threads reach the engine thread: calls in a bounded queue, each with its answer."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from kakeya.errors import ResourceExhausted, Unavailable

T = TypeVar("T")


@dataclass(frozen=True)
class _Call:
    """A function to run on the engine thread, and where its answer goes."""

    function: Callable[[], Any]
    reply: "Future[Any]"


class Inbox:
    """Bounded queue of calls. `ask` and `wake` from any thread, the rest from the engine thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queue: queue.Queue[_Call | None] = queue.Queue(limit)
        self._door = threading.Lock()
        self._closed = False

    def ask(self, function: Callable[[], T]) -> T:
        """Run on the engine thread and wait for the answer, or for the error it raised."""
        reply: Future[T] = Future()
        with self._door:
            if self._closed:
                raise Unavailable("the engine is shut down")
            try:
                self._queue.put_nowait(_Call(function, reply))
            except queue.Full:
                raise ResourceExhausted(f"{self._limit} calls wait for the engine already") from None
        return reply.result()

    def wake(self) -> None:
        """Make a waiting engine thread look up."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # a full inbox wakes the thread as well

    def answer(self, *, wait: bool) -> None:
        """Answer every call that is there; with `wait`, sleep until there is something."""
        try:
            call = self._queue.get(block=wait)
            while True:
                if call is not None:
                    _answer(call)
                call = self._queue.get_nowait()
        except queue.Empty:
            return

    def close(self) -> None:
        """Refuse calls from now on."""
        with self._door:
            self._closed = True
        self.wake()


def _answer(call: _Call) -> None:
    try:
        call.reply.set_result(call.function())
    except Exception as error:
        call.reply.set_exception(error)
