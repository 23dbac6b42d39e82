"""The simulated cluster: its parts against hand-made figures, and whole runs in which nothing may be lost."""

import random
from dataclasses import fields, replace
from typing import Any

import pytest

from kakeya.cluster.simulated.clock import Clock
from kakeya.cluster.simulated.costs import Costs, Spread
from kakeya.cluster.simulated.home import Home, Talk
from kakeya.cluster.simulated.ledger import Ledger
from kakeya.cluster.simulated.scenario import Outcome, Scenario
from kakeya.cluster.simulation import Simulation
from kakeya.errors import ConfigError

COSTS = Costs(
    bytes_per_token=1000,
    slots=100,
    host_wake=Spread(0.001, 0.002),
    disk_wake=Spread(0.01, 0.02),
    restart=Spread(1.0, 2.0),
    move=Spread(0.05, 0.1),
    call_s=0.002,
    prompt_tokens_per_s=1000.0,
    decode=((1, 100.0), (8, 400.0)),
    detection_s=5.0,
    node_start_s=30.0,
    link_bytes_per_s=1e6,
)
SCENARIO = Scenario(
    nodes=8,
    spare_nodes=1,
    sessions=160,
    places=30,
    slabs=4,
    host_places=3,
    seconds=400.0,
    turn_every_s=20.0,
    prompt_tokens=20.0,
    answer_tokens=20.0,
    history_tokens=80.0,
    lifetime_s=800.0,
    surge=2.0,
    node_life_s=200.0,
    cut_off_share=0.4,
    drain_every_s=20.0,
    rebalance_every_s=25.0,
    scale_every_s=10.0,
    moves_at_once=2,
)


def told(outcome: Outcome) -> dict[str, Any]:
    """Everything but wall time."""
    return {each.name: getattr(outcome, each.name) for each in fields(outcome) if each.name != "planner_s"}


def started(**changes: Any) -> Simulation:
    """A cluster with its sessions at home, to which nothing happens by itself."""
    simulation = Simulation(replace(SCENARIO, **changes), COSTS)
    for _ in range(simulation.world.scenario.nodes):
        simulation.world.new_home()
    simulation.upkeep.fill()
    return simulation


def test_events_happen_in_the_order_of_their_times() -> None:
    clock, heard = Clock(), list[tuple[str, float]]()
    hear = lambda what: heard.append((what, clock.now))  # noqa: E731
    clock.after(2.0, hear, "late")
    clock.after(1.0, lambda: clock.after(0.5, hear, "made meanwhile"))
    clock.after(1.0, hear, "first")
    clock.after(9.0, hear, "never")
    clock.run(3.0)
    assert heard == [("first", 1.0), ("made meanwhile", 1.5), ("late", 2.0)]
    assert clock.now == 3.0


def test_a_spread_has_its_median_and_its_95th_percentile() -> None:
    chance = random.Random(1)
    drawn = sorted(Spread(0.010, 0.050).draw(chance) for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(0.010, rel=0.05)
    assert drawn[19_000] == pytest.approx(0.050, rel=0.1)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Spread(0.0, 1.0), "above 0 and at most its p95, got 0.0 and 1.0"),
        (lambda: Spread(2.0, 1.0), "at most its p95"),
        (lambda: replace(COSTS, decode=((8, 1.0), (1, 2.0))), "rise from 1"),
        (lambda: replace(COSTS, decode=()), "rise from 1"),
        (lambda: replace(COSTS, link_bytes_per_s=0.0), "speeds must be above 0"),
        (lambda: replace(SCENARIO, nodes=0), "nodes must be at least 1, got 0"),
        (lambda: replace(SCENARIO, surge=-1.0), "surge must be at least 0"),
        (lambda: replace(SCENARIO, drain_every_s=0.0), "drain-every-s must be above 0"),
        (lambda: replace(SCENARIO, cut_off_share=1.5), "cut-off-share must be at most 1"),
        (lambda: replace(SCENARIO, sessions=241), "241 sessions need more than the 240 places"),
    ],
)
def test_what_cannot_be_is_refused(wrong: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        wrong()


def test_costs_between_and_beyond_what_was_measured() -> None:
    assert [COSTS.tokens_per_s(each) for each in (1, 2, 8, 20)] == [
        100.0,
        pytest.approx(142.86, 0.001),
        400,
        400,
    ]
    assert COSTS.bytes(50) == 50 * 1000 + 200
    assert COSTS.bytes(5000) == 100 * 1000 + 20_000


def test_the_least_recently_used_sleeps_in_memory_then_on_the_disk() -> None:
    home, talks = Home("h", "n", slabs=2, places=9, host_places=1), [Talk(n, 1) for n in range(4)]
    for talk in talks:
        home.store(talk)
    assert [home.wake(talks[n]) for n in (0, 1, 0, 2, 1, 3, 2)] == [
        *("disk", "disk", "slab", "disk", "host", "disk"),
        "host",
    ]
    talks[2].working = True  # a working one keeps its slab
    home.wake(talks[0])
    assert set(home.awake) == {2, 0}


def test_the_ledger_names_a_session_with_no_home_or_with_two() -> None:
    ledger, talk = Ledger(), Talk(7, 1)
    a, b = Home("a", "a", 1, 1, 1), Home("b", "b", 1, 1, 1)
    ledger.check(talk, 1.0)
    a.store(talk)
    ledger.check(talk, 2.0)
    a.leaving[7] = 1
    ledger.check(talk, 3.0)  # it left, and nobody carries it
    b.store(talk)
    ledger.check(talk, 4.0)
    del a.leaving[7]
    ledger.check(talk, 5.0)
    assert (ledger.checks, ledger.lost, ledger.doubled) == (5, 2, 1)
    ledger.audit([a, b], [talk], 6.0)
    ledger.audit([], [talk], 7.0)
    ledger.audit([a], [], 8.0)
    assert [each.split(" at ")[0] for each in ledger.named] == [
        "s00000007 has no home",
        "s00000007 has no home",
        "s00000007 has 2 homes",
        "s00000007 has 2 homes in the audit",
        "s00000007 is in no directory in the audit",
        "s00000007 was closed and is stored in the audit",
    ]


@pytest.mark.parametrize("seed", range(4))
def test_under_deaths_and_drains_no_session_is_lost_or_has_two_homes(seed: int) -> None:
    outcome = Simulation(replace(SCENARIO, seed=seed), COSTS).run()
    assert (outcome.lost, outcome.doubled, outcome.violations) == (0, 0, ())
    assert (outcome.refused_with_room, outcome.unplaced_with_room) == (0, 0)
    assert min(outcome.deaths, len(outcome.drain_s), outcome.moves, outcome.turns, outcome.closed) > 0
    assert outcome.recovery_s
    assert min(outcome.recovery_s) > COSTS.detection_s
    assert outcome.checks > outcome.turns
    assert 0 < outcome.busy_share < 1


def test_the_same_seed_has_the_same_outcome() -> None:
    first, second = (told(Simulation(SCENARIO, COSTS).run()) for _ in range(2))
    assert first == second
    assert first != told(Simulation(replace(SCENARIO, seed=1), COSTS).run())


def test_a_drain_moves_every_session_and_the_node_comes_back() -> None:
    simulation = started()
    world, outcome = simulation.world, simulation.world.outcome
    home = next(iter(world.homes.values()))
    simulation.upkeep.begin_drain(home, returns=True)
    world.clock.run(200.0)
    world.audit()
    assert (outcome.drain_sessions, home.sessions, home.closed) == ([20], {}, True)
    assert outcome.drain_bytes == [simulation.moves.bytes]
    assert len(simulation.moves.pauses) == 20
    assert len(world.homes) == SCENARIO.nodes
    assert (world.ledger.lost, world.ledger.doubled) == (0, 0)
    # Two travel at once, so each has half of the link beside its own work.
    assert outcome.drain_s[0] >= simulation.moves.bytes / COSTS.link_bytes_per_s


@pytest.mark.parametrize("victim", ["source", "target"])
def test_a_move_that_a_death_breaks_is_settled_when_both_are_back(victim: str) -> None:
    simulation = started(cut_off_share=0.0)
    world = simulation.world
    source, target = list(world.homes.values())[:2]
    talk = next(iter(source.sessions.values()))
    source.to_move.append((talk, target))
    simulation.moves.pump(source)
    talk.asked = world.clock.now
    simulation.deaths.kill(source if victim == "source" else target)
    world.clock.run(1.0)
    assert talk.transfer is not None  # nobody can use it until the other one has been asked
    world.clock.run(60.0)
    world.audit()
    assert (talk.home, talk.transfer, talk.holders) == (source, None, [source])
    assert (simulation.moves.broken, world.outcome.turns) == (1, 1)
    assert (world.ledger.lost, world.ledger.doubled) == (0, 0)


@pytest.mark.parametrize("forgetful", [False, True])
def test_who_took_a_session_in_must_remember_it_when_the_session_has_gone_on(
    forgetful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home dies before it hears that its session arrived. Meanwhile the session moves on to a third one."""
    if forgetful:
        monkeypatch.setattr(Home, "was_taken", lambda self, talk, move: talk.number in self.sessions)
    simulation = started(cut_off_share=0.0)
    world = simulation.world
    first, second, third = list(world.homes.values())[:3]
    talk = next(iter(first.sessions.values()))
    first.to_move.append((talk, second))
    simulation.moves.pump(first)
    while talk.home is first:
        world.clock.run(world.clock.now + COSTS.call_s / 4)
    simulation.deaths.kill(first)
    second.to_move.append((talk, third))
    simulation.moves.pump(second)
    world.clock.run(4.0)
    assert talk.home is third
    assert talk.holders == [first, third]
    world.clock.run(60.0)
    world.audit()
    assert (world.ledger.doubled > 0) == forgetful


def test_a_node_that_is_only_cut_off_stores_nothing_once_its_successor_is_there() -> None:
    simulation = started(cut_off_share=1.0, answer_tokens=5000.0)
    world = simulation.world
    home = next(iter(world.homes.values()))
    talks = list(home.sessions.values())[:4]
    for talk in talks:
        talk.asked = 0.0
        simulation.turns.go_on(talk)
    simulation.deaths.kill(home)
    before = [talk.tokens for talk in talks]
    world.clock.run(6.0 + COSTS.restart.p95)
    assert home.epoch == 2
    world.clock.run(2000.0)
    assert world.outcome.fenced + world.outcome.stored_by_cut_off == 4
    assert world.outcome.fenced > 0
    assert world.outcome.turns == 4  # each was asked for again, and answered once
    assert all(now > then for now, then in zip([talk.tokens for talk in talks], before, strict=True))


def test_turns_wait_for_a_slab_and_the_autoscaler_hears_of_it() -> None:
    simulation = started()
    world = simulation.world
    home = next(iter(world.homes.values()))
    for talk in list(home.sessions.values())[:6]:
        talk.asked = 0.0
        simulation.turns.go_on(talk)
    assert (len(home.working), len(home.queue)) == (4, 2)
    assert home.replica().waiting == 2
    world.clock.run(100.0)
    assert (world.outcome.turns, len(world.outcome.queued_s)) == (6, 2)
    assert simulation.turns.mean_queue_s() > 0
    assert simulation.turns.mean_queue_s() == 0


def test_a_full_cluster_refuses_and_puts_off_drains() -> None:
    outcome = Simulation(replace(SCENARIO, sessions=240, node_life_s=1e9, scale_every_s=1e9), COSTS).run()
    assert outcome.refused > 0
    assert outcome.drains_put_off > 0
    assert (outcome.refused_with_room, outcome.lost) == (0, 0)
