"""`bench agents`: its gates, and a small crowd."""

from dataclasses import replace
from typing import Any

import pytest

from kakeya.bench.agents import Agents, AgentsResults
from kakeya.bench.benchmark import Run
from kakeya.bench.page import report_page
from kakeya.bench.report import Report
from kakeya.bench.stats import Samples
from kakeya.errors import ConfigError


def one(seconds: float) -> Samples:
    return Samples((seconds,))


FINE = AgentsResults(
    bystanders_share=0.0,
    crowd=10,
    first=one(1.0),
    later=one(0.2),
    alone=one(1.0),
    crowded=one(3.5),
    one_choice=one(1.0),
    four_choices=one(1.5),
    one_prompt=one(1.0),
    median_prompt=one(9.0),
    last_prompt=one(16.0),
    short_prompt=one(0.4),
    gap=one(0.05),
    paced=one(1.0),
    unpaced=one(0.9),
)


@pytest.mark.parametrize(
    ("changes", "gate"),
    [
        ({}, None),
        ({"later": one(0.21)}, 0),
        ({"crowded": one(3.6)}, 1),
        ({"four_choices": one(1.51)}, 2),
        ({"median_prompt": one(9.7)}, 3),
        ({"one_prompt": one(0.9)}, 4),
        ({"short_prompt": one(0.41)}, 5),
        ({"gap": one(0.051)}, 6),
        ({"unpaced": one(0.89)}, 7),
    ],
)
def test_gates(changes: dict[str, Any], gate: int | None) -> None:
    passed = [each.passed for each in Agents().gates(replace(FINE, **changes))]
    assert passed == [place != gate for place in range(9)]


def test_nothing_is_judged_on_a_busy_machine_or_without_samples() -> None:
    busy = Agents().gates(replace(FINE, bystanders_share=0.2))
    assert [gate.passed for gate in busy] == [None] * 8 + [False]
    assert {gate.passed for gate in Agents().gates(AgentsResults())} == {None}


def test_a_small_crowd(tiny: dict[str, Any]) -> None:
    bench = Agents(**(tiny | {"window": 600, "crowd": 3, "prompt_tokens": 100, "repeats": 1}))
    results = bench.run(Run())
    samples = [value for value in vars(results).values() if isinstance(value, Samples)]
    assert len(samples) == 13
    assert all(len(each.samples) == 1 and each.samples[0] > 0 for each in samples)
    assert results.median_prompt.median <= results.last_prompt.median
    assert "3 agents" in report_page("t", Report("agents", {}, {}), Agents.show(results))


def test_bad_values_are_named() -> None:
    with pytest.raises(ConfigError, match="crowd must be at least 1, got 0"):
        Agents(crowd=0)
    assert Agents(quick=True).presets()["crowd"] == 8
    assert Agents().presets() == {}
