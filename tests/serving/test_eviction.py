"""Sessions that are only a cache give way to new ones, whoever keeps them and whoever asks."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kakeya.errors import ResourceExhausted
from kakeya.grpc_server import Server
from kakeya.runtime import Runtime
from kakeya.serving.commons import Commons
from kakeya.serving.eviction import Eviction
from kakeya.wire import runtime_pb2 as pb
from support import serving


class Cache:
    """Keeps sessions nobody named, and closes one when asked."""

    def __init__(self, close: Callable[[], bool]) -> None:
        self._close = close
        self.asked: list[tuple[str, bool]] = []

    async def evict(self, owner: str, own_only: bool) -> bool:
        self.asked.append((owner, own_only))
        return self._close()


def test_who_was_added_first_is_asked_first() -> None:
    eviction, first, second = Eviction(), Cache(lambda: False), Cache(lambda: True)
    eviction.add(first.evict)
    eviction.add(second.evict)
    assert asyncio.run(eviction.evict("me")) is True
    assert (first.asked, second.asked) == ([("me", False)], [("me", False)])


def test_without_a_cache_nothing_is_evicted() -> None:
    assert asyncio.run(Eviction().evict("me", own_only=True)) is False


def test_a_grpc_session_takes_the_slab_of_another_front_ends_cache(model: Path) -> None:
    """And is refused as before when there is none to give."""
    runtime = Runtime.open(str(model), serving.ENGINE)
    kept = [runtime.create_session() for _ in range(serving.ENGINE.capacity)]
    commons = Commons()
    cache = Cache(lambda: bool(kept) and runtime.close_session(kept.pop()) == 0)

    async def begin() -> Server:
        commons.eviction.add(cache.evict)
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
    eviction = Eviction()
    eviction.add(cache.evict)

    async def refused() -> None:
        raise ResourceExhausted("over quota")

    with Runtime.open(str(model), serving.ENGINE) as runtime, pytest.raises(ResourceExhausted):
        asyncio.run(eviction.until_taken(runtime, "me", refused))
    assert cache.asked == [("me", True)]
