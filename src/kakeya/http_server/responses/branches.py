"""The sessions behind stored responses: continued, forked, evicted.

Continuing a response uses its own session, so that a chain stays in one session however long it gets. A fork
made before stays behind as the branch point. Branch points are a cache, and so are answers that a newer
attempt has replaced: few are kept, the least recently used is closed first, and any of them is evicted when
somebody needs a slab. First responses that nobody continued are evicted after them. The session of any other
newest response is closed when its owner deletes it or does not use it for too long.
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import chain

from kakeya.errors import Conflict, InvariantViolation, ResourceExhausted, SessionNotFound
from kakeya.http_server.responses.records import Record
from kakeya.http_server.responses.store import ResponseStore
from kakeya.http_server.text_sessions import TextSession, TextSessions
from kakeya.text.prompting import Message

# Sessions left behind may keep one slab in four, while nobody else wants it.
_SLABS_FOR_ONE = 4


class Branches:
    """Uses and keeps the sessions of records. Used from one event loop."""

    def __init__(self, sessions: TextSessions, store: ResponseStore) -> None:
        self._runtime = sessions.runtime
        self._sessions = sessions
        self._store = store
        self._most = self._runtime.config.capacity // _SLABS_FOR_ONE

    async def continue_from(
        self, record: Record, new: Sequence[Message], *, keep: bool, moving: int
    ) -> TextSession | None:
        """A session with all up to `record` and then `new`, for the caller alone. None when the record has
        no session, or none that `new` can be appended to.

        With `keep` the answer will be a newer head, and `moving` conversations will stand there. A record
        that stays a head does not lose its session: ResourceExhausted is raised when that needs a slab and
        there is none. InvalidArgument when the messages cannot be written. The record is then as it was.
        """
        async with record.lock:
            original = record.session
            if original is None:
                return None
            is_left = keep and record.claims <= moving
            is_cache = record.is_left_behind or record.is_lone
            try:
                if is_left or (is_cache and self._runtime.free_slabs == 0):
                    return await self._move_on(record, original, new)
                return await self._branch_off(original, new)
            except (SessionNotFound, Conflict, InvariantViolation):
                # It expired or broke, or its owner closed it or uses it otherwise: it is no longer ours.
                record.session = None
                return None
            finally:
                self._store.changed(record)
                if record.is_gone:  # forgotten in the meantime
                    self.forget(record)

    async def evict(self, owner: str, own_only: bool) -> bool:
        """Close one session that is only kept in case somebody comes back; False when there is none."""
        own = self._store.live(owner)
        candidates = own if own_only else [*own, *self._store.live()]
        lone = (record for record in candidates if record.is_lone and not record.is_busy)
        # The most dispensable first.
        record = next(chain(_left_behind(candidates), lone), None)
        if record is None:
            return False
        await self.give_up(record)
        return True

    def trim(self) -> None:
        """Close those that were left behind and are too many, least recently used first."""
        points = list(_left_behind(self._store.live()))
        for record in points[: max(0, len(points) - self._most)]:
            self._drop(record)

    async def give_up(self, record: Record) -> None:
        """Close a record's session. It can be rebuilt from the messages."""
        self._drop(record)
        await self._sessions.settle()

    def forget(self, record: Record) -> None:
        """Close the session of a record that nothing leads to any more, soon."""
        record.is_gone = True
        self._drop(record)

    async def _spare_copy(self, original: TextSession) -> TextSession | None:
        """A copy to come back to, where there is room to spare; only what was left behind gives way to it."""
        if self._most == 0:
            return None
        if self._runtime.free_slabs < 2:
            await self._sessions.settle()  # a session that is being closed has its slab until then
        if self._runtime.free_slabs < 2:
            oldest = next(_left_behind(self._store.live()), None)
            if oldest is None:
                return None
            await self.give_up(oldest)
        try:
            return await self._sessions.fork(original)
        except ResourceExhausted:
            return None

    async def _branch_off(self, original: TextSession, new: Sequence[Message]) -> TextSession | None:
        """A copy, extended."""
        copy = await self._sessions.fork(original)
        extended = False
        try:
            extended = await self._sessions.extend(copy, new)
        finally:
            if not extended:
                self._sessions.close_soon(copy)
        return copy if extended else None

    async def _move_on(
        self, record: Record, original: TextSession, new: Sequence[Message]
    ) -> TextSession | None:
        """The record's own session, extended; a copy takes its place, if there is room for one."""
        record.session = await self._spare_copy(original)
        extended = False
        try:
            # A crash from here on must find the copy, not the session that goes on.
            self._store.changed(record)
            await self._store.archive.flush()
            extended = await self._sessions.extend(original, new)
        except asyncio.CancelledError:  # who knows whether it was extended
            self._sessions.close_soon(original)
            extended = True
            raise
        finally:
            if not extended:
                self._drop(record)
                record.session = original
        return original if extended else None

    def _drop(self, record: Record) -> None:
        session, record.session = record.session, None
        if session is not None:
            self._store.changed(record)
            self._sessions.close_soon(session)


def _left_behind(records: Sequence[Record]) -> Iterator[Record]:
    return (record for record in records if record.is_left_behind and not record.is_busy)
