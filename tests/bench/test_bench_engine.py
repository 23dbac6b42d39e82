"""`bench engine`: what it concludes, its own side over the real default model, and fresh processes."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kakeya.bench import engine, startup
from kakeya.bench.cases import LEAD_IN, LEAD_OUT, Case, Plan, Speeds
from kakeya.bench.engine import (
    CHOICES,
    GREEDY,
    Engine,
    EngineResults,
    Memory,
    Peer,
    RuntimeSide,
    Speed,
    Startup,
    full_plan,
    quick_plan,
)
from kakeya.bench.page import report_page
from kakeya.bench.report import Gate, Report, as_json, from_json
from kakeya.bench.startup import launch
from kakeya.bench.stats import Samples
from kakeya.bench.tables import Table
from kakeya.bench.text import prose
from kakeya.config import CacheConfig, EngineConfig
from kakeya.engine.stream import EventStream
from kakeya.errors import ConfigError
from kakeya.runtime import Runtime
from kakeya.types import (
    DType,
    KernelChoice,
    Numerics,
    SamplingParams,
    TokenEvent,
    TruncatedEvent,
    WeightFormat,
)

PEER_FACTS = Peer("l", "s", {}, 0.001)
MEMORY = Memory(100, 1000, 1100, pool_bytes=500, at_end_bytes=1105)
STARTUP = Startup(Samples((2.0, 9.0, 3.0)), Samples((0.1, 0.2, 0.3)))


def concluded(plan: Plan, speeds: Speeds) -> EngineResults:
    return engine._concluded(plan, speeds, MEMORY, STARTUP, None)


def _results(ours: float, theirs: float | None, **changes: Any) -> EngineResults:
    """Results of the full plan in which each side has one speed everywhere."""
    plan = full_plan(3)
    speeds: Speeds = {("kakeya", case): [ours, ours, ours] for case in plan.cases}
    if theirs is not None:
        speeds |= {("llama.cpp", case): [theirs, theirs] for case in plan.cases}
    known = {"peer": None if theirs is None else PEER_FACTS, "bystanders_share": 0.01}
    return replace(concluded(plan, speeds), **({"sampled": _sampled(ours, ours)} | known | changes))


def _sampled(greedy: float, otherwise: float) -> list[Speed]:
    """The sampled cases of the full plan, with one speed for greedy decoding and one for the rest."""
    plan = full_plan(3)
    speeds: Speeds = {("kakeya", c): [greedy if c.choice == GREEDY else otherwise] * 3 for c in plan.sampled}
    return concluded(plan, speeds).sampled


def gates_of(results: EngineResults) -> list[Gate]:
    return Engine().gates(results)


def _gate(results: EngineResults, name: str) -> Gate:
    (gate,) = [gate for gate in gates_of(results) if name in gate.name]
    return gate


def table(results: EngineResults, place: int) -> Table:
    return [each for each in Engine.show(results) if isinstance(each, Table)][place]


def test_every_case_carries_both_sides_and_their_ratio() -> None:
    plan = quick_plan(3)
    speeds: Speeds = {("kakeya", case): [30.0, 10.0, 20.0] for case in plan.cases}
    speeds |= {("llama.cpp", case): [5.0, 5.0, 50.0] for case in plan.cases}
    results = concluded(plan, speeds)
    row = results.decode[0]
    assert (row.sessions, row.history, row.ratio) == (1, 16, 4.0)
    assert row.tokens_per_second.median == 20.0
    assert row.peer_tokens_per_second == Samples((5.0, 5.0, 50.0))
    assert as_json(results)["decode"][0]["ratio"] == 4.0
    assert from_json(EngineResults, as_json(results)) == results


def test_a_checkpoint_holds_what_was_measured_so_far() -> None:
    plan = full_plan(1)
    results = concluded(plan, {("kakeya", case): [1.0] for case in plan.groups[0]})
    assert len(results.prompt) == 2
    assert results.decode == []


def test_rows_are_ordered_for_reading() -> None:
    rows = [(row.sessions, row.history) for row in _results(1.0, None).decode]
    alone = [(1, history) for history in (64, 1024, 2048, 4096, 16384)]
    assert rows == alone + [(sessions, history) for history in (64, 1024) for sessions in (8, 16, 32)]


def test_three_times_the_peer_passes_everything() -> None:
    gates = gates_of(_results(300.0, 100.0))
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
    judged = {gate.name: gate.limit for gate in Engine(model="other.gguf").gates(_results(2.4, 1.0))}
    limits = [limit for name, limit in judged.items() if "ratio to" in name]
    assert limits == [2.0, 1.2, 1.5, 3.0, 2.5, 2.5]


@pytest.mark.parametrize(("theirs", "passed"), [(1200, True), (1105, True), (1000, False), (None, None)])
def test_memory_is_compared_with_one_session_each(theirs: int | None, passed: bool | None) -> None:
    results = _results(300.0, 100.0, peer=replace(PEER_FACTS, resident_bytes=theirs))
    assert _gate(results, "memory over llama.cpp").passed is None
    alone = [row for row in results.decode if row.sessions == 1]
    assert _gate(replace(results, decode=alone), "memory over llama.cpp").passed is passed


def test_without_a_peer_ratios_are_not_judged() -> None:
    gates = gates_of(_results(300.0, None))
    ratios = [gate for gate in gates if "ratio to" in gate.name]
    assert len(ratios) == 7
    assert all(gate.passed is None and "--peers" in gate.reason for gate in ratios)


def test_on_a_busy_machine_ratios_are_not_judged_and_the_run_fails() -> None:
    results = _results(300.0, 1.0, bystanders_share=0.6)
    ratios = [gate for gate in gates_of(results) if "ratio to" in gate.name]
    assert all(gate.passed is None and "60%" in gate.reason for gate in ratios)
    assert _gate(results, "others used").passed is False


def test_an_untold_load_is_not_judged() -> None:
    results = _results(300.0, 100.0, bystanders_share=None)
    assert _gate(results, "others used").passed is None
    assert _gate(results, "prompt of 128,").passed is True


def test_a_peer_disturbed_by_us_fails_the_run() -> None:
    results = _results(300.0, 100.0, peer=replace(PEER_FACTS, our_cpu_share=0.2))
    assert _gate(results, "while the peer is timed").passed is False


@pytest.mark.parametrize(("far", "passed"), [(97.0, True), (96.0, False)])
def test_decode_must_not_slow_down_with_history(far: float, passed: bool) -> None:
    cases = [Case(0, 1, 2048, 4), Case(0, 1, 16384, 4)]
    speeds: Speeds = {("kakeya", cases[0]): [100.0], ("kakeya", cases[1]): [far]}
    results = _results(1.0, None, decode=concluded(Plan((tuple(cases),), 1), speeds).decode)
    assert _gate(results, "16,384 over 2,048").passed is passed


def test_flatness_needs_both_histories() -> None:
    results = _results(1.0, None, decode=[])
    assert _gate(results, "16,384 over 2,048").passed is None


@pytest.mark.parametrize(("speed", "passed"), [(97.0, True), (96.9, False)])
def test_sampling_must_keep_greedy_decodings_speed(speed: float, passed: bool) -> None:
    results = _results(100.0, None, sampled=_sampled(100.0, speed))
    gates = [gate for gate in gates_of(results) if "greedy's speed" in gate.name]
    assert [gate.passed for gate in gates] == [passed] * 6
    assert gates[0].name == "decode, 1 session at history 64, top-p, part of greedy's speed"


def test_sampling_is_judged_repetition_by_repetition() -> None:
    """The machine was slow while the second repetition ran: it says the same of both."""
    greedy, otherwise = Case(0, 1, 64, 8, GREEDY), Case(0, 1, 64, 8, "top-p")
    speeds: Speeds = {("kakeya", greedy): [100.0, 20.0, 100.0], ("kakeya", otherwise): [98.0, 19.6, 30.0]}
    rows = concluded(Plan((), 3, (greedy, otherwise)), speeds).sampled
    assert [row.of_greedy for row in rows] == [1.0, pytest.approx(0.98)]


def test_sampling_is_not_judged_where_there_is_nothing_to_judge() -> None:
    for results, reason in (
        (_results(1.0, None, sampled=[]), "not measured"),
        (_results(1.0, None, sampled=_sampled(0.0, 1.0)), "not measured"),
        (_results(1.0, None, bystanders_share=0.5), "others used 50%"),
    ):
        gates = [gate for gate in gates_of(results) if "greedy's speed" in gate.name]
        assert len(gates) == 6
        assert all(gate.passed is None and reason in gate.reason for gate in gates)


def test_a_checkpoint_has_no_sampled_decoding_before_it_is_measured() -> None:
    assert concluded(full_plan(1), {}).sampled == []


@pytest.mark.parametrize(("at_end", "passed"), [(1111, True), (1112, False)])
def test_memory_may_grow_by_a_hundredth(at_end: int, passed: bool) -> None:
    memory = replace(MEMORY, at_end_bytes=at_end)
    assert _gate(_results(1.0, None, memory=memory), "resident memory, end").passed is passed


def test_start_is_judged_by_its_median() -> None:
    assert _gate(_results(1.0, None), "launch").value == 3.0
    slow = Startup(Samples((5.1,)), Samples((1.1,)))
    assert _gate(_results(1.0, None, startup=slow), "launch").passed is False
    assert _gate(_results(1.0, None, startup=slow), "first token").passed is False


def test_tables_show_the_peer_only_when_there_was_one() -> None:
    assert table(_results(300.0, 100.0), 0).cells[0] == ["prompt of 128", "300", "100", "3.00x"]
    assert table(_results(300.0, None), 0).cells[0] == ["prompt of 128", "300"]


def test_an_unmeasured_number_is_a_dash() -> None:
    assert table(_results(0.0, 100.0), 0).cells[0] == ["prompt of 128", "–", "100", "–"]


def test_sampled_decoding_has_a_table() -> None:
    shown = table(_results(1.0, None, sampled=_sampled(100.0, 98.5)), 1)
    assert shown.cells[0] == ["decode, 1 session at history 64, greedy", "100", "1.000"]
    assert shown.cells[-1] == ["decode, 32 sessions at history 64, top-p and penalty", "98", "0.985"]
    assert "the peer chooses no tokens" in shown.title


def test_a_report_from_before_sampling_was_measured_is_still_shown() -> None:
    told = as_json(_results(300.0, None))
    del told["sampled"]
    for results, count in ((from_json(EngineResults, told), 3), (_results(300.0, None), 4)):
        assert sum(isinstance(each, Table) for each in Engine.show(results)) == count


@pytest.mark.parametrize("theirs", [100.0, None])
def test_page_draws_every_kind_of_speed(theirs: float | None) -> None:
    report = Report("engine", {}, {"cpu": "c", "os": "o"})
    page = report_page("t", report, Engine.show(_results(300.0, theirs)))
    assert page.count("<svg") == 5  # prompts, one session, sessions at two histories, sampled
    assert ("llama.cpp, 4,096: 100 tokens/s" in page) is (theirs is not None)
    assert "1,024" in page


CONFIG = EngineConfig(cache=CacheConfig(sink=4, window=64), capacity=4, threads=2)


@pytest.fixture(scope="module")
def runtime(default_model: Path) -> Iterator[Runtime]:
    with Runtime.open(str(default_model), CONFIG) as runtime:
        yield runtime


@pytest.fixture
def side(runtime: Runtime) -> Iterator[RuntimeSide]:
    side = RuntimeSide(runtime, runtime.tokenizer.encode(prose()))
    yield side
    side.release()


def _open_histories(runtime: Runtime) -> list[int]:
    sessions = runtime.list_sessions()[0]
    return [runtime.info(session.session_id).history_length for session in sessions]


def test_a_measured_history_is_as_it_was(side: RuntimeSide, runtime: Runtime) -> None:
    case = Case(sessions=3, history=20, steps=2)
    side.prepare(case)
    for _ in range(2):
        assert side.measure(case) > 0
        assert _open_histories(runtime) == [21]  # the history and the token that made the engine compute it
    side.release()
    assert _open_histories(runtime) == []


def test_a_history_is_shared_by_the_cases_that_need_it(side: RuntimeSide, runtime: Runtime) -> None:
    for sessions in (1, 2):
        side.prepare(Case(sessions=sessions, history=8, steps=2))
    assert _open_histories(runtime) == [9]


def test_speeds_fit_the_clock(side: RuntimeSide) -> None:
    for case, tokens in ((Case(0, 2, 70, 8), 16), (Case(100), 100)):
        side.prepare(case)
        began = time.perf_counter()
        speed = side.measure(case)
        assert tokens / speed < time.perf_counter() - began


def test_a_sampled_case_samples_with_a_seed_for_each_session(
    side: RuntimeSide, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SamplingParams | None] = []
    generate = runtime.generate

    def recording(session_id: str, max_tokens: int, sampling: SamplingParams | None = None) -> EventStream:
        asked.append(sampling)
        return generate(session_id, max_tokens, sampling)

    monkeypatch.setattr(runtime, "generate", recording)
    side.prepare(Case(0, 2, 8, 2, "top-p and penalty"))
    assert asked[0] is None  # the history
    assert asked[1:] == [replace(CHOICES["top-p and penalty"], seed=seed) for seed in (0, 1)]


def test_only_full_rounds_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams, one of which is a token ahead: a round counts when the slower one has delivered."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def stream(ready_at: list[float]) -> Iterator[TokenEvent | TruncatedEvent]:
        nonlocal now
        yield TruncatedEvent(3)
        for moment in ready_at:
            now = max(now, moment)
            yield TokenEvent(1)

    stamps = engine._round_times([stream([1, 2, 3]), stream([2, 3, 4])], 3)
    assert stamps == [2, 3, 4]


def test_a_prompt_measurement_leaves_no_session(side: RuntimeSide, runtime: Runtime) -> None:
    side.prepare(Case(30))
    assert side.measure(Case(30)) > 0
    assert _open_histories(runtime) == []


def test_prose_is_long_enough_for_a_verdict(runtime: Runtime) -> None:
    assert len(runtime.tokenizer.encode(prose())) >= 2_500


def test_uncounted_rounds_frame_the_counted_ones() -> None:
    assert LEAD_IN >= 1
    assert LEAD_OUT >= 2


def test_the_engine_is_checkpointed_group_by_group(
    default_model: Path, monkeypatch: pytest.MonkeyPatch, measure: Callable[..., Any]
) -> None:
    monkeypatch.setattr(engine, "launch", lambda *_: (1.0, 0.1))
    bench = Engine(model=str(default_model), window=64, threads=2, quick=True, repeats=1)
    measured = measure(bench)
    assert len(measured.work) == 3 + bench.plan().pieces_of_work(sides=1)
    assert [len(partial.decode) for partial in measured.checkpoints] == [0, 2, 3, 3]
    assert [len(partial.sampled) for partial in measured.checkpoints] == [0, 0, 0, 6]
    facts = measured.run.facts
    assert facts["runtime"]["capacity"] == facts["engine"]["capacity"] == bench.plan().most_sessions
    assert measured.results.memory.pool_bytes == facts["runtime"]["pool_bytes"]
    assert measured.results.peer is None
    assert measured.results.startup.ready_seconds.samples == (1.0,)


def test_settings_survive_a_trip_through_json() -> None:
    config = EngineConfig(
        cache=CacheConfig(2, 30, 5),
        capacity=7,
        numerics=Numerics.EXACT,
        dtype=DType.FLOAT32,
        weights=WeightFormat.INT8,
        kernels=KernelChoice.TORCH,
        threads=1,
    )
    again = from_json(EngineConfig, json.loads(json.dumps(asdict(config))))
    assert again == config
    assert isinstance(again.weights, WeightFormat)


def test_a_fresh_process_is_timed(default_model: Path) -> None:
    began = time.perf_counter()
    ready, first = launch(str(default_model), CONFIG)
    total = time.perf_counter() - began
    assert 0.1 < ready < total
    assert 0 < first < total - ready


def test_a_process_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="could not load the model: .*absent"):
        launch(str(tmp_path / "absent.gguf"), CONFIG)
    monkeypatch.setattr(startup.sys, "executable", "true")
    with pytest.raises(ConfigError, match="no message"):
        launch("any", CONFIG)
