"""Making room: sessions that are only kept in case somebody comes back give way to new ones.

They are a cache that a server keeps for its own clients, such as conversations that the next request may go
on with; no client ever named them. All front ends of a process fill one pool, so each asks all of them.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from kakeya.errors import ResourceExhausted

if TYPE_CHECKING:  # torch takes a second to import, and the servers listen before that
    from kakeya.runtime import Runtime

T = TypeVar("T")

# `await make_room(owner, own_only)` closes one such session, the owner's own first, and says whether it had
# one to close.
MakeRoom = Callable[[str, bool], Awaitable[bool]]


class Room:
    """Whoever keeps such sessions adds how to close one. Used from one event loop."""

    def __init__(self) -> None:
        self._makers: list[MakeRoom] = []

    def add(self, make_room: MakeRoom) -> None:
        """Ask `make_room` when a slab is missing, after those that were named before."""
        self._makers.append(make_room)

    async def make(self, owner: str, *, own_only: bool = False) -> bool:
        """Close one session that is only a cache; False when there is none."""
        for make_room in self._makers:
            if await make_room(owner, own_only):
                return True
        return False

    async def until(
        self,
        runtime: "Runtime",
        owner: str,
        take: Callable[[], Awaitable[T]],
        refusal: type[Exception] = ResourceExhausted,
    ) -> T:
        """What `take` gives. As long as it raises `refusal`, which must mean that no session can be opened,
        cached ones give way; raises it when there are none left."""
        while True:
            try:
                return await take()
            except refusal:
                # With slabs to spare it was the owner's own quota, which only its own sessions fill.
                if not await self.make(owner, own_only=runtime.free_slabs > 0):
                    raise
