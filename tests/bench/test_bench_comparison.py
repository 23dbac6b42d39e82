"""`bench peers`: two benchmarks made into one report."""

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from kakeya.bench import comparison
from kakeya.bench.comparison import PeersBench, run
from kakeya.bench.comparison_page import comparison_page, comparison_picture, comparison_table
from kakeya.bench.comparison_results import comparison_rows
from kakeya.bench.engine import EngineBench
from kakeya.bench.gates import at_most
from kakeya.bench.plan import Plan, quick_plan
from kakeya.bench.report import Report, now
from kakeya.bench.turns import TurnsBench
from kakeya.bench.turns_results import LLAMA, RESPONSES, TRANSFORMERS, Answered, Turn, turns_results
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError


def samples(median: float) -> dict[str, Any]:
    return {"median": median, "min": median, "max": median, "samples": [median]}


def work(ours: float, theirs: float, **what: int) -> dict[str, Any]:
    speeds = {"tokens_per_second": samples(ours), "peer_tokens_per_second": samples(theirs)}
    return {**what, **speeds, "ratio": ours / theirs}


MEMORY = dict.fromkeys(("before_open_bytes", "after_open_bytes", "after_warm_up_bytes", "at_end_bytes"), 1)
ENGINE = {
    "prompt": [work(900.0, 300.0, tokens=128)],
    "decode": [work(150.0, 100.0, sessions=1, history=64)],
    "peer": {"our_cpu_share": 0.0},
    "memory": {**MEMORY, "pool_bytes": 1},
    "startup": {"ready_seconds": samples(1.0), "first_token_seconds": samples(0.1)},
}


def said(count: int, latency_s: float) -> list[Turn]:
    return [Turn(n, 1.0, Answered(latency_s, None, 10 * n, 2, 0)) for n in range(1, count + 1)]


TALK = {RESPONSES: said(30, 0.2), LLAMA: said(20, 0.5), TRANSFORMERS: said(10, 4.0)}
TURNS = {"contestants": turns_results(TALK, 100), "software": {}}
MACHINE = {"cpu": "any", "os": "any"}


def test_every_work_has_a_row_with_ratios() -> None:
    rows = {row["work"]: row for row in comparison_rows(ENGINE, TURNS)}
    assert list(rows) == [
        "prompt of 128",
        "decode, 1 session at history 64",
        "a turn, first turns of each",
        "a turn, last turns of each",
        "a turn, the last ones that both did",
    ]
    assert rows["prompt of 128"] == {
        "work": "prompt of 128",
        "unit": "tokens/s",
        "ours": 900.0,
        LLAMA: 300.0,
        TRANSFORMERS: None,
        "over": {LLAMA: 3.0, TRANSFORMERS: None},
    }
    first = rows["a turn, first turns of each"]
    assert [first["ours"], first[LLAMA], first[TRANSFORMERS]] == [200.0, 500.0, 4000.0]
    over = rows["a turn, the last ones that both did"]["over"]
    assert over == {LLAMA: pytest.approx(2.5), TRANSFORMERS: pytest.approx(20.0)}


def test_who_was_not_there_is_a_dash() -> None:
    alone = {"contestants": turns_results({RESPONSES: TALK[RESPONSES]}, 100)}
    rows = comparison_table({"comparison": comparison_rows(ENGINE, alone)}).rows
    assert rows[0] == ("prompt of 128", "tokens/s", "900", "300", "–", "3.00x", "–")
    assert rows[2] == ("a turn, first turns of each", "ms", "200", "–", "–", "–", "–")
    assert rows[4][2:] == ("–",) * 5


PLAN: Plan = quick_plan(1)


def bench_of(path: str = "m.gguf") -> PeersBench:
    talk = TurnsBench("m", path, EngineConfig(), llama=False)
    return PeersBench(EngineBench("m", EngineConfig(), PLAN, peers=True), talk)


@pytest.fixture(autouse=True)
def peers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def require(path: str) -> None:
        if not path.endswith(".gguf"):
            raise ConfigError("--peers needs a model in one .gguf file")

    monkeypatch.setattr(comparison, "require_peer", require)


def test_the_model_must_suit_the_peers() -> None:
    with pytest.raises(ConfigError, match=r"one \.gguf file"):
        bench_of("directory")


def test_both_parts_become_one_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine_run(bench: EngineBench, announce: Any, checkpoint: Any) -> Report:
        for piece in range(bench.pieces_of_work):
            announce(f"piece {piece}")
        part = Report("engine", {"model": "m"}, MACHINE, ENGINE)
        checkpoint(part)
        return replace(part, gates=(at_most("speed", 1.0, 2, absent=""),), finished_at=now())

    def turns_run(bench: TurnsBench, progress: Any, checkpoint: Any) -> Report:
        progress(0.0, "turn 1")
        progress(1.0, "turn 2")
        part = Report("turns", {"turns": 2}, MACHINE, TURNS)
        checkpoint(part)
        return replace(part, gates=(at_most("flat", 3.0, 2, absent=""),), finished_at=now())

    monkeypatch.setattr(comparison.engine, "run", engine_run)
    monkeypatch.setattr(comparison.turns, "run", turns_run)
    seen: list[float] = []
    checkpoints: list[Report] = []
    report = run(bench_of(), lambda done, work: seen.append(done), checkpoints.append)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 1.0)
    assert max(seen[:-2]) < 0.5
    assert [sorted(partial.results) for partial in checkpoints] == [
        ["engine"],
        ["comparison", "engine", "turns"],
    ]
    assert all(partial.partial and comparison_page(partial) for partial in checkpoints)
    assert not report.partial
    assert report.exit_status == 1
    assert [gate.name for gate in report.gates] == ["engine: speed", "turns: flat"]
    assert report.config == {"engine": {"model": "m"}, "turns": {"turns": 2}}
    page = comparison_page(report)
    assert "how many times as fast we are" in page
    assert page.index("how many times") < page.index("Latency, medians") < page.index("Speed, tokens/s")
    for drawn in (report, *checkpoints):
        ElementTree.fromstring(comparison_picture(drawn.results))
