"""The sessions behind stored responses: gone on with, branched off, given up for room.

Going on from a response uses its own session, so that a chain stays in one session however long it gets; a
copy made before stays behind as the branch point. Branch points are a cache, and so are answers that a newer
attempt replaced: few, the least recently used closed first, and any of them when somebody needs a slab. After
them go first responses that nobody continued. The session of any other newest response goes when its owner
deletes it or nobody uses it for too long.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kakeya.errors import Conflict, InvariantViolation, ResourceExhausted, SessionNotFound
from kakeya.http_server.prompting import Message
from kakeya.http_server.responses.store import Record, ResponseStore
from kakeya.http_server.threads import Thread, Threads

if TYPE_CHECKING:  # torch takes a second to import, and the server listens before that
    from kakeya.runtime import Runtime

# What was left behind may keep one slab in so many, while nobody else wants it.
_SLABS_FOR_ONE = 4


class Branches:
    """Uses and keeps the threads of records. Used from one event loop."""

    def __init__(self, runtime: "Runtime", threads: Threads, store: ResponseStore) -> None:
        self._runtime = runtime
        self._threads = threads
        self._store = store
        self._most = runtime.config.capacity // _SLABS_FOR_ONE
        self._closing: set[asyncio.Task[None]] = set()
        threads.makes_room(self.make_room)

    async def gone_on(
        self, record: Record, new: Sequence[Message], *, keep: bool, moving: int
    ) -> Thread | None:
        """A thread with all up to `record` and then `new`, for the caller alone; None when there is no
        session to go on with, or none that `new` can be appended to.

        With `keep` the answer will be a newer head, and `moving` conversations will stand there. A record
        that stays a head does not lose its session: ResourceExhausted is raised when that needs a slab and
        there is none. InvalidArgument when the messages cannot be written. The record is then as it was.
        """
        async with record.lock:
            original = record.thread
            if original is None:
                return None
            is_left = keep and record.claims <= moving
            try:
                if is_left or (record.is_cache and self._runtime.free_slabs == 0):
                    return await self._moved_on(record, original, new)
                return await self._branched_off(original, new)
            except (SessionNotFound, Conflict, InvariantViolation):
                # It expired or broke, or its owner closed it or uses it otherwise: it is no longer ours.
                record.thread = None
                return None
            finally:
                if record.is_gone:  # forgotten meanwhile
                    self.forget(record)

    async def make_room(self, owner: str, own_only: bool) -> bool:
        """Close one session that is only kept in case somebody comes back; False when there is none."""
        record = next(self._disposable(owner, own_only), None)
        if record is None:
            return False
        await self.give_up(record)
        return True

    def trim(self) -> None:
        """Close those that were left behind and are too many, least recently used first."""
        points = list(self._left_behind(self._store.live()))
        for record in points[: max(0, len(points) - self._most)]:
            self._drop(record)

    async def give_up(self, record: Record) -> None:
        """Close a record's session; its messages are enough to build it anew."""
        self._drop(record)
        await self.settle()

    def forget(self, record: Record) -> None:
        """Close the session of a record that nothing leads to any more, soon."""
        record.is_gone = True
        self._drop(record)

    def close_soon(self, thread: Thread) -> None:
        """Close a thread where nobody can wait for it."""
        task = asyncio.get_running_loop().create_task(self._threads.close(thread))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def settle(self) -> None:
        """Wait until all that was to be closed soon is closed."""
        while self._closing:
            await asyncio.wait(tuple(self._closing))

    async def _spare_copy(self, original: Thread) -> Thread | None:
        """A copy to come back to, where there is room to spare; only what was left behind gives way to it."""
        if self._most == 0:
            return None
        if self._runtime.free_slabs < 2:
            oldest = next(self._left_behind(self._store.live()), None)
            if oldest is None:
                return None
            await self.give_up(oldest)
        try:
            return await self._threads.fork(original)
        except ResourceExhausted:
            return None

    async def _branched_off(self, original: Thread, new: Sequence[Message]) -> Thread | None:
        """A copy, extended."""
        copy = await self._threads.fork(original)
        extended = False
        try:
            extended = await self._threads.extend(copy, new)
        finally:
            if not extended:
                self.close_soon(copy)
        return copy if extended else None

    async def _moved_on(self, record: Record, original: Thread, new: Sequence[Message]) -> Thread | None:
        """The record's own thread, extended; a copy takes its place, if there is room for one."""
        copy = await self._spare_copy(original)
        record.thread = copy
        try:
            extended = await self._threads.extend(original, new)
        except asyncio.CancelledError:  # who knows whether it was extended
            self.close_soon(original)
            raise
        except BaseException:
            self._put_back(record, original, copy)
            raise
        if not extended:
            self._put_back(record, original, copy)
        return original if extended else None

    def _put_back(self, record: Record, original: Thread, copy: Thread | None) -> None:
        record.thread = original
        if copy is not None:
            self.close_soon(copy)

    def _drop(self, record: Record) -> None:
        thread, record.thread = record.thread, None
        if thread is not None:
            self.close_soon(thread)

    def _disposable(self, owner: str, own_only: bool) -> Iterator[Record]:
        """Whose session may go, the most dispensable first."""
        own = self._store.live(owner)
        candidates = own if own_only else [*own, *self._store.live()]
        yield from self._left_behind(candidates)
        yield from (record for record in candidates if _is_free(record, record.is_lone))

    def _left_behind(self, records: Sequence[Record]) -> Iterator[Record]:
        return (record for record in records if _is_free(record, record.is_left_behind))


def _is_free(record: Record, kind: bool) -> bool:
    """Of this kind, and nobody is going on from it at the moment."""
    return kind and not record.lock.locked()
