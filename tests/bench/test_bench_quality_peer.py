"""Perplexity beside llama.cpp's: the arithmetic, the run with a stand-in for the peer, and the verb."""

import importlib.util
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kakeya.bench import peers, quality, quality_peer
from kakeya.bench.collection import Found, read_report
from kakeya.bench.collection_page import sections_of
from kakeya.bench.long_text import packaged_text
from kakeya.bench.peers import PeerProcess
from kakeya.bench.quality import QualityBench
from kakeya.bench.quality_peer import OurReading, PeerBench, check_files, their_surprises
from kakeya.bench.quality_peer_page import peer_table
from kakeya.bench.quality_peer_results import SCORED_NEEDED, peer_gates, peer_row, standard_error
from kakeya.bench.quality_results import Part
from kakeya.bench.report import Report
from kakeya.bench.work import Work
from kakeya.cli.bench_quality import QualityOptions
from kakeya.config import CacheConfig, EngineConfig
from kakeya.errors import ConfigError
from support.cli import Run

# It finds every token equally likely among four.
WORKER = """
import json, math, sys
for line in sys.stdin:
    request = json.loads(line)
    scored = len(request.get("token_ids", [])) - 1
    opened = {"library": "stand-in 1", "system": str(request.get("threads"))}
    reply = opened if request["do"] == "open" else {"surprises": [math.log(4)] * scored}
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer in a process of its own that needs no llama.cpp and reads any model."""
    monkeypatch.setattr(quality_peer, "PeerProcess", partial(PeerProcess, worker=("-c", WORKER)))
    monkeypatch.setattr(quality_peer, "require_peer", lambda path=None, *, asked_by: None)


def results(ours: float, theirs: float, scored: int = SCORED_NEEDED) -> dict[str, Any]:
    row = peer_row("m.gguf", "Q4_K", [math.log(ours)] * scored, [math.log(theirs)] * scored)
    return {"library": "stand-in 1", "files": [row]}


def test_a_row_has_both_perplexities_and_their_ratio() -> None:
    (row,) = results(12.0, 10.0)["files"]
    assert (row["file"], row["held_as"], row["scored"]) == ("m.gguf", "Q4_K", SCORED_NEEDED)
    assert row["ours"] == pytest.approx(12.0)
    assert row["llama_cpp"] == pytest.approx(10.0)
    assert row["ours_over_llama_cpp"] == pytest.approx(1.2)


def test_the_error_is_that_of_the_mean_of_differences() -> None:
    row = peer_row("m.gguf", "Q4_K", [1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 3.0, 3.0])
    assert row["standard_error"] == pytest.approx(math.sqrt(1 / 3) / 2)
    assert standard_error([0.1]) is None


@pytest.mark.parametrize(
    ("ours", "passed"), [(10.0, True), (10.049, True), (9.951, True), (10.051, False), (9.949, False)]
)
def test_either_direction_is_too_far(ours: float, passed: bool) -> None:
    (gate,) = peer_gates(results(ours, 10.0))
    assert gate.passed is passed
    assert gate.name == "m.gguf: perplexity apart from llama.cpp's"


def test_little_text_is_not_judged() -> None:
    (gate,) = peer_gates(results(20.0, 10.0, SCORED_NEEDED - 1))
    assert gate.passed is None
    assert gate.reason == "needs 450 scored tokens, got 449"


def test_a_perplexity_that_is_no_number_is_not_judged() -> None:
    row = peer_row("m.gguf", "Q4_K", [1000.0] * SCORED_NEEDED, [1.0] * SCORED_NEEDED)
    (gate,) = peer_gates({"files": [row]})
    assert gate.passed is None
    assert gate.reason == "a perplexity is no number"
    assert peer_table({"library": "stand-in 1", "files": [row]}).rows[0][3] == "–"


def test_the_table_has_a_line_for_each_file() -> None:
    table = peer_table(results(12.0, 10.0))
    assert table.title == "Perplexity beside stand-in 1"
    assert list(table.rows) == [("m.gguf", "Q4_K", "450", "12.0000", "10.0000", "1.20000", "0.00000")]


class _Echo:
    """A peer that is surprised by every token as much as its number says."""

    def surprises(self, token_ids: list[int]) -> list[float]:
        return [float(token) for token in token_ids[1:]]


@pytest.mark.parametrize("start", [[], [90], [90, 91]])
def test_neither_what_a_document_begins_with_nor_the_first_token_counts(start: list[int]) -> None:
    read = OurReading("m.gguf", "Q4_K", start, [[1, 2, 3], [4, 5]], [])
    shown: list[float] = []
    work = Work(10, lambda share, label: shown.append(share))
    assert their_surprises(_Echo(), read, work) == [2.0, 3.0, 5.0]  # type: ignore[arg-type]
    assert shown[-1] == 0.5


@pytest.mark.usefixtures("stand_in")
def test_every_file_is_read_by_both(chat_model: Path, tiny_engine: EngineConfig) -> None:
    peer = PeerBench(also=(str(chat_model),), passage_tokens=100, most_tokens=250)
    bench = QualityBench(str(chat_model), tiny_engine, packaged_text(), peer=peer)
    checkpoints: list[Report] = []
    shown: list[tuple[float, str]] = []
    report = quality.run(bench, lambda *seen: shown.append(seen), checkpoints.append)
    first, second = report.results["peer"]["files"]
    assert first == second
    assert first["scored"] == 250 - 3
    assert first["llama_cpp"] == pytest.approx(4.0)
    assert first["ours"] > 10
    assert report.results["peer"]["library"] == "stand-in 1"
    assert report.results["peer"]["system"] == "1"
    assert [len(partial.results["peer"]["files"]) for partial in checkpoints] == [1, 2]
    assert report.config["peer"]["passage_tokens"] == 100
    assert shown[-1] == (1.0, f"{chat_model.name}: llama.cpp")
    assert [gate.passed for gate in report.gates] == [None, None]


@pytest.mark.usefixtures("stand_in")
def test_a_passage_forgets_nothing_of_itself(chat_model: Path, tiny_engine: EngineConfig) -> None:
    """The window follows the passage, whatever the engine was set to."""
    found = []
    for window in (30, 200):
        config = replace(tiny_engine, cache=CacheConfig(sink=0, window=window))
        (measured,) = quality_peer.measure(
            str(chat_model), config, PeerBench(most_tokens=150), Work(1, lambda *_: None)
        )
        found.append(measured["files"][0]["ours"])
    assert found[0] == found[1]


@pytest.mark.usefixtures("stand_in")
def test_the_verb_writes_a_report_that_can_be_collected(
    kakeya_verb: Run, chat_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "q.json"
    common = ("bench", "quality", "--model", str(chat_model), "--part", "peer", "--threads", "1")
    outcome = kakeya_verb(*common, "--quick", "--output", str(output))
    written = json.loads(output.read_text())
    assert outcome.status == 0
    assert set(written["results"]) == {"peer"}
    assert "Perplexity beside stand-in 1" in outcome.out
    (section,) = sections_of(Found("q", read_report(output)))
    assert section.table.title == "Perplexity beside stand-in 1"
    assert str(chat_model.parent) not in output.read_text()


def test_an_absent_peer_is_said_before_anything_runs(
    kakeya_verb: Run, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    output = tmp_path / "q.json"
    common = ("bench", "quality", "--model", str(chat_model), "--part", "peer", "--output", str(output))
    outcome = kakeya_verb(*common)
    assert outcome.status == 2
    assert "--part peer needs llama.cpp" in outcome.err
    assert not output.exists()


def test_files_that_cannot_be_compared_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: object())
    (tmp_path / "m.gguf").write_bytes(b"")
    check_files([str(tmp_path / "m.gguf")])
    with pytest.raises(ConfigError, match=r"needs a model in one \.gguf file, .*some/directory"):
        check_files(["some/directory"])
    with pytest.raises(ConfigError, match=r"there is none at .*absent\.gguf"):
        check_files([str(tmp_path / "absent.gguf")])


def test_files_for_a_part_that_was_not_asked_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="--also names files for the part peer"):
        QualityOptions(also=[Path("m.gguf")]).check()


def test_the_peer_is_there_only_when_asked_for() -> None:
    assert QualityOptions().bench(packaged_text()).peer is None
    asked = QualityOptions(part=[Part.PEER], peer_tokens=600, also=[Path("m.gguf")])
    assert asked.bench(packaged_text()).peer == PeerBench(("m.gguf",), most_tokens=600)


def test_one_token_cannot_be_scored() -> None:
    with pytest.raises(ConfigError, match="peer-tokens must be at least 2, got 1"):
        PeerBench(most_tokens=1)


def test_work_counts_both_readers_and_every_file() -> None:
    assert PeerBench(("a", "b"), most_tokens=100).work == 600
    assert PeerBench().work == 6000


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_llama_cpp_itself_finds_about_the_same(default_model: Path) -> None:
    bench = PeerBench(passage_tokens=100, most_tokens=200)
    (measured,) = quality_peer.measure(
        str(default_model), EngineConfig(threads=1), bench, Work(1, lambda *_: None)
    )
    assert measured["library"].startswith("llama-cpp-python ")
    assert measured["files"][0]["ours_over_llama_cpp"] == pytest.approx(1.0, abs=0.01)
