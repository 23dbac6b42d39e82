from typing import Any

import pytest

from kakeya.bench.engine_page import engine_page, engine_sections, sampled_table, speed_table
from kakeya.bench.engine_results import (
    FILE_TARGETS,
    Memory,
    Startup,
    engine_gates,
    memory_results,
    sampled_results,
    speed_results,
    startup_results,
)
from kakeya.bench.gates import Gate
from kakeya.bench.plan import GREEDY, DecodeCase, SampledCase, Speeds, full_plan, quick_plan
from kakeya.bench.report import Report

PEER_FACTS = {"library": "l", "system": "s", "flash_attention": {}, "our_cpu_share": 0.001}


def _results(ours: float, theirs: float | None, **changes: Any) -> dict[str, Any]:
    """Results of the full plan in which each side has one speed everywhere."""
    cases = full_plan(3).cases
    speeds: Speeds = {("kakeya", case): [ours, ours, ours] for case in cases}
    if theirs is not None:
        speeds |= {("llama.cpp", case): [theirs, theirs] for case in cases}
    return {
        **speed_results(cases, speeds),
        "sampled": _sampled(ours, ours),
        "peer": None if theirs is None else PEER_FACTS,
        "memory": memory_results(Memory(100, 1000, 1100, pool=500), at_end=1105),
        "startup": startup_results(Startup((2.0, 9.0, 3.0), (0.1, 0.2, 0.3))),
        "bystanders_share": 0.01,
        **changes,
    }


def _sampled(greedy: float, otherwise: float) -> list[dict[str, Any]]:
    """The sampled cases of the full plan, with one speed for greedy decoding and one for the rest."""
    cases = full_plan(3).sampled
    speeds: Speeds = {("kakeya", c): [greedy if c.choice == GREEDY else otherwise] * 3 for c in cases}
    return sampled_results(cases, speeds)


def _gate(results: dict[str, Any], name: str) -> Gate:
    (gate,) = [gate for gate in engine_gates(results) if name in gate.name]
    return gate


def test_every_case_carries_both_sides_and_their_ratio() -> None:
    cases = quick_plan(3).cases
    speeds: Speeds = {("kakeya", case): [30.0, 10.0, 20.0] for case in cases}
    speeds |= {("llama.cpp", case): [5.0, 5.0, 50.0] for case in cases}
    row = speed_results(cases, speeds)["decode"][0]
    assert (row["sessions"], row["history"], row["ratio"]) == (1, 16, 4.0)
    assert row["tokens_per_second"]["median"] == 20.0
    assert row["peer_tokens_per_second"]["samples"] == [5.0, 5.0, 50.0]


def test_a_checkpoint_holds_what_was_measured_so_far() -> None:
    plan = full_plan(1)
    results = speed_results(plan.cases, {("kakeya", case): [1.0] for case in plan.groups[0]})
    assert len(results["prompt"]) == 2
    assert results["decode"] == []


def test_rows_are_ordered_for_reading() -> None:
    rows = [(row["sessions"], row["history"]) for row in _results(1.0, None)["decode"]]
    alone = [(1, history) for history in (64, 1024, 2048, 4096, 16384)]
    assert rows == alone + [(sessions, history) for history in (64, 1024) for sessions in (8, 16, 32)]


def test_three_times_the_peer_passes_everything() -> None:
    gates = engine_gates(_results(300.0, 100.0))
    (unjudged,) = [gate for gate in gates if gate.passed is not True]
    assert (unjudged.passed, unjudged.name) == (None, "resident memory over llama.cpp's")
    assert len(gates) == 20


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("prompt of 128,", 3.0),
        ("prompt of 512,", 3.0),
        ("1 session at history 64,", 1.25),
        ("1 session at history 4,096,", 2.0),
        ("1 session at history 16,384,", 3.0),
        ("16 sessions at history 64,", 2.5),
        ("16 sessions at history 1,024,", 2.5),
    ],
)
def test_each_ratio_has_its_own_limit(name: str, limit: float) -> None:
    assert _gate(_results(limit, 1.0), f"{name} ratio to").passed is True
    assert _gate(_results(limit * 0.99, 1.0), f"{name} ratio to").passed is False


def test_other_files_have_targets_of_their_own() -> None:
    judged = {gate.name: gate.limit for gate in engine_gates(_results(2.4, 1.0), FILE_TARGETS)}
    limits = [limit for name, limit in judged.items() if "ratio to" in name]
    assert limits == [2.0, 1.2, 1.5, 3.0, 2.5, 2.5]


@pytest.mark.parametrize(("theirs", "passed"), [(1200, True), (1105, True), (1000, False), (None, None)])
def test_memory_is_compared_with_one_session_each(theirs: int | None, passed: bool | None) -> None:
    results = _results(300.0, 100.0, peer={**PEER_FACTS, "resident_bytes": theirs})
    assert _gate(results, "memory over llama.cpp").passed is None
    alone = [row for row in results["decode"] if row["sessions"] == 1]
    assert _gate({**results, "decode": alone}, "memory over llama.cpp").passed is passed


def test_without_a_peer_ratios_are_not_judged() -> None:
    gates = engine_gates(_results(300.0, None))
    ratios = [gate for gate in gates if "ratio to" in gate.name]
    assert len(ratios) == 7
    assert all(gate.passed is None and "--peers" in gate.reason for gate in ratios)


def test_on_a_busy_machine_ratios_are_not_judged_and_the_run_fails() -> None:
    results = _results(300.0, 1.0, bystanders_share=0.6)
    ratios = [gate for gate in engine_gates(results) if "ratio to" in gate.name]
    assert all(gate.passed is None and "60%" in gate.reason for gate in ratios)
    assert _gate(results, "others used").passed is False


def test_an_untold_load_is_not_judged() -> None:
    results = _results(300.0, 100.0, bystanders_share=None)
    assert _gate(results, "others used").passed is None
    assert _gate(results, "prompt of 128,").passed is True


def test_a_peer_disturbed_by_us_fails_the_run() -> None:
    results = _results(300.0, 100.0, peer={**PEER_FACTS, "our_cpu_share": 0.2})
    assert _gate(results, "while the peer is timed").passed is False


@pytest.mark.parametrize(("far", "passed"), [(97.0, True), (96.0, False)])
def test_decode_must_not_slow_down_with_history(far: float, passed: bool) -> None:
    cases = [DecodeCase(1, 2048, 4), DecodeCase(1, 16384, 4)]
    speeds: Speeds = {("kakeya", cases[0]): [100.0], ("kakeya", cases[1]): [far]}
    results = _results(1.0, None, **speed_results(cases, speeds))
    assert _gate(results, "16,384 over 2,048").passed is passed


def test_flatness_needs_both_histories() -> None:
    results = _results(1.0, None, decode=[])
    assert _gate(results, "16,384 over 2,048").passed is None


@pytest.mark.parametrize(("speed", "passed"), [(97.0, True), (96.9, False)])
def test_sampling_must_keep_greedy_decodings_speed(speed: float, passed: bool) -> None:
    results = _results(100.0, None, sampled=_sampled(100.0, speed))
    gates = [gate for gate in engine_gates(results) if "greedy's speed" in gate.name]
    assert [gate.passed for gate in gates] == [passed] * 6
    assert gates[0].name == "decode, 1 session at history 64, top-p, part of greedy's speed"


def test_sampling_is_judged_repetition_by_repetition() -> None:
    """The machine was slow while the second repetition ran: it says the same of both."""
    greedy, otherwise = SampledCase(1, 64, 8, GREEDY), SampledCase(1, 64, 8, "top-p")
    speeds: Speeds = {("kakeya", greedy): [100.0, 20.0, 100.0], ("kakeya", otherwise): [98.0, 19.6, 30.0]}
    rows = sampled_results([greedy, otherwise], speeds)
    assert [row["of_greedy"] for row in rows] == [1.0, pytest.approx(0.98)]


def test_sampling_is_not_judged_where_there_is_nothing_to_judge() -> None:
    for results, reason in (
        (_results(1.0, None, sampled=[]), "not measured"),
        (_results(1.0, None, sampled=_sampled(0.0, 1.0)), "not measured"),
        (_results(1.0, None, bystanders_share=0.5), "others used 50%"),
    ):
        gates = [gate for gate in engine_gates(results) if "greedy's speed" in gate.name]
        assert len(gates) == 6
        assert all(gate.passed is None and reason in gate.reason for gate in gates)


def test_a_checkpoint_has_no_sampled_decoding_before_it_is_measured() -> None:
    assert sampled_results(full_plan(1).sampled, {}) == []


@pytest.mark.parametrize(("at_end", "passed"), [(1111, True), (1112, False)])
def test_memory_may_grow_by_a_hundredth(at_end: int, passed: bool) -> None:
    memory = memory_results(Memory(100, 1000, 1100, pool=500), at_end=at_end)
    assert _gate(_results(1.0, None, memory=memory), "resident memory, end").passed is passed


def test_start_is_judged_by_its_median() -> None:
    assert _gate(_results(1.0, None), "launch").value == 3.0
    slow = startup_results(Startup((5.1,), (1.1,)))
    assert _gate(_results(1.0, None, startup=slow), "launch").passed is False
    assert _gate(_results(1.0, None, startup=slow), "first token").passed is False


def test_tables_show_the_peer_only_when_there_was_one() -> None:
    assert speed_table(_results(300.0, 100.0)).rows[0] == ("prompt of 128", "300", "100", "3.00x")
    assert speed_table(_results(300.0, None)).rows[0] == ("prompt of 128", "300")


def test_an_unmeasured_number_is_a_dash() -> None:
    assert speed_table(_results(0.0, 100.0)).rows[0] == ("prompt of 128", "–", "100", "–")


def test_sampled_decoding_has_a_table() -> None:
    table = sampled_table(_sampled(100.0, 98.5))
    assert table.rows[0] == ("decode, 1 session at history 64, greedy", "100", "1.000")
    assert table.rows[-1] == ("decode, 32 sessions at history 64, top-p and penalty", "98", "0.985")
    assert "the peer chooses no tokens" in table.title


def test_a_report_from_before_sampling_was_measured_is_still_shown() -> None:
    results = _results(300.0, None)
    del results["sampled"]
    assert len(engine_sections(results)) == 3
    assert len(engine_sections(_results(300.0, None))) == 4


@pytest.mark.parametrize("theirs", [100.0, None])
def test_page_draws_every_kind_of_speed(theirs: float | None) -> None:
    report = Report("engine", {}, {"cpu": "c", "os": "o"}, _results(300.0, theirs))
    page = engine_page(report)
    assert page.count("<svg") == 5  # prompts, one session, sessions at two histories, sampled
    assert ("llama.cpp, 4,096: 100 tokens/s" in page) is (theirs is not None)
    assert "1,024" in page
