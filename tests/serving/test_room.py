"""Sessions that are only a cache give way to new ones, whoever keeps them and whoever asks."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kakeya.errors import ResourceExhausted
from kakeya.grpc_server import Server
from kakeya.runtime import Runtime
from kakeya.serving.commons import Commons
from kakeya.serving.room import Room
from kakeya.wire import runtime_pb2 as pb
from support import serving


class Cache:
    """Keeps sessions nobody named, and closes one when asked."""

    def __init__(self, close: Callable[[], bool]) -> None:
        self._close = close
        self.asked: list[tuple[str, bool]] = []

    async def make_room(self, owner: str, own_only: bool) -> bool:
        self.asked.append((owner, own_only))
        return self._close()


def test_who_was_named_first_is_asked_first() -> None:
    room, first, second = Room(), Cache(lambda: False), Cache(lambda: True)
    room.add(first.make_room)
    room.add(second.make_room)
    assert asyncio.run(room.make("me")) is True
    assert (first.asked, second.asked) == ([("me", False)], [("me", False)])


def test_without_anybody_there_is_no_room() -> None:
    assert asyncio.run(Room().make("me", own_only=True)) is False


def test_a_grpc_session_finds_room_that_another_front_end_can_give(model: Path) -> None:
    """And is refused as before when there is none to give."""
    runtime = Runtime.open(str(model), serving.ENGINE)
    kept = [runtime.create_session() for _ in range(serving.ENGINE.capacity)]
    commons = Commons()
    cache = Cache(lambda: bool(kept) and runtime.close_session(kept.pop()) == 0)

    async def begin() -> Server:
        commons.room.add(cache.make_room)
        server = Server(serving.ANY_PORT, commons)
        await server.start()
        await server.open(runtime)
        return server

    server = serving.on_loop(begin())
    try:
        with serving.connected(server.address) as stub:
            for left in reversed(range(serving.ENGINE.capacity)):
                stub.CreateSession(pb.CreateSessionRequest(ignore_eos=True))
                assert len(kept) == left
            with pytest.raises(Exception, match="no free slab"):
                stub.CreateSession(pb.CreateSessionRequest())
        assert cache.asked[-1] == ("local", False)
    finally:
        serving.on_loop(server.drain(0))


def test_a_quota_is_relieved_by_the_owners_own_sessions_alone(model: Path) -> None:
    cache = Cache(lambda: False)
    room = Room()
    room.add(cache.make_room)

    async def refused() -> None:
        raise ResourceExhausted("over quota")

    with Runtime.open(str(model), serving.ENGINE) as runtime, pytest.raises(ResourceExhausted):
        asyncio.run(room.until(runtime, "me", refused))
    assert cache.asked == [("me", True)]
