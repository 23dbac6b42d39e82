"""`bench cluster`: its gates and what it shows; and small runs of both parts on Ray."""

from dataclasses import replace
from typing import Any

import pytest

from kakeya.bench.benchmark import Run
from kakeya.bench.cluster import storm
from kakeya.bench.cluster.benchmark import ClusterBench, Part
from kakeya.bench.cluster.rows import DRAIN, FRONT, HEAD, HOME, ClusterResults, Event, Speed
from kakeya.bench.page import report_page
from kakeya.bench.report import Report, as_json, from_json
from kakeya.bench.stats import Samples
from kakeya.errors import ConfigError

SPEED = Speed(
    agents=6,
    homes=(2, 2, 2),
    through=Samples.of((98.0, 97.0)),
    direct=Samples.of((100.0, 100.0)),
    through_token=Samples.of((0.0105, 0.0104)),
    direct_token=Samples.of((0.01, 0.01)),
    generates=24,
)
CLEAN = ClusterResults(
    events=(Event(HOME, 1.0), Event(FRONT, 2.0), Event(HEAD, 9.0, answered=7), Event(DRAIN, 0.5, 3, 3_000)),
    sessions=9,
    generates=5,
    checked_lengths=9,
    speed=SPEED,
    bystanders_share=0.01,
)
BENCH = ClusterBench(kills=3, drains=1)


def failed(results: ClusterResults) -> list[str]:
    return [gate.name for gate in BENCH.gates(results) if not gate.passed]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, []),
        ({"events": CLEAN.events[1:]}, ["kills"]),
        ({"events": CLEAN.events[:3]}, ["drains"]),
        ({"lost": 1}, ["sessions that lost tokens"]),
        ({"wrong": 1}, ["wrong generates"]),
        ({"twice": 1}, ["sessions at two homes"]),
        ({"errors": ("SessionNotFound",)}, ["errors that agents saw"]),
        (
            {"events": (*CLEAN.events, Event(HEAD, 9.0))},
            ["least generates without Ray's head"],
        ),
        ({"speed": replace(SPEED, wrong=1)}, ["wrong answers of talkers"]),
        (
            {"speed": replace(SPEED, through=Samples.of((94.0, 94.0)))},
            ["tokens a second through the front end over the homes alone"],
        ),
        (
            {"speed": replace(SPEED, through_token=Samples.of((0.012, 0.012)))},
            ["a token's time through the front end over a home's"],
        ),
    ],
)
def test_gates(changes: dict[str, Any], names: list[str]) -> None:
    results = replace(CLEAN, **changes)
    assert failed(results) == names
    page = report_page("t", Report("cluster", {}, {}), ClusterBench.show(results))
    assert "What happened" in page
    assert "straight to the homes" in page


@pytest.mark.parametrize(
    ("share", "reason"),
    [(0.2, "others used 20% of the machine"), (None, "nobody knows how busy others were")],
)
def test_speed_is_not_judged_where_others_may_have_been_busy(share: float | None, reason: str) -> None:
    gates = BENCH.gates(replace(CLEAN, bystanders_share=share))
    ratios = [gate for gate in gates if "front end over" in gate.name]
    assert [gate.passed for gate in ratios] == [None, None]
    assert all(reason in gate.reason for gate in ratios)


def test_what_is_not_in_a_run_is_not_judged() -> None:
    speed = ClusterBench(part=Part.SPEED).gates(ClusterResults(speed=SPEED, bystanders_share=0.0))
    assert [gate.passed for gate in speed] == [None] * 7 + [True] * 4
    storm = BENCH.gates(replace(CLEAN, speed=None))
    assert [gate.passed for gate in storm] == [True] * 7 + [None] * 3
    empty = BENCH.gates(ClusterResults(speed=Speed()))
    assert {gate.passed for gate in empty[2:]} == {None}
    assert "What happened" not in report_page(
        "t", Report("cluster", {}, {}), ClusterBench.show(ClusterResults(speed=SPEED))
    )


def test_a_report_is_read_back() -> None:
    assert from_json(ClusterResults, as_json(CLEAN)) == CLEAN


def test_a_cluster_of_one_node_is_refused() -> None:
    with pytest.raises(ConfigError, match="nodes must be at least 2"):
        ClusterBench(nodes=1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_agents_talk_on_both_paths(tiny: dict[str, Any]) -> None:
    pytest.importorskip("ray", reason="the extra `cluster` is not installed: pip install 'kakeya[cluster]'")
    bench = ClusterBench(
        **tiny, part=Part.SPEED, nodes=2, talkers=3, turn_tokens=4, stream_tokens=4, repeats=2
    )
    run: Run[ClusterResults] = Run()
    results = run.stamped(bench.run(run))
    assert results.speed is not None
    assert sum(results.speed.homes) == results.speed.agents == 3
    assert len(results.speed.homes) == 2
    assert (results.speed.generates, results.speed.wrong) == (3 * 2 * 3 + 4, 0)
    assert results.speed.kept is not None
    assert results.speed.overhead is not None
    assert results.bystanders_share is not None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_with_the_head(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The short version of the long one."""
    pytest.importorskip("ray", reason="the extra `cluster` is not installed: pip install 'kakeya[cluster]'")
    monkeypatch.setattr(storm, "KILLS", (HEAD, FRONT))
    bench = ClusterBench(**tiny, part=Part.STORM, nodes=2, agents=2, kills=2, drains=1, pause_s=0.1)
    results = bench.run(Run())
    assert sorted(event.kind for event in results.events) == [DRAIN, FRONT, HEAD]
    assert [gate.passed for gate in bench.gates(results)][:7] == [True] * 7, results
