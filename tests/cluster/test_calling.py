"""Homes that cannot be asked or will not answer, and drains that come to no end."""

import threading

import httpx
import pytest

from kakeya.cluster.calling import AT_ONCE, Balancing, Draining, HomeCalls, Moving, home_to_end, name_of
from kakeya.cluster.members import home_in
from kakeya.cluster.replicas import Move
from kakeya.errors import RemoteError, Unavailable
from kakeya.wire import cluster_pb2 as pb
from support.clustering import SECRET, FrontHere, Town
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
    assert town.homes["a"].runtime.home.session_ids() == [session_id]


def test_a_drain_without_another_node_says_why(town: Town) -> None:
    town.homes.pop("b").stop()
    town.registry.remove("b")
    town.homes["a"].runtime.create_session()
    town.registry.drain("a")
    with pytest.raises(Unavailable, match="1 sessions of 'a' have not moved"):
        Draining(town.registry.view, SECRET, patience_s=0.0).run("a")


def test_a_drain_does_not_wait_for_ever_for_a_home_that_is_away(town: Town) -> None:
    town.homes.pop("a").stop()
    with pytest.raises(Unavailable, match="the home at"):
        Draining(town.registry.view, SECRET, patience_s=0.0).run("a")


def held(town: Town) -> dict[str, int]:
    return {name: len(home.runtime.home.session_ids()) for name, home in sorted(town.homes.items())}


def test_one_home_is_emptied_beside_others_of_its_node(town: Town) -> None:
    town.homes.pop("b").stop()
    town.settle("b", node="a")
    town.settle("other", node="a", window=60)
    for name, home in town.homes.items():
        for _ in range(2):
            home.runtime.create_session()
        assert len(home.runtime.home.session_ids()) == 2, name
    town.registry.drain("a")
    drained = Draining(town.registry.view, SECRET, node_of=name_of).run("a")
    assert drained.sessions == 2
    assert held(town) == {"a": 0, "b": 4, "other": 2}


def test_sessions_go_only_where_they_fit(town: Town) -> None:
    """A home of the same model with another window is none for them, however much room it has."""
    town.homes.pop("b").stop()
    town.registry.remove("b")
    town.settle("wide", window=60)
    moved: list[int] = []
    town.homes["a"].runtime.create_session()
    town.registry.drain("a")
    draining = Draining(town.registry.view, SECRET, 0.0, lambda done, left: moved.append(done))
    with pytest.raises(Unavailable, match="no replica of tiny beside its own has the weights and the window"):
        draining.run("a")
    assert moved == []
    assert town.homes["a"].runtime.home.leaving() == []
    town.settle("c")
    assert Draining(town.registry.view, SECRET).run("a").sessions == 1
    assert held(town) == {"a": 0, "c": 1, "wide": 0}


def test_four_sessions_travel_at_once(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(AT_ONCE)

    def move(calls: HomeCalls, session_id: str, target: pb.Home) -> int:
        together.wait(10.0)
        return int(session_id)

    monkeypatch.setattr(HomeCalls, "move", move)
    homes = {home.name: home for home in town.beat().homes}
    moves = [Move(str(number), "a", "b", 1) for number in range(2 * AT_ONCE)]
    assert AT_ONCE == 4
    assert list(Moving(SECRET).carry_out(moves, homes)) == list(range(8))


def test_a_move_of_which_nobody_knows_holds_up_no_other(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    def move(calls: HomeCalls, session_id: str, target: pb.Home) -> int:
        if session_id == "lost":
            raise Unavailable("it broke off")
        return 7

    monkeypatch.setattr(HomeCalls, "move", move)
    homes = {home.name: home for home in town.beat().homes}
    moves = [Move(name, "a", "b", 1) for name in ("lost", "found")]
    assert list(Moving(SECRET).carry_out(moves, homes)) == [None, 7]


def test_full_homes_give_a_few_sessions_to_empty_ones(town: Town) -> None:
    for _ in range(4):
        town.homes["a"].runtime.create_session()
    balancing = Balancing(SECRET, most=1)

    def homes(places: int) -> list[pb.Home]:
        found = list(town.beat().homes)
        for home in found:
            home.most_sessions = places
        return found

    assert balancing.step(homes(1000)) == 0  # nobody is full
    assert [balancing.step(homes(4)) for _ in range(4)] == [1, 1, 0, 0]
    assert held(town) == {"a": 2, "b": 2}
    town.registry.drain("b")
    assert Balancing(SECRET).step(homes(2)) == 0
    assert Balancing(SECRET).step([]) == 0


def test_the_home_that_costs_least_is_ended_unless_it_keeps_documents(front: FrontHere, town: Town) -> None:
    for name, sessions in (("a", 2), ("b", 1)):
        for _ in range(sessions):
            town.homes[name].runtime.create_session()
    assert home_to_end(town.beat().homes, SECRET) == "b"
    for home in (full := list(town.beat().homes)):
        home.most_sessions = home.sessions
    assert home_to_end(full, SECRET) is None
    kept = ""
    while kept != "b":
        made = httpx.post(f"{front.url}/v1/conversations", json={}).json()["id"]
        kept = home_in(made)
        if kept == "a":
            httpx.delete(f"{front.url}/v1/conversations/{made}")
            town.homes["a"].runtime.create_session()
    assert home_to_end(town.beat().homes, SECRET) == "a"
