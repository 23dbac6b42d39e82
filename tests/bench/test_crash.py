"""`bench crash`: its gates, and a server that is killed under load."""

from dataclasses import replace
from typing import Any

import pytest

from kakeya.bench.benchmark import Run
from kakeya.bench.crash import Crash, CrashResults
from kakeya.bench.page import report_page
from kakeya.bench.report import Report

CLEAN = CrashResults(
    kills=200, sessions=9, generates=5, recalled=2, left=1, checked_lengths=9, recovery_s=(1.0, 2.0)
)


@pytest.mark.parametrize(
    ("changes", "verdicts"),
    [
        ({}, [True] * 6),
        ({"kills": 3}, [False, True, True, True, True, True]),
        ({"lost": 1}, [True, False, True, True, True, True]),
        ({"wrong": 1}, [True, True, False, True, True, True]),
        ({"errors": ("SessionNotFound",)}, [True, True, True, False, True, True]),
        ({"left": 0}, [True, True, True, True, False, True]),
        ({"recalled": 0}, [True, True, True, True, True, False]),
        ({"generates": 0, "checked_lengths": 0}, [True, None, None, None, None, None]),
    ],
)
def test_gates(changes: dict[str, Any], verdicts: list[bool | None]) -> None:
    results = replace(CLEAN, **changes)
    assert [gate.passed for gate in Crash().gates(results)] == verdicts
    assert "Crashes" in report_page("t", Report("crash", {}, {}), Crash.show(results))


def test_without_recall_nothing_is_asked_of_it() -> None:
    assert len(Crash(recall=0).gates(replace(CLEAN, recalled=0))) == 5


@pytest.mark.slow
def test_nothing_is_lost(tiny: dict[str, Any]) -> None:
    """The short version of the long one, under three kills: forks, sleep, recall, streams that are left."""
    bench = Crash(**(tiny | {"kills": 3, "agents": 5, "slabs": 2, "host_tier_bytes": 60_000}))
    results = bench.run(Run())
    assert results.generates > 5
    assert [gate.passed for gate in bench.gates(results)] == [True] * 6, results
