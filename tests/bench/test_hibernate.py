"""`bench hibernate`: its gates, and sessions that sleep and wake."""

from dataclasses import replace
from typing import Any

import pytest

from kakeya.bench import hibernate
from kakeya.bench.benchmark import Run
from kakeya.bench.hibernate import Hibernate, HibernateResults
from kakeya.bench.page import report_page
from kakeya.bench.report import Report
from kakeya.errors import ConfigError

CLEAN = HibernateResults(
    sessions=9,
    outputs_checked=18,
    host_wake_p50_s=0.01,
    disk_wake_p50_s=0.05,
    quiet_gap_p95_s=0.01,
    storm_gap_p95_s=0.011,
)


@pytest.mark.parametrize(
    ("changes", "gate", "passed"),
    [
        ({}, None, True),
        ({"wrong_outputs": 1}, 0, False),
        ({"outputs_checked": 0}, 0, None),
        ({"errors": ("x",)}, 1, False),
        ({"sessions": 0}, 1, None),
        ({"host_wake_p50_s": 0.021}, 2, False),
        ({"host_wake_p50_s": None}, 2, None),
        ({"disk_wake_p50_s": 0.061}, 3, False),
        ({"storm_gap_p95_s": 0.013}, 4, False),
        ({"quiet_gap_p95_s": None}, 4, None),
        ({"host_bytes": 2**31}, 5, False),
        ({"disk_bytes": 2**35}, 6, False),
        ({"process_bytes": 2**31}, 7, False),
    ],
)
def test_gates(changes: dict[str, Any], gate: int | None, passed: bool | None) -> None:
    results = replace(CLEAN, **changes)
    expected = [True] * 8
    if gate is not None:
        expected[gate] = passed
    assert [each.passed for each in Hibernate().gates(results)] == expected
    assert "Sleepers" in report_page("t", Report("hibernate", {}, {}), Hibernate.show(results))


@pytest.mark.parametrize("family", [1, 5])
def test_sleepers_wake_and_say_what_they_would_have_said(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, family: int
) -> None:
    monkeypatch.setattr(hibernate, "_QUIET_S", 0.1)
    monkeypatch.setattr(hibernate, "_LOOK_EVERY_S", 0.0)
    given = {"sessions": 12, "slabs": 4, "streams": 1, "storm_s": 0.4, "wakes_per_s": 100.0, "prompt_len": 9}
    bench = Hibernate(**(tiny | given | {"host_tier_bytes": 40_000, "gen_tokens": 3, "family": family}))
    results = bench.run(Run())
    assert (results.sessions, results.wrong_outputs, results.errors) == (12, 0, ())
    assert results.host_wakes > 0
    assert results.disk_wakes > 0
    assert 0 < results.host_bytes <= 40_000 < results.disk_bytes
    with pytest.raises(ConfigError, match="slabs must be at least 3"):
        Hibernate(slabs=2)
