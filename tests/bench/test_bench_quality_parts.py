"""The parts memory and recall over a tiny model, and the verb from the command line to the page."""

import json
import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from kakeya.bench import quality
from kakeya.bench.collection import Collection, Found, read_report
from kakeya.bench.collection_page import pictures, sections_of
from kakeya.bench.long_text import LongText, packaged_text
from kakeya.bench.quality import QualityBench
from kakeya.bench.quality_choices import ChoicesBench
from kakeya.bench.quality_memory import MemoryBench, nearest_to_default, surprises
from kakeya.bench.quality_memory_results import Way
from kakeya.bench.quality_recall import LEAD, RecallBench, talks
from kakeya.bench.report import Report
from kakeya.bench.work import Work
from kakeya.cli.bench_quality import QualityOptions
from kakeya.config import CacheConfig, EngineConfig
from kakeya.errors import ConfigError
from kakeya.runtime import Runtime
from support.cli import Run

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
MEMORY = MemoryBench(history_tokens=700, full_tokens=200, sliding_window=30, windows=(12, 28), far_tokens=400)
RECALL = RecallBench(Way(4, 300), distances=(16, 600), trials=2, seed=3)


@pytest.fixture(autouse=True)
def leave_the_process_as_it_was() -> Iterator[None]:
    """A runtime sets torch's threads and `main` gives SIGTERM a meaning, for the process; tests share it."""
    threads, on_sigterm = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, on_sigterm)


def unseen(share: float, label: str) -> None:
    """The progress of someone who does not look."""


def opened(model: Path, config: EngineConfig, sink: int, window: int) -> Runtime:
    return Runtime.open(str(model), replace(config, cache=CacheConfig(sink, window), capacity=1))


@pytest.fixture(scope="module")
def measured(chat_model: Path, tiny_engine: EngineConfig) -> tuple[Report, list[Report], list[Any]]:
    """A run of both parts: its report, its checkpoints and what was shown meanwhile."""
    bench = QualityBench(str(chat_model), tiny_engine, packaged_text(), memory=MEMORY, recall=RECALL)
    checkpoints: list[Report] = []
    shown: list[Any] = []
    report = quality.run(bench, lambda share, label: shown.append((share, label)), checkpoints.append)
    return report, checkpoints, shown


def test_a_text_is_scored_as_the_model_scores_it(chat_model: Path, tiny_engine: EngineConfig) -> None:
    with opened(chat_model, tiny_engine, 2, 30) as runtime:
        tokens = runtime.tokenizer.encode(packaged_text().text)[:150]
        counted: list[float] = []
        found = surprises(runtime, tokens, Work(150, lambda share, label: counted.append(share)))
        logprobs = runtime.score(tokens).double().log_softmax(-1)
        assert runtime.free_slabs == 1
    expected = [-float(logprobs[place, token]) for place, token in enumerate(tokens[1:])]
    assert found == pytest.approx(expected, abs=1e-5)
    assert counted[-1] == 1.0


def test_a_document_begins_as_the_model_expects(
    chat_model: Path, tiny_engine: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more token comes first, and the surprises are still those of the text but its first token."""
    with opened(chat_model, tiny_engine, 2, 30) as runtime:
        tokens = runtime.tokenizer.encode(packaged_text().text)[:20]
        encode = runtime.tokenizer.encode
        monkeypatch.setattr(
            runtime.tokenizer, "encode", lambda text, **how: [0, *encode(text)] if how else encode(text)
        )
        found = surprises(runtime, tokens, Work(1, unseen))
        logprobs = runtime.score([0, *tokens]).double().log_softmax(-1)
    expected = [-float(logprobs[place + 1, token]) for place, token in enumerate(tokens[1:])]
    assert found == pytest.approx(expected, abs=1e-5)


def test_every_way_reads_its_part_of_the_text(measured: tuple[Report, list[Report], list[Any]]) -> None:
    report, *_ = measured
    rows = report.results["memory"]["ways"]
    assert [row["way"] for row in rows] == ["full", "window 30", "4 + 12", "4 + 28"]
    assert [row["tokens"] for row in rows] == [200, 700, 700, 700]
    assert all(row["tokens_per_second"] > 0 and row["perplexity"] > 1 for row in rows)
    assert rows[1]["session_bytes"] < rows[0]["session_bytes"]
    assert len({row["perplexity"] for row in rows}) == 4
    assert report.results["memory"]["trained_tokens"] == 4096


def test_full_attention_forgets_nothing(
    measured: tuple[Report, list[Report], list[Any]], chat_model: Path, tiny_engine: EngineConfig
) -> None:
    with opened(chat_model, tiny_engine, 0, 1000) as runtime:
        tokens = runtime.tokenizer.encode(packaged_text().text)[:200]
        logprobs = runtime.score(tokens).double().log_softmax(-1)
    mean = sum(-float(logprobs[place, token]) for place, token in enumerate(tokens[1:])) / 199
    full = measured[0].results["memory"]["ways"][0]
    assert full["perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)


def test_far_stretches_are_read_again_afresh(
    measured: tuple[Report, list[Report], list[Any]], chat_model: Path, tiny_engine: EngineConfig
) -> None:
    fresh = measured[0].results["memory"]["fresh"]
    assert fresh["way"] == "4 + 28"
    assert [piece["from"] for piece in fresh["stretches"]] == [400]
    with opened(chat_model, tiny_engine, 0, 1000) as runtime:
        tokens = runtime.tokenizer.encode(packaged_text().text)[400 - 28 : 656]
        logprobs = runtime.score(tokens).double().log_softmax(-1)
    last = [-float(logprobs[place, token]) for place, token in enumerate(tokens[1:])][-256:]
    assert fresh["perplexity_fresh"] == pytest.approx(math.exp(sum(last) / 256), rel=1e-5)
    assert fresh["streamed_over_fresh"] != pytest.approx(1.0, abs=1e-6)


def test_numbers_are_asked_for_at_every_distance(measured: tuple[Report, list[Report], list[Any]]) -> None:
    rows = measured[0].results["recall"]["rows"]
    assert [(row["memory"], row["distance"]) for row in rows] == [
        (memory, distance) for memory in ("full", "bounded", "pinned") for distance in (16, 600)
    ]
    assert all(row["trials"] == 2 for row in rows)
    assert [row["within_window"] for row in rows] == [True, True, True, False, True, False]
    keys = [[answer["key"] for row in rows[at : at + 2] for answer in row["answers"]] for at in (0, 2, 4)]
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys[0])) == 4
    near, far = (rows[0]["answers"], rows[1]["answers"])
    assert all(answer["answer"] for answer in near + far)
    # Full attention and a window that holds everything answer alike.
    assert near == rows[2]["answers"]


def test_talks_say_ask_and_keep_their_distance(chat_model: Path, tiny_engine: EngineConfig) -> None:
    with opened(chat_model, tiny_engine, 4, 300) as runtime:
        tokens = runtime.tokenizer.encode(packaged_text().text)
        first, again = (list(talks(runtime, RECALL, tokens)) for _ in range(2))
        other = list(talks(runtime, replace(RECALL, seed=4), tokens))
        decode = runtime.tokenizer.decode
        assert first == again != other
        for talk in first:
            assert len(talk.prose) == talk.distance
            assert LEAD[0] <= len(talk.opening) <= LEAD[1]
            assert decode(talk.token_ids[: talk.pinned]).count(talk.key) == 2
            assert talk.key not in decode(talk.token_ids[talk.pinned :])
            assert decode(talk.token_ids).endswith("secret number is")
            assert talk.token_ids[talk.pinned : talk.pinned + talk.distance] == talk.prose


def test_only_the_pinned_memory_pins(
    chat_model: Path, tiny_engine: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[int | None] = []
    create = Runtime.create_session

    def noted(self: Runtime, **options: Any) -> str:
        pinned.append(options["pinned_prefix_tokens"])
        return create(self, **options)

    monkeypatch.setattr(Runtime, "create_session", noted)
    recall = replace(RECALL, distances=(16,), trials=1)
    quality.run(
        QualityBench(str(chat_model), tiny_engine, packaged_text(), recall=recall),
        unseen,
        lambda report: None,
    )
    assert pinned[:2] == [None, None]
    assert pinned[2] is not None
    assert pinned[2] > LEAD[0]


def test_the_report_grows_way_by_way(measured: tuple[Report, list[Report], list[Any]]) -> None:
    report, checkpoints, shown = measured
    assert all(partial.partial for partial in checkpoints)
    ways = [len(partial.results["memory"]["ways"]) for partial in checkpoints]
    assert ways == [1, 2, 3, 4, 4, 4, 4, 4]
    asked = [len(partial.results.get("recall", {"rows": []})["rows"]) for partial in checkpoints]
    assert asked == [0, 0, 0, 0, 0, 2, 4, 6]
    assert [partial.results["memory"]["fresh"] is None for partial in checkpoints][:5] == [True] * 4 + [False]
    shares = [share for share, _ in shown]
    assert all(earlier <= later for earlier, later in pairwise(shares))
    assert shares[-1] == 1.0
    assert {"memory: window 30", "recall: pinned"} <= {label for _, label in shown}
    assert not report.partial
    assert [gate.name for gate in report.gates] == ["perplexity_flat", "recall_lost_within_the_window"]


def test_the_report_says_what_was_read(measured: tuple[Report, list[Report], list[Any]]) -> None:
    config = measured[0].config
    assert config["text"]["file"] == "bench/data/galapagos.txt"
    assert config["text"]["tokens"] > 2500
    assert len(config["text"]["sha256"]) == 64
    assert config["memory"]["windows"] == (12, 28)
    assert config["recall"]["bounded"] == {"sink": 4, "window": 300, "full": False}
    assert "choices" not in config


def test_a_text_that_is_too_short_is_refused_before_anything_runs(
    chat_model: Path, tiny_engine: EngineConfig
) -> None:
    bench = QualityBench(str(chat_model), tiny_engine, LongText("Too short.", {}), memory=MEMORY)
    shown: list[str] = []
    with pytest.raises(ConfigError, match="history-tokens is 700, and the text has only .* --text FILE"):
        quality.run(bench, lambda share, label: shown.append(label), lambda report: None)
    assert shown == []


def test_the_verb_measures_everything_writes_and_draws(
    kakeya_verb: Run, chat_model: Path, tmp_path: Path
) -> None:
    output, drawing = tmp_path / "q.json", tmp_path / "q.svg"
    files = ("--output", str(output), "--picture", str(drawing))
    outcome = kakeya_verb("bench", "quality", "--model", str(chat_model), "--quick", "--threads", "1", *files)
    written = json.loads(output.read_text())
    assert set(written["results"]) == {"reference", "choices", "memory", "recall"}
    assert len(written["gates"]) == 4
    assert outcome.status == int(any(gate["passed"] is False for gate in written["gates"]))
    for words in ("Against float32 weights", "Perplexity; early", "Right answers", "perplexity_flat"):
        assert words in outcome.out
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")
    page = output.with_suffix(".html").read_text()
    assert page.count('aria-label="Perplexity by place in the history"') == 1
    assert page.count('aria-label="Recall by distance"') == 1
    assert str(chat_model.parent) not in output.read_text()
    assert read_report(output).to_dict() == written
    found = Found("q", read_report(output))
    assert len(sections_of(found)) == 3
    assert list(pictures(Collection((found,), {}))) == ["q"]


def test_one_part_reads_the_file_it_is_given(kakeya_verb: Run, chat_model: Path, tmp_path: Path) -> None:
    text, output = tmp_path / "mine.txt", tmp_path / "q.json"
    text.write_text("All work and no play makes a dull boy. " * 20)
    sizes = ("--history-tokens", "300", "--full-tokens", "64", "--sliding-window", "16", "--windows", "12,28")
    common = ("bench", "quality", "--model", str(chat_model), "--part", "memory", "--text", str(text))
    outcome = kakeya_verb(*common, *sizes, "--output", str(output), "--json")
    printed = json.loads(outcome.out)
    assert outcome.status == 0
    assert set(printed["results"]) == {"memory"}
    assert printed["config"]["text"]["file"] == "mine.txt"
    assert [row["tokens"] for row in printed["results"]["memory"]["ways"]] == [64, 300, 300, 300]


def test_a_long_history_over_a_short_file_is_refused(
    kakeya_verb: Run, chat_model: Path, tmp_path: Path
) -> None:
    text, output = tmp_path / "mine.txt", tmp_path / "q.json"
    text.write_text("Too short.")
    common = ("bench", "quality", "--model", str(chat_model), "--part", "memory", "--text", str(text))
    outcome = kakeya_verb(*common, "--output", str(output))
    assert outcome.status == 2
    assert "history-tokens is 131,072" in outcome.err
    assert not output.exists()


def test_without_a_file_the_book_is_asked_for(
    kakeya_verb: Run, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAKEYA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    outcome = kakeya_verb(
        "bench",
        "quality",
        "--model",
        str(chat_model),
        "--part",
        "recall",
        "--output",
        str(tmp_path / "q.json"),
    )
    assert outcome.status == 2
    assert "debian-handbook" in outcome.err
    assert "--text FILE" in outcome.err


def test_what_the_verb_asks_for_when_nothing_is_said() -> None:
    bench = QualityOptions().bench(packaged_text())
    assert bench.choices == ChoicesBench()
    assert bench.memory == MemoryBench()
    assert bench.recall == RecallBench(Way(4, 1020))
    assert bench.work > 1_000_000


def test_no_window_is_no_memory() -> None:
    with pytest.raises(ConfigError, match="at least one window"):
        nearest_to_default(())


def test_a_report_from_before_there_were_parts_is_still_shown() -> None:
    found = Found("quality-cpu", read_report(EVIDENCE / "quality-cpu.json"))
    (section,) = sections_of(found)
    assert section.table.title == "Against float32 weights of the same file"
    assert len(section.table.rows) > 10
    assert section.charts
    assert pictures(Collection((found,), {})) == {}
