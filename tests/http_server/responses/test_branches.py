"""Whose session is used, kept and given up, moment by moment."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest

from kakeya.errors import InvariantViolation, ResourceExhausted, SessionNotFound
from kakeya.http_server.responses.branches import Branches
from kakeya.http_server.responses.records import Record
from kakeya.http_server.responses.store import ResponseStore
from kakeya.http_server.text_sessions import TextSession, TextSessions
from kakeya.text.prompting import Message
from support.http_clients import record_of
from support.loops import on_a_loop

NEW = (Message("user", "More"),)


class Sessions(TextSessions):
    """Text sessions that are only counted; `before` may hold up or break a call."""

    def __init__(self, capacity: int) -> None:
        runtime = SimpleNamespace(config=SimpleNamespace(capacity=capacity), free_slabs=capacity)
        super().__init__(runtime, None)  # type: ignore[arg-type]
        self.open: set[str] = set()
        self.made = 0
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}

    def new(self) -> TextSession:
        self.made += 1
        self.open.add(str(self.made))
        return TextSession("me", frozenset(), session_id=str(self.made))

    async def fork(self, session: TextSession) -> TextSession:
        await self._pass("fork")
        if session.session_id not in self.open:
            raise SessionNotFound(session.session_id)
        copy = replace(session, session_id=self.new().session_id)
        await self._pass("forked")
        return copy

    async def extend(self, session: TextSession, new_messages: Sequence[Message]) -> bool:
        await self._pass("extend")
        if session.session_id not in self.open:
            raise SessionNotFound(session.session_id)
        return True

    async def close(self, session: TextSession) -> None:
        self.open.discard(session.session_id)

    async def _pass(self, call: str) -> None:
        if call in self.before:
            await self.before[call]()


class Office:
    """A store, its branches, and sessions that are only counted."""

    def __init__(self, capacity: int = 8) -> None:
        self.sessions = Sessions(capacity)
        self.store = ResponseStore(100, None, lambda record: self.branches.forget(record))
        self.branches = Branches(self.sessions, self.store)

    def record(self, name: str, parent: Record | None = None, owner: str = "me") -> Record:
        record = record_of(name, parent, owner=owner, session=self.sessions.new())
        self.store.add(record)
        return record


def raising(error: BaseException) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        raise error

    return fail


@on_a_loop
async def test_a_turn_that_is_cancelled_while_it_is_written_leaves_the_copy() -> None:
    office = Office()
    record = office.record("a")
    office.sessions.before["extend"] = lambda: asyncio.sleep(60)
    turn = asyncio.create_task(office.branches.continue_from(record, NEW, keep=True, moving=0))
    await asyncio.sleep(0.01)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    await office.sessions.settle()
    assert record.session is not None
    assert office.sessions.open == {record.session.session_id} == {"2"}


@on_a_loop
async def test_a_record_that_is_forgotten_meanwhile_leaves_no_copy() -> None:
    for keep, call in product((True, False), ("fork", "forked", "extend")):
        office = Office()
        record = office.record("a")
        office.sessions.before[call] = lambda: asyncio.sleep(0.01)
        turn = asyncio.create_task(office.branches.continue_from(record, NEW, keep=keep, moving=0))
        await asyncio.sleep(0)
        office.store.remove(record)
        used = await turn
        await office.sessions.settle()
        assert record.session is None, (keep, call)
        assert office.sessions.open == ({used.session_id} if used is not None else set())


@on_a_loop
async def test_a_record_that_is_forgotten_during_a_refused_turn_leaves_nothing() -> None:
    office = Office()
    record = office.record("a")

    async def refuse_late() -> None:
        await asyncio.sleep(0.01)
        raise ResourceExhausted("too many tokens a minute")

    office.sessions.before["extend"] = refuse_late
    turn = asyncio.create_task(office.branches.continue_from(record, NEW, keep=True, moving=0))
    await asyncio.sleep(0)
    office.store.remove(record)
    with pytest.raises(ResourceExhausted):
        await turn
    await office.sessions.settle()
    assert office.sessions.open == set()


@on_a_loop
async def test_a_slab_that_is_being_freed_is_room_for_a_copy() -> None:
    office = Office(capacity=4)
    record, leaving = office.record("a"), office.sessions.new()
    office.sessions.runtime.free_slabs = 1  # type: ignore[misc]

    async def free_late(session: TextSession) -> None:
        await asyncio.sleep(0.01)
        office.sessions.open.discard(session.session_id)
        office.sessions.runtime.free_slabs = 2  # type: ignore[misc]

    office.sessions.close = free_late  # type: ignore[method-assign]
    office.sessions.close_soon(leaving)
    await office.branches.continue_from(record, NEW, keep=True, moving=0)
    assert record.session is not None, "it can be continued again"


@on_a_loop
async def test_without_room_for_a_copy_the_session_itself_goes_on() -> None:
    office = Office()
    record = office.record("a")
    office.sessions.before["fork"] = raising(ResourceExhausted("full"))
    used = await office.branches.continue_from(record, NEW, keep=True, moving=0)
    assert used is not None
    assert (used.session_id, record.session) == ("1", None)
    claimed = office.record("b")
    claimed.claims = 1
    kept = claimed.session
    with pytest.raises(ResourceExhausted):
        await office.branches.continue_from(claimed, NEW, keep=True, moving=0)
    assert claimed.session is kept


@on_a_loop
async def test_one_that_nobody_else_needs_may_be_used_up_when_there_is_no_slab() -> None:
    office = Office()
    lone = office.record("a")
    office.sessions.runtime.free_slabs = 0
    used = await office.branches.continue_from(lone, NEW, keep=False, moving=0)
    assert used is not None
    assert (used.session_id, lone.session) == ("1", None)


@on_a_loop
async def test_a_session_that_broke_is_no_longer_ours() -> None:
    for keep in (True, False):
        office = Office()
        record = office.record("a")
        office.sessions.before["extend"] = raising(InvariantViolation("INV-1", "broken"))
        assert await office.branches.continue_from(record, NEW, keep=keep, moving=0) is None
        await office.sessions.settle()
        assert record.session is None
        assert "2" not in office.sessions.open, "the copy was ours"


@on_a_loop
async def test_the_most_dispensable_are_evicted_first() -> None:
    office = Office(capacity=40)
    theirs = office.record("t2", office.record("t1", owner="they"), owner="they")
    mine = office.record("m2", office.record("m1"))
    lone, their_lone = office.record("l"), office.record("tl", owner="they")
    given_up = []
    while await office.branches.evict("me", False):
        records = [record.id for record in office.store.live()]
        given_up += [name for name in ("t1", "m1", "l", "tl") if name not in records + given_up]
    assert given_up == ["m1", "t1", "l", "tl"]
    assert theirs.session is not None
    assert mine.session is not None
    assert (lone.session, their_lone.session) == (None, None)


@on_a_loop
async def test_what_has_no_session_any_more_is_simply_forgotten() -> None:
    office = Office()
    record = office.record("a")
    await office.branches.give_up(record)
    assert office.sessions.open == set()
    assert await office.branches.continue_from(record, NEW, keep=True, moving=0) is None
    office.store.remove(record)
    assert record.is_gone


@on_a_loop
async def test_who_is_over_its_own_quota_closes_only_its_own() -> None:
    office = Office()
    theirs = office.record("t1", owner="they")
    assert await office.branches.evict("me", True) is False
    assert theirs.session is not None
    busy = office.record("m1")
    async with busy.lock:
        assert await office.branches.evict("me", True) is False, "somebody is going on from it"
    assert await office.branches.evict("me", True) is True
