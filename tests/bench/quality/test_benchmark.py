"""`bench quality` over a tiny model, from the flags to the page, with a stand-in for llama.cpp."""

import hashlib
import importlib.util
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
import torch

from kakeya.bench.benchmark import Work
from kakeya.bench.peers import llama
from kakeya.bench.peers.llama import LlamaProcess
from kakeya.bench.quality import benchmark, peer
from kakeya.bench.quality.benchmark import Part, QualityBench, QualityResults
from kakeya.bench.quality.choices import DEFAULT, Choice
from kakeya.bench.quality.memory import Way
from kakeya.bench.quality.scoring import surprises
from kakeya.bench.report import as_json, from_json, read_report
from kakeya.bench.text import prose
from kakeya.config import CacheConfig, EngineConfig
from kakeya.errors import ConfigError
from kakeya.runtime import Runtime
from kakeya.text.tokenizer import Tokenizer
from kakeya.types import DType, KernelChoice, Numerics, WeightFormat
from support.programs import Run as Verb

Measure = Callable[..., Any]
TINY_ENGINE = EngineConfig(
    numerics=Numerics.EXACT, dtype=DType.FLOAT32, weights=WeightFormat.FLOAT32, threads=1
)


@dataclass(frozen=True)
class TinyBench(QualityBench):
    """A small history that is soon a long one, and bits that can be compared."""

    config: ClassVar[EngineConfig] = TINY_ENGINE  # type: ignore[misc]
    far_tokens: ClassVar[int] = 400


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime sets torch's threads for the process; tests share it."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def bench(chat_model: Path) -> QualityBench:
    return TinyBench(
        model=str(chat_model),
        part=[Part.MEMORY],
        history_tokens=700,
        full_tokens=200,
        sliding_window=30,
        windows="12,300",
    )


@pytest.fixture(scope="module")
def measured(bench: QualityBench, measure: Measure) -> Any:
    return measure(bench)


def opened(model: Path, sink: int, window: int) -> Runtime:
    return Runtime.open(str(model), replace(TINY_ENGINE, cache=CacheConfig(sink, window), capacity=1))


def nats_of(runtime: Runtime, tokens: list[int]) -> list[float]:
    logprobs = runtime.score(tokens).double().log_softmax(-1)
    return [-float(logprobs[place, token]) for place, token in enumerate(tokens[1:])]


@pytest.fixture(params=[[], [7]])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What a document begins with: neither it nor the token behind it is scored."""
    encode = Tokenizer.encode

    def encoded(self: Tokenizer, text: str, *, bos: bool = False) -> list[int]:
        return [*(request.param if bos else ()), *encode(self, text)]

    monkeypatch.setattr(Tokenizer, "encode", encoded)
    return request.param  # type: ignore[no-any-return]


def test_a_text_is_scored_as_the_model_scores_it(chat_model: Path, start: list[int]) -> None:
    counted: list[float] = []
    with opened(chat_model, 2, 30) as runtime:
        tokens = runtime.tokenizer.encode(prose())[:150]
        found = surprises(runtime, tokens, Work(150, lambda share, label: counted.append(share)))
        assert found == pytest.approx(nats_of(runtime, [*start, *tokens])[len(start) :], abs=1e-5)
        assert runtime.free_slabs == 1
    assert counted[-1] == 1.0


def test_every_way_reads_its_part_of_the_text(measured: Any, chat_model: Path) -> None:
    memory = measured.results.memory
    assert [(row.way, row.tokens) for row in memory.ways] == [
        ("full", 200),
        ("window 30", 700),
        ("4 + 12", 700),
        ("4 + 300", 700),
    ]
    assert all((row.tokens_per_second or 0) > 0 and (row.perplexity or 0) > 1 for row in memory.ways)
    assert memory.ways[1].session_bytes < memory.ways[0].session_bytes
    assert len({row.perplexity for row in memory.ways}) == 4
    assert memory.trained_tokens == 4096
    # Full attention forgets nothing, and far stretches are read again afresh.
    with opened(chat_model, 0, 1000) as runtime:
        tokens = runtime.tokenizer.encode(prose())
        whole = nats_of(runtime, tokens[:200])
        last = nats_of(runtime, tokens[400 - 300 : 656])[-256:]
    assert memory.ways[0].perplexity == pytest.approx(math.exp(sum(whole) / 199), rel=1e-5)
    assert (memory.fresh.way, [piece.at for piece in memory.fresh.stretches]) == ("4 + 300", [400])
    assert memory.fresh.perplexity_fresh == pytest.approx(math.exp(sum(last) / 256), rel=1e-5)
    assert memory.fresh.streamed_over_fresh != pytest.approx(1.0, abs=1e-6)


def test_the_report_grows_way_by_way(measured: Any) -> None:
    memories = [each.memory for each in measured.checkpoints]
    assert [memory and len(memory.ways) for memory in memories] == [1, 2, 3, 4, 4]
    assert [memory is not None and memory.fresh is None for memory in memories[:5]] == [True] * 4 + [False]
    assert measured.shares == sorted(measured.shares)
    assert measured.shares[-1] == 1.0
    assert "memory: window 30" in measured.work
    assert list(measured.gates) == ["perplexity_flat"]
    text = measured.run.facts["text"]
    assert (text["file"], len(text["sha256"])) == ("bench/data/galapagos.txt", 64)
    assert text["tokens"] > 2500
    assert "choices" not in measured.run.facts
    assert from_json(QualityResults, as_json(measured.results)) == measured.results


def test_choices_that_cannot_be_had_are_reported(
    default_model: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Choice(DType.FLOAT32, WeightFormat.INT8, KernelChoice.NATIVE)
    real_open = Runtime.open

    def no_native(model: str, config: EngineConfig) -> Runtime:
        if config.kernels is KernelChoice.NATIVE:
            raise ConfigError("not built")
        return real_open(model, config)

    monkeypatch.setattr(Runtime, "open", no_native)
    monkeypatch.setattr(QualityBench, "choices", [DEFAULT, refused])
    found = measure(QualityBench(model=str(default_model), part=[Part.CHOICES], quick=True, threads=2))
    default, other = found.results.choices
    assert other.refused == "not built"
    assert default.held_as
    assert default.decode.positions == default.prompt.positions == 48
    assert 0 < (default.decode.mean_kl or 0) < 0.1
    assert (default.decode.top1_agreement or 0) > 0.8
    assert default.decode.perplexity == pytest.approx(found.results.reference.perplexity, rel=0.1)
    assert [len(each.choices) for each in found.checkpoints] == [1, 2]
    assert (found.shares[0], found.work[0]) == (0.0, "reference: float32 / float32 / torch")
    assert (found.shares[-1], found.work[-1]) == (1.0, refused.label())
    assert found.run.facts["text"] is None, "none was read at length"
    assert found.run.facts["choices"]["rows_at_once"] == {"prompt": 128, "decode": 8}
    assert [gate.passed for gate in found.gates.values()] == [None, None]
    assert from_json(QualityResults, as_json(found.results)) == found.results


def test_choices_read_passages_as_documents(chat_model: Path, start: list[int], measure: Measure) -> None:
    bench = QualityBench(model=str(chat_model), part=[Part.CHOICES], quick=True, threads=1)
    found = measure(bench).results
    with opened(chat_model, 4, 100) as runtime:
        text = [*start, *runtime.tokenizer.encode(prose())[:48]]
        expected = math.exp(statistics.fmean(nats_of(runtime, text)))
    assert found.reference.positions == len(text)
    assert found.reference.perplexity == pytest.approx(expected, rel=1e-3)


# A hundredth of its number is how much a token surprises it.
WORKER = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    opened = {"library": "stand-in 1", "system": str(request.get("threads"))}
    scored = [token / 100 for token in request.get("token_ids", [])]
    print(json.dumps(opened if request["do"] == "open" else scored[1:]), flush=True)
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer in a process of its own that needs no llama.cpp and reads any model."""
    monkeypatch.setattr(peer, "LlamaProcess", partial(LlamaProcess, worker=("-c", WORKER)))
    for module in (peer, benchmark):
        monkeypatch.setattr(module, "require_llama", lambda path=None, *, asked_by: None)


@pytest.mark.usefixtures("stand_in")
def test_every_file_is_read_by_both(
    chat_model: Path, start: list[int], measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "PASSAGE_TOKENS", 100)
    found = measure(TinyBench(model=str(chat_model), part=[Part.PEER], also=[chat_model], peer_tokens=250))
    first, second = found.results.peer.files
    assert first == second
    with opened(chat_model, 0, 1000) as runtime:
        tokens = runtime.tokenizer.encode(prose())[:250]
        passages = [tokens[at : at + 100] for at in (0, 100, 200)]
        ours = [nats for each in passages for nats in nats_of(runtime, [*start, *each])[len(start) :]]
    theirs = [token / 100 for passage in passages for token in passage[1:]]
    assert first.scored == len(ours) == len(theirs) == 250 - 3
    assert first.ours == pytest.approx(math.exp(sum(ours) / 247), rel=1e-5)  # and nothing is forgotten
    assert first.llama_cpp == pytest.approx(math.exp(sum(theirs) / 247))
    assert (found.results.peer.library, found.results.peer.system) == ("stand-in 1", "1")
    assert [each.peer and len(each.peer.files) for each in found.checkpoints] == [1, 2]
    assert (found.shares[-1], found.work[-1]) == (1.0, f"{chat_model.name}: llama.cpp")
    assert [gate.passed for gate in found.gates.values()] == [None]


@pytest.mark.usefixtures("stand_in")
def test_both_read_the_text_that_is_named(chat_model: Path, measure: Measure) -> None:
    text = Path("mine.txt")
    text.write_text("All work and no play makes a dull boy. " * 20)
    bench = TinyBench(model=str(chat_model), part=[Part.PEER], text=text)
    assert bench.work == 2 * 195
    found = measure(bench)
    with opened(chat_model, 0, 10) as runtime:
        tokens = runtime.tokenizer.encode(text.read_text())
    (row,) = found.results.peer.files
    passages = [tokens[at : at + peer.PASSAGE_TOKENS] for at in range(0, len(tokens), peer.PASSAGE_TOKENS)]
    assert row.llama_cpp == pytest.approx(
        math.exp(statistics.fmean(token / 100 for passage in passages for token in passage[1:]))
    )
    assert found.run.facts["text"] == {
        "file": "mine.txt",
        "sha256": hashlib.sha256(text.read_bytes()).hexdigest(),
        "characters": 780,
    }


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_llama_cpp_itself_finds_about_the_same(
    default_model: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "PASSAGE_TOKENS", 100)
    found = measure(QualityBench(model=str(default_model), part=[Part.PEER], peer_tokens=200, threads=1))
    assert found.results.peer.library.startswith("llama-cpp-python ")
    assert found.results.peer.files[0].ours_over_llama_cpp == pytest.approx(1.0, abs=0.01)


def test_what_is_asked_for_when_nothing_is_said() -> None:
    bench = QualityBench()
    assert bench.parts == {Part.CHOICES, Part.MEMORY}
    assert len(bench.choices) > 20
    assert QualityBench(default_choice=True).choices == bench.choices[:1]
    assert [way.label() for way in bench.ways] == [
        "full", "window 1,024", "4 + 252", "4 + 508", "4 + 1,020", "4 + 2,044",
    ]  # fmt: skip
    assert bench.judged == Way(4, 1020)
    assert bench.work > 1_000_000
    assert QualityBench(part=[Part.PEER]).work == 6000
    assert QualityBench(part=[Part.PEER], also=[Path("a"), Path("b")], peer_tokens=100).work == 600


SHORT = {"history_tokens": 300}
PEER = {"part": [Part.PEER, Part.MEMORY], "history_tokens": 300}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "history-tokens is 131,072, and the text has only 13,008 bytes; .* --text FILE"),
        ({"text": Path("absent.txt")}, "cannot be read as UTF-8"),
        ({"text": Path("empty.txt")}, "the text has only 0 bytes"),
        ({**SHORT, "history_tokens": 1}, "history-tokens must be at least 2, got 1"),
        ({**SHORT, "full_tokens": 1}, "full-tokens must be at least 2, got 1"),
        ({**SHORT, "windows": "0"}, "window"),
        ({**SHORT, "windows": "many"}, "windows must be whole numbers with commas"),
        ({**SHORT, "also": [Path("m.gguf")]}, "--also names files for the part peer"),
        ({**PEER, "default_choice": True}, "--default-choice limits the part choices"),
        ({"part": [Part.CHOICES]}, "--picture draws the part memory"),
        ({**SHORT, "threads": 0}, "threads"),
        ({**PEER, "also": [Path("some/directory")]}, r"needs a model in one \.gguf file, .*some/directory"),
        ({**PEER, "also": [Path("absent.gguf")]}, r"there is none at absent\.gguf"),
        ({**PEER, "peer_tokens": 1}, "peer-tokens must be at least 2, got 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_fetched(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "find_spec", lambda name: object())
    for name in ("there.gguf", "empty.txt"):
        Path(name).touch()
    QualityBench(**PEER, peer_tokens=2, also=[Path("there.gguf")]).check(picture=True)
    with pytest.raises(ConfigError, match=message):
        QualityBench(**settings).check(picture=True)


def test_a_text_that_no_part_would_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="--text is read by the parts memory and peer"):
        QualityBench(part=[Part.CHOICES], text=Path("mine.txt")).check(picture=False)


def test_a_missing_peer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--part peer needs llama.cpp"):
        QualityBench(part=[Part.PEER]).check(picture=False)


@pytest.fixture
def quality(kakeya_verb: Verb, chat_model: Path) -> Callable[..., Any]:
    return partial(kakeya_verb, "bench", "quality", "--model", str(chat_model), "--output", "q.json")


def test_the_verb_measures_everything_writes_and_draws(quality: Verb, chat_model: Path) -> None:
    outcome = quality("--quick", "--threads", "1", "--picture", "q.svg")
    written = json.loads(Path("q.json").read_text())
    assert all(written["results"][name] for name in ("reference", "choices", "memory"))
    assert written["results"]["peer"] is None
    assert len(written["gates"]) == 3
    assert outcome.status == int(any(gate["passed"] is False for gate in written["gates"]))
    for words in ("Against float32 weights", "Perplexity; early", "perplexity_flat"):
        assert words in outcome.out
    assert ElementTree.parse("q.svg").getroot().tag.endswith("svg")
    page = Path("q.html").read_text()
    assert page.count('aria-label="Perplexity by place in the history"') == 1
    assert str(chat_model.parent) not in Path("q.json").read_text()
    assert read_report(Path("q.json")).to_dict() == written


def test_one_part_reads_the_file_it_is_given(quality: Verb) -> None:
    Path("mine.txt").write_text("All work and no play makes a dull boy. " * 20)
    sizes = ("--history-tokens", "300", "--full-tokens", "64", "--sliding-window", "16", "--windows", "12,28")
    outcome = quality("--part", "memory", "--text", "mine.txt", *sizes, "--json")
    printed = json.loads(outcome.out)
    assert outcome.status == 0
    assert not any(printed["results"][name] for name in ("choices", "peer"))
    assert printed["config"]["text"]["file"] == "mine.txt"
    assert [row["tokens"] for row in printed["results"]["memory"]["ways"]] == [64, 300, 300, 300]
    Path("q.json").unlink()
    # More bytes than tokens are wanted, but fewer tokens.
    outcome = quality("--part", "memory", "--text", "mine.txt", "--history-tokens", "700")
    assert outcome.status == 2
    assert "history-tokens is 700, and the text has only" in outcome.err
    assert "tokens; ask for less" in outcome.err
    assert not Path("q.json").exists()
