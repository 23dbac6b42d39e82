"""A proposer that is kept: a real process, which dies and comes back where it was."""

import threading

import grpc
import pytest

from kakeya.cluster.proposing import ProposerKeeper
from kakeya.errors import Unavailable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


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
