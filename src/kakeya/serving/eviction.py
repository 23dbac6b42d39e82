"""Eviction: sessions that are only kept in case somebody comes back give way to new ones.

They are a cache that a server keeps for its own clients, such as conversations that the next request may go
on with; no client ever named them. All front ends of a process fill one pool, so each asks all caches.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from kakeya.errors import ResourceExhausted

if TYPE_CHECKING:  # torch takes a second to import, and the servers listen before that
    from kakeya.runtime import Runtime

T = TypeVar("T")

# `await evict(owner, own_only)` closes one cached session, the owner's own first, and says whether it had one
# to close.
Evict = Callable[[str, bool], Awaitable[bool]]


class Eviction:
    """Every cache of sessions adds how to close one. Used from one event loop."""

    def __init__(self) -> None:
        self._caches: list[Evict] = []

    def add(self, evict: Evict) -> None:
        """Ask `evict` when a slab is missing, after those that were added before."""
        self._caches.append(evict)

    async def evict(self, owner: str, *, own_only: bool = False) -> bool:
        """Close one cached session; False when there is none."""
        for evict in self._caches:
            if await evict(owner, own_only):
                return True
        return False

    async def until_taken(
        self,
        runtime: "Runtime",
        owner: str,
        take: Callable[[], Awaitable[T]],
        refusal: type[Exception] = ResourceExhausted,
    ) -> T:
        """What `take` gives. As long as it raises `refusal`, which must mean that no session can be opened,
        cached ones are evicted; raises it when there are none left."""
        while True:
            try:
                return await take()
            except refusal:
                # With slabs to spare it was the owner's own quota, which only its own sessions fill.
                if not await self.evict(owner, own_only=runtime.free_slabs > 0):
                    raise
