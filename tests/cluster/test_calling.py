"""Homes that cannot be asked or will not answer, and drains that come to no end."""

import pytest

from kakeya.cluster.calling import Draining, HomeCalls
from kakeya.errors import RemoteError, Unavailable
from kakeya.wire import cluster_pb2 as pb
from support.clustering import SECRET, Town
from support.serving import free_port


def test_a_home_that_is_not_there_is_unavailable() -> None:
    with (
        HomeCalls(f"127.0.0.1:{free_port()}", SECRET) as calls,
        pytest.raises(Unavailable, match=r"the home at 127\.0\.0\.1"),
    ):
        calls.movable()


def test_a_home_listens_to_members_only(town: Town) -> None:
    with HomeCalls(town.homes["a"].server.address, "a-guess-of-the-secret") as calls:
        with pytest.raises(RemoteError, match="front ends"):
            calls.documents()
        with pytest.raises(RemoteError, match="front ends"):
            calls.move("a.unknown", pb.Home(name="b"))


def test_what_is_gone_does_not_move_and_what_nobody_takes_stays(town: Town) -> None:
    session_id = town.homes["a"].runtime.create_session()
    nobody = pb.Home(name="b", address=f"127.0.0.1:{free_port()}")
    with HomeCalls(town.homes["a"].server.address, SECRET) as calls:
        assert calls.move("a.unknown", nobody) is None
        with pytest.raises(Unavailable, match="b has not said that it took the session"):
            calls.move(session_id, nobody)
    # The real one never got it: the home asks, and keeps the session.
    with HomeCalls(town.homes["a"].server.address, SECRET) as calls:
        assert calls.documents() == 0
    assert town.homes["a"].runtime.session_ids() == [session_id]


def test_a_drain_without_another_node_says_why(town: Town) -> None:
    town.homes.pop("b").stop()
    town.registry.remove("b")
    town.homes["a"].runtime.create_session()
    town.registry.drain("a")
    with pytest.raises(Unavailable, match="1 sessions of node 'a' have not moved"):
        Draining(town.registry.view, SECRET, patience_s=0.0).run("a")


def test_a_drain_does_not_wait_for_ever_for_a_home_that_is_away(town: Town) -> None:
    town.homes.pop("a").stop()
    with pytest.raises(Unavailable, match="the home at"):
        Draining(town.registry.view, SECRET, patience_s=0.0).run("a")
