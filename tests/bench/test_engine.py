"""`bench engine`: what it concludes and shows, and its run over the real default model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kakeya.bench import engine
from kakeya.bench.cases import CHOICES, GREEDY, Case, Plan, Speeds
from kakeya.bench.engine import Engine, EngineResults, Memory, Startup, concluded, weights_on_disk
from kakeya.bench.page import report_page
from kakeya.bench.peers.llama import Peer
from kakeya.bench.report import Gate, Report, as_json, from_json
from kakeya.bench.startup import Launch
from kakeya.bench.stats import Samples
from kakeya.bench.tables import Table

PEER = Peer("l", "s", {}, 0.001)
MB = 2**20
MEMORY = Memory(100 * MB, 1000 * MB, 1100 * MB, pool_bytes=500 * MB, at_end_bytes=1105 * MB)
MEMORY = replace(MEMORY, file_bytes=10**9)
STARTUP = Startup(Samples((2.0, 9.0, 2.5)), Samples((0.1, 0.2, 0.3)), Samples((4.0, 9.0, 4.5)))


def results_of(
    ours: float = 300.0, theirs: float | None = None, kept: float = 1.0, **changes: Any
) -> EngineResults:
    """Of the full plan, with one speed for each side everywhere; `kept`: of greedy's speed by sampling."""
    speeds: Speeds = {}
    for case in (case for group in Plan.full().groups for case in group):
        speeds["kakeya", case] = [ours * (1 if case.choice in (None, GREEDY) else kept)] * 3
        if theirs is not None and not case.choice:
            speeds["llama.cpp", case] = [theirs, theirs]
    results = concluded(speeds, MEMORY, STARTUP, None if theirs is None else PEER)
    return replace(results, **({"bystanders_share": 0.01} | changes))


def gates_of(results: EngineResults, words: str) -> list[Gate]:
    found = [gate for gate in Engine().gates(results) if words in gate.name]
    assert found
    return found


def alone(results: EngineResults) -> EngineResults:
    return replace(results, decode=[row for row in results.decode if row.sessions == 1])


def test_every_case_carries_both_sides_and_their_ratio() -> None:
    speeds: Speeds = {("kakeya", case): [30.0, 10.0, 20.0] for group in Plan.quick().groups for case in group}
    speeds |= {("llama.cpp", case): [5.0, 5.0, 50.0] for _, case in speeds if not case.choice}
    results = concluded(speeds, MEMORY, STARTUP, PEER)
    row = results.decode[0]
    assert (row.sessions, row.history, row.ratio) == (1, 16, 4.0)
    assert row.tokens_per_second.median == 20.0
    assert row.peer_tokens_per_second == Samples((5.0, 5.0, 50.0))
    told = as_json(results)
    assert told["decode"][0]["ratio"] == 4.0
    assert from_json(EngineResults, told) == results
    del told["sampled"], told["peer"]["resident_bytes"]
    del told["memory"]["file_bytes"], told["startup"]["chat_seconds"]
    old = from_json(EngineResults, told)  # from before all of it was measured
    assert (old.sampled, old.memory.of_file, old.startup.chat_seconds.median) == ([], None, None)
    assert [gate.passed for gate in gates_of(old, "over its file")] == [None]
    assert [gate.passed for gate in gates_of(old, "`kakeya chat`")] == [None]


def test_a_checkpoint_holds_what_was_measured_so_far_ordered_for_reading() -> None:
    first = concluded({("kakeya", case): [1.0] for case in Plan.full().groups[0]}, MEMORY, STARTUP, None)
    assert [len(rows) for rows in (first.prompt, first.decode, first.sampled)] == [2, 0, 0]
    rows = [(row.sessions, row.history) for row in results_of().decode]
    one = [(1, history) for history in (64, 1024, 2048, 4096, 16384)]
    assert rows == one + [(sessions, history) for history in (64, 1024) for sessions in (8, 16, 32)]


def test_three_times_the_peer_passes_everything() -> None:
    gates = Engine().gates(results_of(300.0, 100.0))
    assert len(gates) == 22
    assert {gate.name: gate.passed for gate in gates if gate.passed is not True} == {
        "resident memory over llama.cpp's": None
    }


SLOW = Startup(Samples((3.01,)), Samples((1.1,)), Samples((5.01,)))


def loaded(file_mb: int, taken_mb: int) -> EngineResults:
    """A model in a file of so many MB, which takes so many in memory."""
    after = MEMORY.before_open_bytes + MEMORY.pool_bytes + taken_mb * 10**6
    return results_of(memory=replace(MEMORY, after_open_bytes=after, file_bytes=file_mb * 10**6))


PEERS = "over llama.cpp's"


def beside(theirs: int | None) -> EngineResults:
    return results_of(1.0, 1.0, peer=replace(PEER, our_cpu_share=0.2, resident_bytes=theirs))


@pytest.mark.parametrize(
    ("results", "words", "passed", "reason"),
    [
        (results_of(), "ratio to", None, "--peers"),
        (results_of(300.0, 1.0, bystanders_share=0.6), "ratio to", None, "others used 60%"),
        (results_of(300.0, 1.0, bystanders_share=0.6), "others used", False, ""),
        (results_of(300.0, 100.0, bystanders_share=None), "others used", None, ""),
        (results_of(300.0, 100.0, bystanders_share=None), "ratio to", True, ""),
        (results_of(1.19, 1.0), "ratio to", False, ""),
        (results_of(decode=[]), "16,384 over 2,048", None, "both histories"),
        (results_of(kept=0.97), "greedy's speed", True, ""),
        (results_of(kept=0.969), "greedy's speed", False, ""),
        (results_of(kept=0.0), "greedy's speed", None, "not measured"),
        (results_of(sampled=[]), "greedy's speed", None, "not measured"),
        (results_of(bystanders_share=0.5), "greedy's speed", None, "others used 50%"),
        (results_of(memory=replace(MEMORY, at_end_bytes=1111 * MB)), "memory, end", True, ""),
        (results_of(memory=replace(MEMORY, at_end_bytes=1112 * MB)), "memory, end", False, ""),
        (beside(9999), "while the peer is timed", False, ""),
        (beside(9999), PEERS, None, "--most-sessions 1"),
        *((alone(beside(theirs * MB)), PEERS, theirs >= 1105, "") for theirs in (1200, 1105, 1000)),
        (alone(beside(None)), PEERS, None, ""),
        (results_of(), "launch", True, "2.5 is at most 3"),  # the median
        (results_of(startup=SLOW), "launch", False, ""),
        (replace(loaded(2200, 1), startup=SLOW), "launch", True, "3.01 is at most 6"),
        (results_of(), "`kakeya chat`", True, "4.5 is at most 5"),
        (results_of(startup=SLOW), "`kakeya chat`", False, ""),
        (loaded(1100, 1209), "over its file", True, ""),
        (loaded(1100, 1211), "over its file", False, ""),
        (loaded(100, 300), "over its file", None, "from 1 GB on"),
        (results_of(memory=replace(MEMORY, after_open_bytes=None)), "over its file", None, "not measured"),
        (results_of(startup=SLOW), "first token", False, ""),
    ],
)
def test_gates_pass_fail_or_say_why_they_do_not_judge(
    results: EngineResults, words: str, passed: bool | None, reason: str
) -> None:
    for gate in gates_of(results, words):
        assert gate.passed is passed
        assert reason in gate.reason


def test_sampling_is_judged_repetition_by_repetition() -> None:
    """The machine was slow while the second repetition ran: it says the same of both."""
    greedy, otherwise = Case(0, 1, 64, 8, GREEDY), Case(0, 1, 64, 8, "top-p")
    speeds: Speeds = {("kakeya", greedy): [100.0, 20.0, 100.0], ("kakeya", otherwise): [98.0, 19.6, 30.0]}
    rows = concluded(speeds, MEMORY, STARTUP, None).sampled
    assert [row.of_greedy for row in rows] == [1.0, pytest.approx(0.98)]
    gates = gates_of(results_of(), "greedy's speed")
    sampled = [choice for choice in CHOICES if choice != GREEDY]
    cases = [Case(0, sessions, 64, choice=choice) for sessions in (1, 16, 32) for choice in sampled]
    assert [gate.name for gate in gates] == [f"{case.label()}, part of greedy's speed" for case in cases]


def test_tables_show_what_was_measured() -> None:
    shown = [each for each in Engine.show(results_of(300.0, 100.0, 0.985)) if isinstance(each, Table)]
    speed, sampled, memory, start = (table.cells for table in shown)
    assert speed[0] == ["prompt of 128", "300", "100", "3.00x"]
    assert sampled[0] == ["decode, 1 session at history 64, greedy", "300", "1.000"]
    assert sampled[-1] == ["decode, 32 sessions at history 64, top-p and penalty", "296", "0.985"]
    assert memory == [["100.0", "1,000.0", "1,100.0", "1,105.0", "500.0", "953.7"]]
    assert start == [["2.50", "0.20", "4.50"]]
    alone, *_ = (each for each in Engine.show(results_of(0.0)) if isinstance(each, Table))
    assert alone.cells[0] == ["prompt of 128", "–"], "no peer, and no measurement"


@pytest.mark.parametrize("theirs", [100.0, None])
def test_the_page_draws_every_kind_of_speed(theirs: float | None) -> None:
    page = report_page("t", Report("engine", {}, {}), Engine.show(results_of(300.0, theirs)))
    assert page.count("<svg") == 5  # prompts, one session, sessions at two histories, sampled
    assert ("llama.cpp, 4,096: 100 tokens/s" in page) is (theirs is not None)


def test_the_engine_is_checkpointed_group_by_group(
    default_model: Path, monkeypatch: pytest.MonkeyPatch, measure: Callable[..., Any]
) -> None:
    monkeypatch.setattr(engine, "launch", lambda *_: Launch(1.0, 0.1, True))
    monkeypatch.setattr(engine, "chat", lambda *_: 2.0)
    bench = Engine(model=str(default_model), window=64, threads=2, quick=True, repeats=1)
    measured = measure(bench)
    assert len(measured.work) == 3 + bench.plan().pieces_of_work(sides=1, repeats=1)
    assert [len(partial.decode) for partial in measured.checkpoints] == [0, 2, 3, 3]
    assert [len(partial.sampled) for partial in measured.checkpoints] == [0, 0, 0, 6]
    facts = measured.run.facts
    assert facts["runtime"]["capacity"] == facts["engine"]["capacity"] == bench.plan().sessions_at_once()
    assert facts["runtime"]["share_beginnings"] == "off", "or prompts would be copied, not computed"
    assert measured.results.memory.pool_bytes == facts["runtime"]["pool_bytes"]
    assert measured.results.peer is None
    assert measured.results.memory.file_bytes == default_model.stat().st_size
    assert measured.results.startup.ready_seconds.samples == (1.0,)
    assert measured.results.startup.chat_seconds.samples == (2.0,)


def test_a_model_without_a_chat_template_has_no_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "launch", lambda *_: Launch(1.0, 0.1, False))
    startup = Engine(model="any")._startup(2)
    assert startup.ready_seconds.samples == (1.0, 1.0)
    assert startup.chat_seconds.samples == ()


def test_all_parts_of_a_model_count(tmp_path: Path) -> None:
    for name in (
        "a-00001-of-00002.gguf",
        "a-00002-of-00002.gguf",
        "b.gguf",
        "b.safetensors",
        "c.safetensors",
    ):
        (tmp_path / name).write_bytes(b"x" * 10)
    sizes = [weights_on_disk(tmp_path / name) for name in ("a-00001-of-00002.gguf", "b.gguf", "")]
    assert sizes == [20, 10, 20]
