from typing import Any

import pytest

from kakeya.bench.gates import Gate
from kakeya.bench.overhead_results import (
    ENGINE,
    GRPC,
    HTTP,
    REQUEST,
    TURN,
    Timing,
    overhead_gates,
    overhead_rows,
)

TIMINGS = {
    (ENGINE, TURN): [Timing(100, 1.0), Timing(100, 0.5), Timing(100, 2.0)],
    (GRPC, TURN): [Timing(100, 1.25), Timing(100, 1.0), Timing(100, 5.0)],
    (ENGINE, REQUEST): [Timing(100, 2.0)],
    (GRPC, REQUEST): [Timing(100, 2.0)],
}


def results(**changes: Any) -> dict[str, Any]:
    base = {"front_ends": overhead_rows(TIMINGS), "absent": {HTTP: "404"}, "bystanders_share": 0.01}
    return base | changes


def verdicts(results: dict[str, Any], limit: float = 0.95) -> dict[str, Gate]:
    return {gate.name: gate for gate in overhead_gates(results, limit)}


def test_what_is_kept_is_the_ratio_of_the_medians() -> None:
    rows = {(row["front_end"], row["work"]): row for row in overhead_rows(TIMINGS)}
    assert rows[GRPC, TURN]["tokens_per_second"]["samples"] == [80, 100, 20]
    assert rows[GRPC, TURN]["kept"] == pytest.approx(0.8)
    assert rows[GRPC, REQUEST]["kept"] == 1.0
    assert rows[HTTP, REQUEST]["kept"] is None
    assert rows[HTTP, REQUEST]["engine_tokens_per_second"]["median"] == 50


def test_each_front_end_has_its_gate() -> None:
    gates = verdicts(results())
    assert gates["gRPC over the engine, turn"].passed is False
    assert "gRPC over the engine, request" not in gates, "shown, not judged"
    assert gates["HTTP over the engine, request"].passed is None
    assert gates["HTTP over the engine, request"].reason == "404"
    assert verdicts(results(), limit=0.75)["gRPC over the engine, turn"].passed is True


def test_a_front_end_without_reason_was_not_measured() -> None:
    gates = verdicts(results(absent={}))
    assert gates["HTTP over the engine, request"].reason == "not measured in this run"


def test_a_busy_machine_is_not_judged_but_named() -> None:
    gates = verdicts(results(bystanders_share=0.2))
    assert gates["gRPC over the engine, turn"].passed is None
    assert "20%" in gates["gRPC over the engine, turn"].reason
    assert gates["share of the machine that others used"].passed is False


def test_a_system_that_does_not_tell_is_judged_all_the_same() -> None:
    gates = verdicts(results(bystanders_share=None), limit=0.75)
    assert gates["gRPC over the engine, turn"].passed is True
    assert gates["share of the machine that others used"].passed is None
