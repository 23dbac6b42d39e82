"""`bench quality` over a tiny model, from the flags to the page, with a stand-in for llama.cpp."""

import importlib.util
import json
import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
import torch

from kakeya.bench.benchmark import Run, Work
from kakeya.bench.peers import llama
from kakeya.bench.peers.llama import LlamaProcess
from kakeya.bench.quality import measure
from kakeya.bench.quality.benchmark import PASSAGE_TOKENS, Part, QualityBench
from kakeya.bench.quality.measure import LEAD, compare, cut, surprises, talk, their_surprises
from kakeya.bench.quality.results import DEFAULT, Choice, QualityResults, Way, quality_gates
from kakeya.bench.report import read_report
from kakeya.bench.text import prose
from kakeya.config import CacheConfig, EngineConfig
from kakeya.errors import ConfigError
from kakeya.runtime import Runtime
from kakeya.types import DType, KernelChoice, Numerics, WeightFormat
from support.cli import Run as Verb

TINY_ENGINE = EngineConfig(
    numerics=Numerics.EXACT, dtype=DType.FLOAT32, weights=WeightFormat.FLOAT32, threads=1
)
# It finds every token equally likely among four.
WORKER = """
import json, math, sys
for line in sys.stdin:
    request = json.loads(line)
    scored = len(request.get("token_ids", [])) - 1
    opened = {"library": "stand-in 1", "system": str(request.get("threads"))}
    print(json.dumps(opened if request["do"] == "open" else [math.log(4)] * scored), flush=True)
"""


@dataclass(frozen=True)
class TinyBench(QualityBench):
    """A small history that is soon a long one, and bits that can be compared."""

    config: ClassVar[EngineConfig] = TINY_ENGINE  # type: ignore[misc]
    far_tokens: ClassVar[int] = 400


@pytest.fixture(autouse=True)
def leave_the_process_as_it_was() -> Iterator[None]:
    """A runtime sets torch's threads and `main` gives SIGTERM a meaning, for the process; tests share it."""
    threads, on_sigterm = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, on_sigterm)


@pytest.fixture(scope="module")
def bench(chat_model: Path) -> QualityBench:
    return TinyBench(
        model=str(chat_model),
        part=[Part.MEMORY, Part.RECALL],
        history_tokens=700,
        full_tokens=200,
        sliding_window=30,
        windows="12,300",
        distances="16,600",
        trials=2,
        seed=3,
    )


class Measured(Run[QualityResults]):
    """A run that keeps its checkpoints and what was shown."""

    def __init__(self) -> None:
        self.partial: list[QualityResults] = []
        self.shown: list[tuple[float, str]] = []
        super().__init__(lambda *seen: self.shown.append(seen), self.partial.append)


@pytest.fixture(scope="module")
def measured(bench: QualityBench) -> tuple[QualityResults, Measured]:
    run = Measured()
    return bench.run(run), run


def opened(model: Path, sink: int, window: int) -> Runtime:
    return Runtime.open(str(model), replace(TINY_ENGINE, cache=CacheConfig(sink, window), capacity=1))


def unseen() -> Work:
    return Work(1, lambda share, label: None)


def nats_of(runtime: Runtime, tokens: list[int]) -> list[float]:
    logprobs = runtime.score(tokens).double().log_softmax(-1)
    return [-float(logprobs[place, token]) for place, token in enumerate(tokens[1:])]


def test_a_text_is_scored_as_the_model_scores_it(chat_model: Path) -> None:
    with opened(chat_model, 2, 30) as runtime:
        tokens = runtime.tokenizer.encode(prose())[:150]
        counted: list[float] = []
        found = surprises(runtime, tokens, Work(150, lambda share, label: counted.append(share)))
        assert found == pytest.approx(nats_of(runtime, tokens), abs=1e-5)
        assert runtime.free_slabs == 1
    assert counted[-1] == 1.0


def test_a_document_begins_as_the_model_expects(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more token comes first, and the surprises are still those of the text but its first token."""
    with opened(chat_model, 2, 30) as runtime:
        tokens = runtime.tokenizer.encode(prose())[:20]
        encode = runtime.tokenizer.encode
        monkeypatch.setattr(
            runtime.tokenizer, "encode", lambda text, **how: [0, *encode(text)] if how else encode(text)
        )
        found = surprises(runtime, tokens, unseen())
        assert found == pytest.approx(nats_of(runtime, [0, *tokens])[1:], abs=1e-5)


def test_every_way_reads_its_part_of_the_text(measured: tuple[QualityResults, Measured]) -> None:
    memory = measured[0].memory
    assert memory is not None
    assert [row.way for row in memory.ways] == ["full", "window 30", "4 + 12", "4 + 300"]
    assert [row.tokens for row in memory.ways] == [200, 700, 700, 700]
    assert all((row.tokens_per_second or 0) > 0 and (row.perplexity or 0) > 1 for row in memory.ways)
    assert memory.ways[1].session_bytes < memory.ways[0].session_bytes
    assert len({row.perplexity for row in memory.ways}) == 4
    assert memory.trained_tokens == 4096


def test_full_attention_forgets_nothing_and_far_stretches_are_read_again_afresh(
    measured: tuple[QualityResults, Measured], chat_model: Path
) -> None:
    memory = measured[0].memory
    assert memory is not None
    assert memory.fresh is not None
    with opened(chat_model, 0, 1000) as runtime:
        tokens = runtime.tokenizer.encode(prose())
        whole = nats_of(runtime, tokens[:200])
        last = nats_of(runtime, tokens[400 - 300 : 656])[-256:]
    assert memory.ways[0].perplexity == pytest.approx(math.exp(sum(whole) / 199), rel=1e-5)
    assert memory.fresh.way == "4 + 300"
    assert [piece.at for piece in memory.fresh.stretches] == [400]
    assert memory.fresh.perplexity_fresh == pytest.approx(math.exp(sum(last) / 256), rel=1e-5)
    assert memory.fresh.streamed_over_fresh != pytest.approx(1.0, abs=1e-6)


def test_numbers_are_asked_for_at_every_distance(measured: tuple[QualityResults, Measured]) -> None:
    recall = measured[0].recall
    assert recall is not None
    assert [(row.memory, row.distance) for row in recall.rows] == [
        (memory, distance) for memory in ("full", "bounded", "pinned") for distance in (16, 600)
    ]
    assert [row.within_window for row in recall.rows] == [True, True, True, False, True, False]
    assert all(row.trials == 2 for row in recall.rows)
    keys = [[each.key for row in recall.rows[at : at + 2] for each in row.answers] for at in (0, 2, 4)]
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys[0])) == 4
    assert all(each.answer for row in recall.rows[:2] for each in row.answers)
    # Full attention and a window that holds everything answer alike.
    assert recall.rows[0].answers == recall.rows[2].answers


def test_talks_say_ask_and_keep_their_distance(chat_model: Path) -> None:
    with opened(chat_model, 4, 300) as runtime:
        tokens = runtime.tokenizer.encode(prose())
        decode, asked = runtime.tokenizer.decode, len(runtime.tokenizer.encode(measure.ASKED))
        for distance in (16, 600):
            said = talk(runtime, tokens, distance, "3")
            assert said == talk(runtime, tokens, distance, "3") != talk(runtime, tokens, distance, "4")
            assert len(said.token_ids) == said.pinned + distance + asked
            opening = said.pinned - (said.overhead - asked - measure.ANSWER_TOKENS)
            assert LEAD[0] <= opening <= LEAD[1]
            assert decode(said.token_ids[: said.pinned]).count(said.key) == 2
            assert said.key not in decode(said.token_ids[said.pinned :])
            assert decode(said.token_ids).endswith("secret number is")


def test_only_the_pinned_memory_pins(bench: QualityBench, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int | None] = []
    create = Runtime.create_session

    def noted(self: Runtime, **options: Any) -> str:
        pinned.append(options["pinned_prefix_tokens"])
        return create(self, **options)

    monkeypatch.setattr(Runtime, "create_session", noted)
    replace(bench, part=[Part.RECALL], distances="16", trials=1).run(Run())
    assert pinned[:2] == [None, None]
    assert (pinned[2] or 0) > LEAD[0]


def test_the_report_grows_way_by_way(measured: tuple[QualityResults, Measured]) -> None:
    results, run = measured
    memories = [each.memory for each in run.partial]
    assert [memory and len(memory.ways) for memory in memories] == [1, 2, 3, 4, 4, 4, 4, 4]
    assert [each.recall and len(each.recall.rows) for each in run.partial] == [*[None] * 5, 2, 4, 6]
    assert [memory is not None and memory.fresh is None for memory in memories[:5]] == [True] * 4 + [False]
    assert all(earlier <= later for (earlier, _), (later, _) in pairwise(run.shown))
    assert run.shown[-1][0] == 1.0
    assert {"memory: window 30", "recall: pinned"} <= {label for _, label in run.shown}
    names = [gate.name for gate in quality_gates(results)]
    assert names == ["perplexity_flat", "recall_lost_within_the_window"]
    text = run.facts["text"]
    assert (text["file"], len(text["sha256"])) == ("bench/data/galapagos.txt", 64)
    assert text["tokens"] > 2500
    assert "choices" not in run.facts


def test_text_is_cut_into_passages() -> None:
    assert cut([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]


def test_comparison_is_the_textbook_formula() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.7, 0.1]])
    passage = ([0, 2], p.log())
    expected = 0.5 * math.log(2.0) - 0.25 * math.log(2.0) + 0.1 * math.log(0.5) + 0.8 * math.log(8 / 7)
    for times in (1, 2):  # passages add up, and means stay
        scores = compare([passage] * times, [q.log() + 3.0] * times)  # logits are free up to a constant
        assert scores.positions == 2 * times
        assert scores.mean_kl == pytest.approx(expected / 2, rel=1e-5)
        assert scores.top1_agreement == 0.5
        assert scores.perplexity == pytest.approx(4.0, rel=1e-5)
    same = compare([passage], [p.log()])
    assert (same.mean_kl, same.top1_agreement) == (pytest.approx(0.0, abs=1e-6), 1.0)
    assert compare([], []).mean_kl is None


def test_choices_that_cannot_be_had_are_reported(
    default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Choice(DType.FLOAT32, WeightFormat.INT8, KernelChoice.NATIVE)
    real_open = Runtime.open

    def no_native(model: str, config: EngineConfig) -> Runtime:
        if config.kernels is KernelChoice.NATIVE:
            raise ConfigError("not built")
        return real_open(model, config)

    monkeypatch.setattr(measure.Runtime, "open", no_native)
    monkeypatch.setattr(QualityBench, "choices", [DEFAULT, refused])
    run = Measured()
    bench = QualityBench(model=str(default_model), part=[Part.CHOICES], quick=True, threads=2)
    results = bench.run(run)
    default, other = results.choices
    assert other.refused == "not built"
    assert default.decode is not None
    assert default.prompt is not None
    assert results.reference is not None
    assert default.decode.positions == default.prompt.positions == 48
    assert 0 < (default.decode.mean_kl or 0) < 0.1
    assert (default.decode.top1_agreement or 0) > 0.8
    assert default.decode.perplexity == pytest.approx(results.reference.perplexity, rel=0.1)
    assert [len(each.choices) for each in run.partial] == [1, 2]
    assert run.shown[0] == (0.0, "reference: float32 / float32 / torch")
    assert run.shown[-1] == (1.0, refused.label())
    assert run.facts["text"] is None, "none was read at length"
    assert all(gate.passed is None for gate in quality_gates(results))


# Beside llama.cpp.


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer in a process of its own that needs no llama.cpp and reads any model."""
    monkeypatch.setattr(measure, "LlamaProcess", partial(LlamaProcess, worker=("-c", WORKER)))
    for module in (measure, llama):
        monkeypatch.setattr(module, "require_llama", lambda path=None, *, asked_by: None)


class _Echo:
    """A peer that is surprised by every token as much as its number says."""

    def surprises(self, token_ids: list[int]) -> list[float]:
        return [float(token) for token in token_ids[1:]]


@pytest.mark.parametrize("start", [[], [90], [90, 91]])
def test_neither_what_a_document_begins_with_nor_the_first_token_counts(start: list[int]) -> None:
    shown: list[float] = []
    work = Work(10, lambda share, label: shown.append(share))
    echo: Any = _Echo()
    assert their_surprises(echo, start, [[1, 2, 3], [4, 5]], work) == [2.0, 3.0, 5.0]
    assert shown[-1] == 0.5


@pytest.mark.usefixtures("stand_in")
def test_every_file_is_read_by_both(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PASSAGE_TOKENS", 100)
    bench = TinyBench(model=str(chat_model), part=[Part.PEER], also=[chat_model], peer_tokens=250)
    run = Measured()
    results = bench.run(run)
    assert results.peer is not None
    first, second = results.peer.files
    assert first == second
    assert first.scored == 250 - 3
    assert first.llama_cpp == pytest.approx(4.0)
    assert (first.ours or 0) > 10
    assert (results.peer.library, results.peer.system) == ("stand-in 1", "1")
    assert [each.peer and len(each.peer.files) for each in run.partial] == [1, 2]
    assert run.shown[-1] == (1.0, f"{chat_model.name}: llama.cpp")
    assert [gate.passed for gate in quality_gates(results)] == [None, None]


@pytest.mark.usefixtures("stand_in")
def test_a_passage_forgets_nothing_of_itself(chat_model: Path) -> None:
    bench = TinyBench(model=str(chat_model), part=[Part.PEER], peer_tokens=150)
    [found] = measure.measure_peer(bench, unseen())
    with opened(chat_model, 0, 1000) as runtime:
        whole = nats_of(runtime, runtime.tokenizer.encode(prose())[:150])
    assert found["peer"].files[0].ours == pytest.approx(math.exp(sum(whole) / 149), rel=1e-5)
    assert PASSAGE_TOKENS > 150


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_llama_cpp_itself_finds_about_the_same(default_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PASSAGE_TOKENS", 100)
    bench = QualityBench(model=str(default_model), part=[Part.PEER], peer_tokens=200, threads=1)
    [found] = measure.measure_peer(bench, unseen())
    assert found["peer"].library.startswith("llama-cpp-python ")
    assert found["peer"].files[0].ours_over_llama_cpp == pytest.approx(1.0, abs=0.01)


# The flags.


def test_what_is_asked_for_when_nothing_is_said() -> None:
    bench = QualityBench()
    assert bench.parts == {Part.CHOICES, Part.MEMORY, Part.RECALL}
    assert len(bench.choices) > 20
    assert [way.label() for way in bench.ways] == [
        "full", "window 1,024", "4 + 252", "4 + 508", "4 + 1,020", "4 + 2,044",
    ]  # fmt: skip
    assert bench.judged == Way(4, 1020)
    assert bench.distances_asked == (128, 256, 512, 900, 1500, 3000, 6000)
    assert bench.work > 1_000_000
    assert QualityBench(part=[Part.PEER]).work == 6000
    assert QualityBench(part=[Part.PEER], also=[Path("a"), Path("b")], peer_tokens=100).work == 600


SHORT = {"history_tokens": 300, "distances": "32"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "history-tokens is 131,072, and the text has only 13,008 bytes; .* --text FILE"),
        ({**SHORT, "distances": "20000"}, "the longest distance is 20,000, and the text has only"),
        ({"text": Path("absent.txt")}, "cannot be read as UTF-8"),
        ({**SHORT, "history_tokens": 1}, "history_tokens must be at least 2, got 1"),
        ({**SHORT, "windows": "0"}, "window"),
        ({**SHORT, "windows": "many"}, "windows must be whole numbers with commas"),
        ({**SHORT, "windows": "60"}, "recall needs a memory of at least 256 tokens .* got 4 \\+ 60"),
        ({**SHORT, "distances": "0"}, "distances must be whole numbers from 1"),
        ({**SHORT, "trials": 0}, "trials must be at least 1, got 0"),
        ({**SHORT, "also": [Path("m.gguf")]}, "--also names files for the part peer"),
        ({"part": [Part.CHOICES]}, "--picture draws the part memory"),
        ({**SHORT, "threads": 0}, "threads"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_fetched(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QualityBench(**settings).check(picture=True)


def test_files_that_cannot_be_compared_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(llama, "find_spec", lambda name: object())
    there = tmp_path / "m.gguf"
    there.write_bytes(b"")
    bench = QualityBench(part=[Part.PEER], also=[there], peer_tokens=2)
    bench.check(picture=False)
    with pytest.raises(ConfigError, match=r"needs a model in one \.gguf file, .*some/directory"):
        replace(bench, also=[Path("some/directory")]).check(picture=False)
    with pytest.raises(ConfigError, match=r"there is none at .*absent\.gguf"):
        replace(bench, also=[tmp_path / "absent.gguf"]).check(picture=False)
    with pytest.raises(ConfigError, match="peer-tokens must be at least 2, got 1"):
        replace(bench, peer_tokens=1).check(picture=False)
    monkeypatch.setattr(llama, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--part peer needs llama.cpp"):
        bench.check(picture=False)


# The verb.


def test_the_verb_measures_everything_writes_and_draws(
    kakeya_verb: Verb, chat_model: Path, tmp_path: Path
) -> None:
    output, drawing = tmp_path / "q.json", tmp_path / "q.svg"
    files = ("--output", str(output), "--picture", str(drawing))
    outcome = kakeya_verb("bench", "quality", "--model", str(chat_model), "--quick", "--threads", "1", *files)
    written = json.loads(output.read_text())
    assert [
        name for name in ("reference", "choices", "memory", "recall") if not written["results"][name]
    ] == []
    assert written["results"]["peer"] is None
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


@pytest.mark.usefixtures("stand_in")
def test_the_verb_reads_beside_the_peer(kakeya_verb: Verb, chat_model: Path, tmp_path: Path) -> None:
    common = ("bench", "quality", "--model", str(chat_model), "--part", "peer", "--threads", "1", "--quick")
    outcome = kakeya_verb(*common, "--output", str(tmp_path / "q.json"))
    assert outcome.status == 0
    assert "Perplexity beside stand-in 1" in outcome.out


def test_one_part_reads_the_file_it_is_given(kakeya_verb: Verb, chat_model: Path, tmp_path: Path) -> None:
    text, output = tmp_path / "mine.txt", tmp_path / "q.json"
    text.write_text("All work and no play makes a dull boy. " * 20)
    sizes = ("--history-tokens", "300", "--full-tokens", "64", "--sliding-window", "16", "--windows", "12,28")
    common = ("bench", "quality", "--model", str(chat_model), "--part", "memory", "--text", str(text))
    outcome = kakeya_verb(*common, *sizes, "--output", str(output), "--json")
    printed = json.loads(outcome.out)
    assert outcome.status == 0
    assert [name for name in ("choices", "recall", "peer") if printed["results"][name]] == []
    assert printed["config"]["text"]["file"] == "mine.txt"
    assert [row["tokens"] for row in printed["results"]["memory"]["ways"]] == [64, 300, 300, 300]
    # More bytes than tokens are wanted, but fewer tokens.
    outcome = kakeya_verb(*common, "--history-tokens", "700", "--output", str(tmp_path / "r.json"))
    assert outcome.status == 2
    assert "history-tokens is 700, and the text has only" in outcome.err
    assert "tokens; ask for less" in outcome.err
    assert not (tmp_path / "r.json").exists()
