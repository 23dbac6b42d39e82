"""A proposer that is kept: a real process, which dies and comes back where it was."""

import threading
from collections.abc import Sequence

import grpc
import pytest

from kakeya.cluster.calling import HomeCalls
from kakeya.cluster.proposing import ProposerKeeper
from kakeya.engine.proposer import WorksAhead
from kakeya.errors import Unavailable
from kakeya.proposers.ngram import LookUp
from kakeya.wire import cluster_pb2 as pb
from support.clustering import SECRET, Town

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_home_learns_where_its_proposers_are_now(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    class Listening(WorksAhead):
        heard: tuple[str, ...] = ()

        def learn(self, addresses: Sequence[str]) -> None:
            self.heard = tuple(addresses)

    home, listening = town.homes["a"], Listening()
    monkeypatch.setattr(home.runtime, "_proposers", (LookUp(4), listening))
    with HomeCalls(home.server.address, SECRET) as calls:
        calls.beat(pb.View(proposers=["here:1", "there:2"]))
        assert listening.heard == ("here:1", "there:2")


def test_a_proposer_that_dies_comes_back_at_its_address() -> None:
    told: list[str] = []
    again = threading.Event()

    def tell(address: str) -> None:
        told.append(address)
        again.set()

    keeper = ProposerKeeper((), "127.0.0.1", "a-secret", tell).start()
    try:
        assert told == [keeper.address]
        first = keeper._process
        first.kill()
        first.wait()
        again.clear()
        assert again.wait(120.0)
        assert keeper._process.pid != first.pid
        assert set(told) == {keeper.address}
    finally:
        keeper.stop()
    assert keeper._process.poll() is not None
    assert not keeper._thread.is_alive()
    with grpc.insecure_channel(keeper.address) as channel, pytest.raises(grpc.FutureTimeoutError):
        grpc.channel_ready_future(channel).result(0.5)


def test_a_proposer_that_cannot_start_is_told() -> None:
    told: list[str] = []
    keeper = ProposerKeeper(("--proposer", "none"), "127.0.0.1", "a-secret", told.append)
    with pytest.raises(Unavailable, match=f"the proposer at {keeper.address} does not serve"):
        keeper.start()
    assert keeper._process.poll() == 2
    assert told == []
