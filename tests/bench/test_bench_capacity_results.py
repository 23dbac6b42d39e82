from dataclasses import replace
from typing import Any

import pytest

from kakeya.bench.capacity_results import (
    AgentRun,
    Announced,
    LevelTimes,
    capacity_gates,
    capacity_summary,
    is_clean,
    level_row,
    stopped_by,
)
from kakeya.bench.gates import Gate

TIMES = LevelTimes(create=0.1, fill=2.0, turn=4.0, wall=7.0)
ANNOUNCED = Announced(capacity=8, kv_bytes_per_session=1000, memory_bytes=80_000, rss_when_ready=10_000)


def good(agent: int, seconds: float = 1.0) -> AgentRun:
    return AgentRun(agent, create_s=0.01, generate_s=seconds, generated=16, correct=True, kv_live_bytes=900)


def refused(agent: int, phase: str = "create", name: str = "ResourceExhausted") -> AgentRun:
    return AgentRun(agent, error_phase=phase, error_class=name, error_str=f"no room for {agent}")


def row(*agents: AgentRun) -> dict[str, Any]:
    return level_row(len(agents), agents, TIMES, rss=10_500)


def gates(
    *rows: dict[str, Any], top: int = 2, solo: int = 2, distinct: int = 2, peak: int | None = 10_500
) -> dict[str, Gate]:
    outputs = [[place % distinct] for place in range(solo)]
    summary = capacity_summary(rows, ANNOUNCED, peak, outputs, "the end")
    return {gate.name: gate for gate in capacity_gates(summary, [1, top], rss_limit=1.1)}


def test_a_clean_level_in_numbers() -> None:
    level = row(good(0, 1.0), good(1, 3.0))
    assert level["created_ok"] == level["generate_ok"] == level["level"] == 2
    assert level["wrong_outputs"] == 0
    assert level["errors"] == {}
    assert level["generate_p50_s"] == 2.0
    assert level["generate_p95_s"] == pytest.approx(2.9)
    assert level["create_p50_s"] == 0.01
    assert level["tokens_per_s"] == 32 / 4.0
    assert level["per_session_kv_bytes"] == 900
    assert (level["wall_s"], level["fill_wall_s"], level["server_rss_bytes"]) == (7.0, 2.0, 10_500)
    assert is_clean(level)
    assert stopped_by(level) is None


def test_errors_are_counted_by_class_with_an_example_of_each() -> None:
    level = row(good(0), refused(1), refused(2), refused(3, "turn", "StepFailed"))
    assert level["errors"] == {"ResourceExhausted": 2, "StepFailed": 1}
    assert [(e["class"], e["phase"], e["agent"]) for e in level["first_errors"]] == [
        ("ResourceExhausted", "create", 1),
        ("StepFailed", "turn", 3),
    ]
    assert level["created_ok"] == 1
    assert not is_clean(level)
    assert stopped_by(level) == "level 4: errors: 2 ResourceExhausted, 1 StepFailed"


def test_a_wrong_output_makes_a_level_unclean() -> None:
    level = row(good(0), replace(good(1), correct=False))
    assert level["wrong_outputs"] == 1
    assert stopped_by(level) == "level 2: 1 wrong outputs"
    assert gates(row(good(0)), level)["wrong outputs"].passed is False


def test_agents_without_an_output_make_a_level_unclean() -> None:
    assert stopped_by(row(good(0), AgentRun(1))) == "level 2: agents without an output"


def test_a_level_where_nobody_came_through_has_no_latency() -> None:
    level = row(refused(0))
    assert level["generate_p50_s"] is level["tokens_per_s"] is level["per_session_kv_bytes"] is None


def test_the_summary_names_the_bound() -> None:
    clean, unclean = row(good(0), good(1)), row(good(0), good(1), refused(2))
    summary = capacity_summary([clean, unclean], ANNOUNCED, 10_900, [[1], [2], [2]], "level 3")
    assert summary["levels_run"] == summary["max_concurrent_agents_clean"] == 2
    assert summary["node_kv_upper_bound"] == 8000
    assert summary["node_kv_share_of_memory"] == 0.1
    assert summary["outputs_checked"] == 4
    assert (summary["distinct_solo_outputs"], summary["solo_outputs"]) == (2, 3)
    assert summary["peak_over_ready"] == 1.09
    assert summary["stopped_by"] == "level 3"


def test_a_clean_ramp_passes() -> None:
    assert all(gate.passed for gate in gates(row(good(0)), row(good(0), good(1))).values())


def test_a_ramp_that_did_not_reach_the_top_fails() -> None:
    assert gates(row(good(0)), top=4)["agents at once, all clean"].passed is False
    assert gates(row(good(0), refused(1)))["errors"].passed is False


def test_memory_beyond_the_announced_fails() -> None:
    greedy = row(good(0), replace(good(1), kv_live_bytes=1001))
    assert gates(greedy)["KV bytes of a session over the announced ones"].passed is False
    memory = "server memory, peak over when it was ready"
    assert gates(row(good(0)), peak=11_100)[memory].passed is False
    assert gates(row(good(0)), peak=None)[memory].passed is None


def test_outputs_that_are_all_alike_prove_nothing() -> None:
    alike = gates(row(good(0), good(1)), solo=4, distinct=1)["wrong outputs"]
    assert alike.passed is None
    assert "1 of 4 solo outputs" in alike.reason
    wrong = row(good(0), replace(good(1), correct=False))
    assert gates(wrong, solo=4, distinct=1)["wrong outputs"].passed is False


def test_nothing_checked_is_not_passed() -> None:
    verdicts = gates(row(refused(0)))
    assert verdicts["wrong outputs"].passed is None
    assert verdicts["KV bytes of a session over the announced ones"].passed is None
    assert verdicts["errors"].passed is False


def test_without_a_level_there_is_no_verdict_on_errors() -> None:
    errors = gates()["errors"]
    assert errors.passed is errors.value is None
    assert errors.reason == "no level was run"
    assert gates()["agents at once, all clean"].passed is False
