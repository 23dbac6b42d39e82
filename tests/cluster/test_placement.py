from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from kakeya.cluster.placement import choose_home, drain, node_to_remove, place_all, rebalance, wanted_replicas
from kakeya.cluster.replicas import Move, Replica, Scaling, Session
from kakeya.errors import (
    ConfigError,
    InvalidArgument,
    KakeyaError,
    ModelNotFound,
    NoFreeSlab,
    SessionNotFound,
    Unavailable,
)

GPU = frozenset({"gpu"})


def a_replica(name: str, sessions: int = 0, **more: object) -> Replica:
    """On a node of its own, with four slabs and ten places."""
    values = {"node": f"node-{name}", "model": "m", "slabs": 4, "free_slabs": 4, "most_sessions": 10}
    return Replica(**({"name": name, "sessions": sessions} | values | more))  # type: ignore[arg-type]


def held(home: str, count: int, **more: object) -> list[Session]:
    return [Session(f"{home}-{n:03}", "m", 100, home=home, **more) for n in range(count)]  # type: ignore[arg-type]


# A small cluster: two models, labels, full and draining replicas, and sessions that live there.
@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Replica], list[Session]]:
    replicas, sessions = [], []
    for number in range(draw(st.integers(1, 8))):
        name, most = f"r{number}", draw(st.integers(0, 12))
        labels = draw(st.frozensets(st.sampled_from(["gpu", "long"])))
        replica = Replica(
            name=name,
            node=f"n{draw(st.integers(0, 3))}",
            model=draw(st.sampled_from(["m", "k"])),
            slabs=4,
            free_slabs=draw(st.integers(0, 4)),
            most_sessions=most,
            sessions=draw(st.integers(0, most)),
            running=draw(st.integers(0, 4)),
            waiting=draw(st.integers(0, 4)),
            labels=labels,
            draining=draw(st.sampled_from([False, False, True])),
        )
        replicas.append(replica)
        for place in range(replica.sessions):
            needed = draw(st.frozensets(st.sampled_from(sorted(labels)))) if labels else frozenset()
            size, working = draw(st.integers(1, 1000)), draw(st.sampled_from([False, False, True]))
            sessions.append(Session(f"{name}-{place}", replica.model, size, needed, name, working))
    return replicas, sessions


def after(replicas: list[Replica], moves: tuple[Move, ...]) -> dict[str, int]:
    """How many sessions each replica holds in the end, counted anew."""
    counts = {each.name: each.sessions for each in replicas}
    for move in moves:
        counts[move.source] -= 1
        counts[move.target] += 1
    return counts


def assert_lawful(replicas: list[Replica], sessions: list[Session], moves: tuple[Move, ...]) -> None:
    """No move overfills, moves what is working or goes to where it does not fit. No session moves twice."""
    by_name, by_id = {each.name: each for each in replicas}, {each.id: each for each in sessions}
    gained = Counter(move.target for move in moves)
    counts = after(replicas, moves)
    for move in moves:
        session, target = by_id[move.session], by_name[move.target]
        assert (move.source, move.bytes) == (session.home, session.bytes)
        assert not session.working
        assert target.serves(session)
        assert not target.draining
    assert all(counts[name] <= by_name[name].most_sessions for name in gained)
    assert len({move.session for move in moves}) == len(moves)


def test_a_new_session_goes_where_slabs_are_free_and_the_load_is_least() -> None:
    full, busy, calm = a_replica("a", free_slabs=0), a_replica("b", running=3), a_replica("c", sessions=5)
    assert choose_home(Session("s", "m", 1), [full, busy, calm]).name == "c"
    assert choose_home(Session("s", "m", 1), [full, busy]).name == "b"
    assert choose_home(Session("s", "m", 1), [full]).name == "a"  # somebody there will sleep


def test_of_equals_the_first_name_wins_in_whatever_order_they_come() -> None:
    pair = [a_replica("b"), a_replica("a")]
    assert choose_home(Session("s", "m", 1), pair) == choose_home(Session("s", "m", 1), pair[::-1]) == pair[1]


def test_a_fork_stays_with_its_parent_else_on_its_node() -> None:
    home = a_replica("a", sessions=9, node="n")
    beside, empty = a_replica("b", sessions=9, node="n"), a_replica("c")
    assert choose_home(Session("s", "m", 1), [home, beside, empty], near="a").name == "a"
    assert (
        choose_home(Session("s", "m", 1), [replace(home, sessions=10), beside, empty], near="a").name == "b"
    )
    gone = [replace(home, draining=True), replace(beside, draining=True), empty]
    assert choose_home(Session("s", "m", 1), gone, near="a").name == "c"
    assert choose_home(Session("s", "m", 1), [home, empty], near="dead").name == "c"


def test_labels_and_model_are_kept() -> None:
    replicas = [a_replica("a"), a_replica("b", labels=GPU, sessions=9), a_replica("c", model="k")]
    assert choose_home(Session("s", "m", 1, GPU), replicas).name == "b"
    assert choose_home(Session("s", "k", 1), replicas).name == "c"


@pytest.mark.parametrize(
    ("session", "error", "says"),
    [
        (Session("s", "x", 1), ModelNotFound, "no replica serves the model 'x'; there are: k, m"),
        (
            Session("s", "m", 1, frozenset({"gpu", "big"})),
            InvalidArgument,
            "no replica of m has the labels big,gpu; there are: gpu, none",
        ),
        (Session("s", "m", 1, GPU), NoFreeSlab, "all 10 places of replicas of m with labels gpu are taken"),
        (Session("s", "m", 1), NoFreeSlab, "all 20 places of replicas of m are taken"),
        (Session("s", "k", 1), Unavailable, "all replicas that would fit are draining: c"),
    ],
)
def test_where_none_fits_the_error_says_what_is_missing(
    session: Session, error: type[Exception], says: str
) -> None:
    replicas = [
        a_replica("a", sessions=10),
        a_replica("b", sessions=10, labels=GPU),
        a_replica("c", model="k", draining=True),
    ]
    with pytest.raises(error) as raised:
        choose_home(session, replicas)
    assert str(raised.value) == says


def test_without_any_replica_the_error_says_so() -> None:
    with pytest.raises(ModelNotFound, match="there are: none"):
        choose_home(Session("s", "m", 1), [])


@pytest.mark.unwatched
@given(clusters(), st.sampled_from(["m", "k"]), st.frozensets(st.sampled_from(["gpu", "long"])))
def test_place_all_of_one_is_choose_home(
    cluster: tuple[list[Replica], list[Session]], model: str, labels: frozenset[str]
) -> None:
    session, replicas = Session("new", model, 1, labels), cluster[0]
    plan = place_all([session], replicas)
    if plan.moves:
        assert plan.moves == (Move("new", "", choose_home(session, replicas).name, 1),)
    else:
        with pytest.raises(KakeyaError) as raised:
            choose_home(session, replicas)
        assert plan.unplaced[0].why == str(raised.value)


def test_many_sessions_spread_evenly() -> None:
    plan = place_all((Session(f"{n:02}", "m", 1) for n in range(24)), [a_replica(name) for name in "abc"])
    assert Counter(move.target for move in plan.moves) == {"a": 8, "b": 8, "c": 8}


def test_who_fits_in_few_places_chooses_first() -> None:
    """Otherwise the first, which fits anywhere, takes the only place with a GPU."""
    gpu, plain = a_replica("a", most_sessions=1, labels=GPU), a_replica("b", sessions=9)
    plan = place_all([Session("1", "m", 1), Session("2", "m", 1, GPU)], [gpu, plain])
    assert {move.session: move.target for move in plan.moves} == {"1": "b", "2": "a"}


def test_a_drain_leaves_working_sessions_and_names_those_without_a_place() -> None:
    replicas = [a_replica("a", sessions=4), a_replica("b", sessions=8)]
    sessions = [*held("a", 3), Session("busy", "m", 1, home="a", working=True), *held("b", 8)]
    plan = drain("node-a", replicas, sessions)
    assert [(move.session, move.target) for move in plan.moves] == [("a-000", "b"), ("a-001", "b")]
    assert [(each.session, each.why) for each in plan.unplaced] == [
        ("a-002", "all 10 places of replicas of m are taken")
    ]
    assert plan.working == ("busy",)
    assert plan.bytes == 200


def test_an_unknown_node_or_home_is_named() -> None:
    with pytest.raises(ConfigError, match="no node 'x'; there are: node-a"):
        drain("x", [a_replica("a")], [])
    with pytest.raises(SessionNotFound, match="home of session b-000, b, is none"):
        drain("node-a", [a_replica("a")], held("b", 1))


@pytest.mark.unwatched
@settings(max_examples=200)
@given(clusters(), st.randoms())
def test_a_drain_places_or_names_every_session(
    cluster: tuple[list[Replica], list[Session]], order: object
) -> None:
    replicas, sessions = cluster
    node = replicas[0].node
    plan = drain(node, replicas, sessions)
    inside = {each.name for each in replicas if each.node == node}
    of_node = {each.id: each for each in sessions if each.home in inside}
    named = [*(m.session for m in plan.moves), *(u.session for u in plan.unplaced), *plan.working]
    assert sorted(named) == sorted(of_node)
    assert {each.id for each in of_node.values() if each.working} == set(plan.working)
    assert not inside & {move.target for move in plan.moves}
    assert_lawful(replicas, sessions, plan.moves)
    # What is named as without a place has none: all that would fit is full now.
    counts = after(replicas, plan.moves)
    for each in plan.unplaced:
        others = [r for r in replicas if r.name not in inside and r.serves(of_node[each.session])]
        assert all(counts[r.name] >= r.most_sessions for r in others if not r.draining)
    order.shuffle(replicas)  # type: ignore[attr-defined]
    order.shuffle(sessions)  # type: ignore[attr-defined]
    assert drain(node, replicas, sessions) == plan


def test_a_rebalance_moves_from_the_fullest_and_stops_when_even_enough() -> None:
    replicas = [a_replica("a", sessions=9), a_replica("b", sessions=3), a_replica("c", sessions=5)]
    sessions = held("a", 9) + held("b", 3) + held("c", 5)
    moves = rebalance(replicas, sessions, share=1.0, even=0.2)
    assert after(replicas, moves) == {"a": 7, "b": 5, "c": 5}
    assert len(moves) == 2


def test_a_rebalance_moves_the_smallest_snapshots_and_no_more_than_its_share() -> None:
    replicas = [a_replica("a", sessions=10), a_replica("b")]
    sessions = [Session(str(n), "m", 100 - n, home="a", working=n == 9) for n in range(10)]
    moves = rebalance(replicas, sessions, share=0.3)
    assert [move.session for move in moves] == ["8", "7", "6"]


def test_a_rebalance_goes_on_to_replicas_that_gave_sessions_away() -> None:
    """`b` has room for those of `a` only after it gave its own to `c`, which does not take those of `a`."""
    gpu, long = GPU, frozenset({"long"})
    replicas = [
        a_replica("a", sessions=10, labels=long),
        a_replica("b", sessions=10, labels=gpu | long),
        a_replica("c", labels=gpu),
    ]
    sessions = held("a", 10, labels=long) + held("b", 10, labels=gpu)
    moves = rebalance(replicas, sessions, share=1.0, even=0.1)
    assert after(replicas, moves) == {"a": 8, "b": 7, "c": 5}


@pytest.mark.unwatched
@settings(max_examples=400)
@given(clusters(), st.floats(0, 1), st.floats(0, 0.5), st.randoms())
def test_a_rebalance_is_lawful_and_brings_replicas_together(
    cluster: tuple[list[Replica], list[Session]], share: float, even: float, order: object
) -> None:
    replicas, sessions = cluster
    moves = rebalance(replicas, sessions, share=share, even=even)
    assert len(moves) <= share * len(sessions)
    assert_lawful(replicas, sessions, moves)
    now, by_id = {each.name: each for each in replicas}, {each.id: each for each in sessions}
    for move in moves:
        source, target = now[move.source], now[move.target]
        assert not source.draining
        now[target.name], now[source.name] = target.with_session(), source.without_session()
        assert source.fill - now[target.name].fill > even  # a move that was not needed is one too many
    if len(moves) + 1 > share * len(sessions):
        return
    moved = {move.session for move in moves}
    for session in by_id.values():
        donor = now[session.home or ""]
        if session.id in moved or session.working or donor.draining:
            continue
        for other in now.values():
            if other.serves(session) and other.room:
                assert donor.fill - other.with_session().fill <= even
    order.shuffle(replicas)  # type: ignore[attr-defined]
    order.shuffle(sessions)  # type: ignore[attr-defined]
    assert rebalance(replicas, sessions, share=share, even=even) == moves


def test_scale_in_takes_the_node_that_is_cheapest_to_empty() -> None:
    replicas = [a_replica("a", sessions=3), a_replica("b", sessions=2), a_replica("c", sessions=4)]
    sessions = held("a", 3) + [replace(each, bytes=1000) for each in held("b", 2)] + held("c", 4)
    assert node_to_remove(replicas, sessions) == "node-a"
    assert node_to_remove(replicas, sessions, spared=["node-a"]) == "node-c"


def test_scale_in_takes_no_node_whose_sessions_have_no_other_place() -> None:
    """Not the only GPU, nor the only replica of a model. A working session needs a place like any other."""
    only_gpu = Session("s", "m", 1, GPU, "a", working=True)
    replicas = [a_replica("a", sessions=1, labels=GPU), a_replica("b", sessions=5)]
    assert node_to_remove(replicas, [only_gpu, *held("b", 5)]) == "node-b"
    assert node_to_remove([replicas[0], replace(replicas[1], draining=True)], [only_gpu]) is None
    assert node_to_remove([], []) is None


@pytest.mark.unwatched
@given(clusters())
def test_the_node_of_a_scale_in_can_be_emptied(cluster: tuple[list[Replica], list[Session]]) -> None:
    replicas, sessions = cluster
    idle = [replace(each, working=False) for each in sessions]
    node = node_to_remove(replicas, sessions)
    if node is not None:
        assert drain(node, replicas, idle).unplaced == ()
        assert not any(each.draining for each in replicas if each.node == node)


def test_replicas_are_wanted_for_slabs_in_use_sessions_held_and_queues() -> None:
    calm = [a_replica(name) for name in "abcd"]
    assert wanted_replicas(calm, 0.0) == 1
    assert wanted_replicas(calm, 0.0, Scaling(fewest=3)) == 3
    assert wanted_replicas([replace(each, free_slabs=0) for each in calm], 0.0) == 5  # 4 / 0.8
    assert wanted_replicas([replace(each, sessions=9) for each in calm], 0.0) == 5  # 4 × 0.9 / 0.8
    assert wanted_replicas([replace(each, sessions=8) for each in calm], 0.0) == 4
    assert wanted_replicas(calm, 1.3) == 6
    assert wanted_replicas(calm, 60.0) == 8  # twice as many at most
    assert wanted_replicas(calm, 60.0, Scaling(most=7)) == 7
    assert wanted_replicas([replace(each, draining=True) for each in calm], 60.0, Scaling(fewest=2)) == 2
    assert wanted_replicas([a_replica("a", slabs=0, free_slabs=0, most_sessions=0)], 0.0) == 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"free_share": 1.0}, "free_share must be at least 0 and below 1, got 1.0"),
        ({"longest_queue_s": 0.0}, "longest_queue_s must be above 0, got 0.0"),
        ({"fewest": 3, "most": 2}, "fewest must lie between 0 and most, got 3 and 2"),
    ],
)
def test_scaling_that_cannot_work_is_refused(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Scaling(**wrong)  # type: ignore[arg-type]


def test_a_replica_without_places_is_full() -> None:
    assert a_replica("a", most_sessions=0).fill == 1.0
    assert a_replica("a", most_sessions=0).room == 0
    assert a_replica("a", most_sessions=0).next_fill == 1.0


def test_a_rebalance_goes_on_with_other_kinds_when_one_has_nowhere_to_go() -> None:
    """Sessions that need a GPU stay, however small; the others leave for the replica without one."""
    replicas = [a_replica("a", sessions=10, labels=GPU), a_replica("b")]
    sessions = [Session(str(n), "m", n, GPU if n < 5 else frozenset(), "a") for n in range(10)]
    assert [move.session for move in rebalance(replicas, sessions, share=1.0)] == ["5", "6", "7", "8"]


def test_every_session_without_a_place_is_named_with_its_reason() -> None:
    waiting = [*(Session(f"{n}", "m", 1) for n in range(12)), Session("x", "m", 1, GPU)]
    plan = place_all(waiting, [a_replica("a")])
    assert [(each.session, each.why) for each in plan.unplaced] == [
        ("x", "no replica of m has the labels gpu; there are: none"),
        ("8", "all 10 places of replicas of m are taken"),
        ("9", "all 10 places of replicas of m are taken"),
    ]
