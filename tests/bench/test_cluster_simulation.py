"""`bench cluster-simulate`: its gates, its flags, and a small cluster."""

from dataclasses import replace
from typing import Any

import pytest

from kakeya.bench.benchmark import Run
from kakeya.bench.cluster_simulation import (
    QUICK,
    ClusterSimulation,
    ClusterSimulationResults,
    Planner,
)
from kakeya.bench.page import report_page
from kakeya.bench.report import Report, as_json, from_json
from kakeya.errors import ConfigError

CALLS = ("choose_home", "drain", "wanted_replicas", "node_to_remove", "rebalance", "place_all")
CLEAN = ClusterSimulationResults(
    checks=9, planner=tuple(Planner(each, 1, 0.001, 0.001, 0.001, 0.001) for each in CALLS)
)


def failing(results: ClusterSimulationResults) -> list[str]:
    return [each.name for each in ClusterSimulation().gates(results) if each.passed is False]


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, []),
        ({"lost": 1}, ["sessions lost"]),
        ({"two_homes": 1}, ["sessions with two homes"]),
        ({"homes_overfull": 1}, ["homes with more sessions than places"]),
        ({"sessions_refused_with_room": 1}, ["new sessions refused while there was room"]),
        ({"sessions_unplaced_with_room": 1}, ["sessions without a place while there was room"]),
    ],
)
def test_gates(changes: dict[str, Any], failed: list[str]) -> None:
    results = replace(CLEAN, **changes)
    assert failing(results) == failed
    assert "The planner, real time" in report_page("t", Report("x", {}, {}), ClusterSimulation.show(results))


@pytest.mark.parametrize("call", CALLS)
def test_a_slow_planner_fails_and_wall_time_counts_on_a_quiet_machine_only(call: str) -> None:
    slow = replace(CLEAN, planner=(Planner(call, 1, 0.001, 31.0, 31.0, 0.001),))
    assert failing(slow) == [f"{call} p95, wall s"]
    assert "wall s" not in "".join(failing(replace(slow, bystanders_share=0.5)))
    busy = replace(CLEAN, planner=(Planner(call, 1, 0.001, 0.001, 0.001, 31.0),))
    assert failing(busy) == [f"{call} p95, processor s"]


def test_nothing_simulated_is_not_judged() -> None:
    assert {each.passed for each in ClusterSimulation().gates(ClusterSimulationResults())} == {None}


def test_a_small_cluster_passes_and_its_report_is_read_back() -> None:
    heard: list[float] = []
    bench = replace(ClusterSimulation(quick=True), **QUICK)
    results = bench.run(Run(progress=lambda done, work: heard.append(done)))
    assert (results.lost, results.two_homes, results.homes_overfull) == (0, 0, 0)
    assert (results.sessions_refused_with_room, results.sessions_unplaced_with_room) == (0, 0)
    assert results.sessions_placed >= 4000
    assert min(results.deaths, results.drain_s.count, results.moves, results.turns) > 0
    assert heard == sorted(heard)
    again = from_json(ClusterSimulationResults, as_json(results))
    assert again == results
    shown = {each.title for each in ClusterSimulation.show(again)}
    assert {"Sessions", "Nodes", "Times and sizes", "Sessions of a home that takes new ones"} <= shown


def test_what_things_take_is_what_was_measured() -> None:
    """The defaults are figures of the committed reports, as the help says."""
    costs = ClusterSimulation().costs()
    assert costs.bytes(1028) - 4 * 1028 == 23_685_120  # per_session_kv_bytes of capacity-light
    assert costs.disk_wake.p50 == pytest.approx(0.0187)
    assert ClusterSimulation(quick=True).presets() == QUICK
    assert ClusterSimulation().presets() == {}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"move_ms": "1"}, "move-ms must be a median and a 95th percentile, such as 10,20, got '1'"),
        ({"disk_wake_ms": "a,b"}, "disk-wake-ms must be"),
        ({"decode": "1-2"}, "decode must be sessions and tokens/s with colons"),
        ({"nodes": 0}, "nodes must be at least 1, got 0"),
        ({"nodes": 10}, "1,000,000 sessions need more than the 12,500 places"),
    ],
)
def test_flags_that_cannot_be_are_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ClusterSimulation(**wrong).check(picture=False)
