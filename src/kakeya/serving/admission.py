"""Admission: how many requests generate at once, and what happens to the others. Both servers share one."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Generator
from types import TracebackType
from typing import NamedTuple, Self

from kakeya.errors import ResourceExhausted, Restarting
from kakeya.serving.config import AdmissionConfig
from kakeya.types import AdmissionPolicy


class _Waiting(NamedTuple):
    """A request in the queue, and when it came."""

    owner: str
    turn: "asyncio.Future[None]"
    since: float


class Admission:
    """Hands out places to generate in. Used from one event loop.

    A place that becomes free goes to the waiting owner who holds the fewest, and among equals to the one who
    came first. `count` gets the reason of each refusal; requests that are let in are counted by the runtime.
    """

    def __init__(
        self,
        config: AdmissionConfig = AdmissionConfig(),  # noqa: B008 (frozen)
        count: Callable[[str], None] | None = None,
    ) -> None:
        self._config = config
        self._count = count
        self._held: Counter[str] = Counter()
        self._queue: list[_Waiting] = []
        self._is_closed = False
        self._capacity = 1

    @property
    def places(self) -> int:
        """How many requests generate at most at once."""
        return self._config.max_concurrent or self._capacity

    @property
    def running(self) -> int:
        """Places that are held."""
        return self._held.total()

    @property
    def waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._queue)

    @property
    def longest_wait_s(self) -> float:
        """How long the first of them has waited; 0 where nobody waits."""
        return time.monotonic() - self._queue[0].since if self._queue else 0.0

    def admit(self, owner: str) -> "Place":
        """A place for a request of `owner`, taken by `await` or by `async with`.

        Taking it raises ResourceExhausted when there is none (and the queue is full, or it took too long)
        and Restarting once the server drains. A caller that is cancelled while it waits leaves the queue.
        """
        return Place(self, owner)

    def open(self, capacity: int) -> None:
        """There are as many places as the runtime has sessions, unless a number was set."""
        self._capacity = capacity

    def close(self) -> None:
        """Let nobody in any more; those who wait get Restarting. Held places stay held."""
        self._is_closed = True
        for waiting in self._queue:
            if not waiting.turn.done():
                waiting.turn.set_exception(_draining())
        self._queue.clear()

    async def take(self, owner: str) -> None:
        """Hold one more place for `owner`: see `admit`."""
        if self._is_closed:
            raise _draining()
        # Nobody waits while a place is free, so that nobody is overtaken here.
        if self.running < self.places:
            self._held[owner] += 1
            return
        most = self.places
        if self._config.policy is AdmissionPolicy.REJECT:
            raise self._refusal("rejected", f"all {most} places for requests are taken")
        if self.waiting >= self._config.queue_depth:
            raise self._refusal("queue_full", f"all {most} places are taken and the queue is full")
        await self._wait(owner)

    def give_back(self, owner: str) -> None:
        """One place of `owner` is free again; it goes to the next in the queue."""
        assert self._held[owner] > 0, "a place is given back once"
        self._held[owner] -= 1
        if self._held[owner] == 0:
            del self._held[owner]
        if self._queue:
            self._let_in(min(self._queue, key=lambda waiting: self._held[waiting.owner]))

    async def _wait(self, owner: str) -> None:
        """Until somebody holds a place for us."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = _Waiting(owner, turn, time.monotonic())
        self._queue.append(entry)
        longest = self._config.queue_max_wait_s
        try:
            await asyncio.wait((turn,), timeout=longest or None)
        except asyncio.CancelledError:
            self._leave(entry)
            raise
        if not turn.done():
            self._leave(entry)
            raise self._refusal("timed_out", f"no place became free in {longest:g} s")
        turn.result()

    def _let_in(self, entry: _Waiting) -> None:
        self._queue.remove(entry)
        self._held[entry.owner] += 1
        entry.turn.set_result(None)

    def _leave(self, entry: _Waiting) -> None:
        """Out of the queue, or, where a place came at the same moment, out of that."""
        if entry in self._queue:
            self._queue.remove(entry)
        elif entry.turn.exception() is None:
            self.give_back(entry.owner)

    def _refusal(self, result: str, reason: str) -> ResourceExhausted:
        if self._count is not None:
            self._count(result)
        return ResourceExhausted(f"{reason}: try again later")


class Place:
    """One request's right to generate. Give it back once, by `release` or by leaving the context."""

    def __init__(self, admission: Admission, owner: str) -> None:
        self._admission = admission
        self._owner = owner
        self._is_held = False

    async def take(self) -> Self:
        """Wait for the place, if need be; see `Admission.admit`."""
        assert not self._is_held, "a place is taken once"
        await self._admission.take(self._owner)
        self._is_held = True
        return self

    def release(self) -> None:
        """Give the place to the next. Does nothing the second time."""
        if self._is_held:
            self._is_held = False
            self._admission.give_back(self._owner)

    def __await__(self) -> Generator[object, None, Self]:
        return self.take().__await__()

    async def __aenter__(self) -> Self:
        return self if self._is_held else await self.take()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _draining() -> Restarting:
    return Restarting("the server is shutting down and takes no new work")
