"""`bench cluster`: its gates, and what it shows. The run itself needs Ray: tests/cluster/test_on_ray.py."""

from dataclasses import replace
from typing import Any

import pytest

from kakeya.bench.cluster import DRAIN, FRONT, HOME, ClusterBench, ClusterResults, Event
from kakeya.bench.page import report_page
from kakeya.bench.report import Report
from kakeya.errors import ConfigError

CLEAN = ClusterResults(
    events=(Event(HOME, 1.0), Event(FRONT, 2.0), Event(DRAIN, 0.5, 3, 3_000)),
    sessions=9,
    generates=5,
    checked_lengths=9,
)
BENCH = ClusterBench(kills=2, drains=1)


@pytest.mark.parametrize(
    ("changes", "verdicts"),
    [
        ({}, [True] * 6),
        ({"events": CLEAN.events[1:]}, [False, True, True, True, True, True]),
        ({"events": CLEAN.events[:2]}, [True, False, True, True, True, True]),
        ({"lost": 1}, [True, True, False, True, True, True]),
        ({"wrong": 1}, [True, True, True, False, True, True]),
        ({"twice": 1}, [True, True, True, True, False, True]),
        ({"errors": ("SessionNotFound",)}, [True, True, True, True, True, False]),
        ({"generates": 0, "checked_lengths": 0}, [True, True, None, None, None, None]),
    ],
)
def test_gates(changes: dict[str, Any], verdicts: list[bool | None]) -> None:
    results = replace(CLEAN, **changes)
    assert [gate.passed for gate in BENCH.gates(results)] == verdicts
    assert "What happened" in report_page("t", Report("cluster", {}, {}), ClusterBench.show(results))


def test_a_cluster_of_one_node_is_refused() -> None:
    with pytest.raises(ConfigError, match="nodes must be at least 2"):
        ClusterBench(nodes=1)
