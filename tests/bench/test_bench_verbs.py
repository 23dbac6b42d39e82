"""The verbs of `kakeya bench`, from the command line to the exit status."""

import importlib.util
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kakeya.bench import engine
from kakeya.bench.benchmark import Benchmark
from kakeya.bench.peers import llama
from kakeya.bench.processes import ServerProcess
from kakeya.bench.registry import KINDS
from kakeya.bench.report import Report, at_most, now, write_report
from kakeya.cli import bench as verbs
from kakeya.models import catalogue
from support.cli import Run

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Benches that were asked for and not run."""
    asked: list[Benchmark[Any]] = []
    monkeypatch.setattr(verbs, "execute", lambda bench, *_: asked.append(bench) or 0)
    return asked


def test_a_conversation_is_written_printed_and_drawn(
    kakeya_verb: Run, tiny_server: ServerProcess, tmp_path: Path
) -> None:
    output, drawing = tmp_path / "s.json", tmp_path / "s.svg"
    talk = ("--turns", "10", "--max-tokens", "2", "--message-tokens", "6", "--tail-limit", "1000")
    server = ("--grpc-address", tiny_server.address, "--server-pid", str(tiny_server.pid))
    files = ("--output", str(output), "--picture", str(drawing))
    outcome = kakeya_verb("bench", "conversation", *talk, *server, *files, "--json")
    printed = json.loads(outcome.out)
    assert printed == json.loads(output.read_text())
    assert printed["kind"] == "conversation"
    assert printed["results"]["ways"][0]["n_turns"] == 10
    assert outcome.status == 0
    assert output.with_suffix(".html").read_text().startswith("<!doctype html>")
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")


def test_a_failed_gate_is_the_exit_status(
    kakeya_verb: Run, tiny_server: ServerProcess, tmp_path: Path
) -> None:
    talk = ("--turns", "10", "--max-tokens", "1", "--message-tokens", "1", "--tail-limit", "0.0001")
    files = ("--output", str(tmp_path / "s.json"))
    outcome = kakeya_verb("bench", "conversation", *talk, "--grpc-address", tiny_server.address, *files)
    assert outcome.status == 1
    assert "prefill_bounded" in outcome.out
    assert "failed" in outcome.out
    assert "medians of the first and last 20 turns" in outcome.out


@pytest.mark.usefixtures("on_shared_server")
def test_capacity_is_written_shown_and_drawn(kakeya_verb: Run, chat_model: Path, tmp_path: Path) -> None:
    output, drawing = tmp_path / "c.json", tmp_path / "c.svg"
    ramp = ("--levels", "1,2", "--window", "30", "--sink", "2", "--gen-tokens", "3", "--seed", "5")
    files = ("--output", str(output), "--picture", str(drawing))
    outcome = kakeya_verb("bench", "capacity", "--model", str(chat_model), *ramp, *files)
    assert "Agents at once" in outcome.out
    assert "wrong outputs" in outcome.out
    written = json.loads(output.read_text())
    assert [row["level"] for row in written["results"]["levels"]] == [1, 2]
    assert (written["config"]["levels"], written["config"]["numerics"]) == ("1,2", "exact")
    assert outcome.status == int(any(gate["passed"] is False for gate in written["gates"]))
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")


def test_engine_quick_prints_the_report_and_writes_it(
    kakeya_verb: Run, default_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "launch", lambda *_: (1.0, 0.1))
    output, drawing = tmp_path / "e.json", tmp_path / "e.svg"
    files = ("--output", str(output), "--picture", str(drawing))
    outcome = kakeya_verb("bench", "engine", "--quick", "--repeats", "1", "--json", *files)
    printed = json.loads(outcome.out)
    assert printed == json.loads(output.read_text())
    assert [row["tokens"] for row in printed["results"]["prompt"]] == [32]
    decodes = {(row["sessions"], row["history"]) for row in printed["results"]["decode"]}
    assert decodes == {(1, 16), (1, 64), (2, 16)}
    assert all(row["tokens_per_second"]["median"] > 0 for row in printed["results"]["decode"])
    assert outcome.status == int(any(gate["passed"] is False for gate in printed["gates"]))
    assert "kakeya, 64:" in "".join(ElementTree.parse(drawing).getroot().itertext())


def test_engine_beside_the_peer_shows_ratios(
    kakeya_verb: Run, default_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    monkeypatch.setattr(engine, "launch", lambda *_: (1.0, 0.1))
    output = tmp_path / "e.json"
    arguments = ("--quick", "--repeats", "1", "--peers", "--threads", "1", "--output", str(output))
    outcome = kakeya_verb("bench", "engine", *arguments)
    written = json.loads(output.read_text())
    assert all(row["ratio"] > 0 for row in written["results"]["prompt"] + written["results"]["decode"])
    assert written["results"]["peer"]["library"].startswith("llama-cpp-python")
    assert f"{written['results']['prompt'][0]['ratio']:.2f}x" in outcome.out
    assert str(output) in outcome.err


def test_an_absent_peer_is_refused_before_anything_is_loaded(
    kakeya_verb: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "find_spec", lambda name: None)
    monkeypatch.setattr(catalogue, "resolve", lambda *_: pytest.fail("a model was asked for"))
    outcome = kakeya_verb("bench", "engine", "--quick", "--peers", "--output", str(tmp_path / "e.json"))
    assert outcome.status == 2
    assert "pip install 'kakeya[peers]'" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_peer_of_a_conversation_is_refused_too(
    kakeya_verb: Run, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ways = ("--ways", "responses,llama", "--llama-server", "absent")
    outcome = kakeya_verb("bench", "conversation", "--model", str(chat_model), *ways)
    assert outcome.status == 2
    assert "needs a model in one .gguf file" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_presets_say_what_the_command_line_does_not(kakeya_verb: Run, asked: list[Any]) -> None:
    kakeya_verb("bench", "capacity")
    kakeya_verb("bench", "capacity", "--preset", "stress")
    kakeya_verb(
        "bench", "capacity", "--preset", "stress", "--window", "32", "--levels", "3", "--capacity", "2"
    )
    light, stress, changed = asked
    assert (light.sessions(), light.window, light.context_tokens()) == (256, 1024, 1028)
    assert (stress.sessions(), stress.window, stress.gen_tokens, stress.prompt_len) == (2048, 64, 8, 8)
    assert (changed.ramp(), changed.window, changed.sessions()) == ((3,), 32, 2)


def test_defaults_are_what_the_figures_were_made_with(kakeya_verb: Run, asked: list[Any]) -> None:
    kakeya_verb("bench", "overhead")
    kakeya_verb("bench", "conversation", "--ways", "chat,llama", "--duration-s", "9")
    overhead, conversation = asked
    assert (overhead.streams, overhead.tokens, overhead.history, overhead.limit) == (16, 96, 64, 0.95)
    assert (conversation.max_tokens, conversation.message_tokens, conversation.seed) == (64, 64, 0)
    assert (conversation.names(), conversation.ends()) == (["chat", "llama"], {"duration": 9.0})
    assert (conversation.tail_limit, conversation.flat_limit, conversation.rss_limit) == (1.05, 1.05, 1.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("conversation", "--turns", "0"), "turns must be above 0"),
        (("conversation", "--output", "s.txt"), "*.json"),
        (("conversation", "--ways", "shouting"), "ways must be some of grpc"),
        (("capacity", "--levels", "1,x"), "levels must be whole numbers"),
        (("capacity", "--levels", "4,2"), "levels must be rising"),
        (("capacity", "--capacity", "0", "--levels", "1"), "capacity must be"),
        (("overhead", "--streams", "0"), "streams must be at least 1"),
        (("overhead", "--threads", "0"), "threads must be"),
        (("engine", "--repeats", "0"), "repeats must be at least 1"),
        (("engine", "--longest-history", "63"), "longest-history must be at least 64"),
        (("engine", "--most-sessions", "0"), "most-sessions must be at least 1"),
        (("engine", "--window", "0"), "window must be"),
        (("report", "absent"), "looked for in a directory"),
        (("report", ".", "--output", "page.txt"), "must be named *.html"),
        (("report", ".", "--output", "no/page.html"), "needs an existing directory"),
        (("report", ".", "--pictures", "no"), "pictures need an existing directory"),
        (("report", "."), "there is no report"),
        *(((kind, "--picture", "p.png"), "must be named *.svg, got p.png") for kind in KINDS),
    ],
)
def test_bad_settings_are_refused(
    kakeya_verb: Run,
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(catalogue, "resolve", lambda *_: pytest.fail("a model was asked for"))
    outcome = kakeya_verb("bench", *arguments)
    assert outcome.status == 2
    assert message in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_report_makes_a_page_and_pictures(kakeya_verb: Run, tmp_path: Path) -> None:
    reports, drawings, page = tmp_path / "r", tmp_path / "d", tmp_path / "all.html"
    for place in (reports / "deep", drawings):
        place.mkdir(parents=True)
    committed = json.loads((EVIDENCE / "capacity-light.json").read_text())["results"]
    good = Report("capacity", {"model": "m"}, {}, committed, finished_at=now())
    write_report(reports / "deep" / "ramp.json", good, "")
    outcome = kakeya_verb("bench", "report", str(reports), "--output", str(page), "--pictures", str(drawings))
    assert outcome.status == 0
    assert "1 reports" in outcome.out
    assert "pictures: 1" in outcome.err
    assert '<h1 id="report-0">deep/ramp</h1>' in page.read_text()
    assert ElementTree.parse(drawings / "deep-ramp.svg").getroot().tag.endswith("svg")
    gate = at_most("errors", 1.0, 0, absent="")
    write_report(reports / "bad.json", Report("unheard", {}, {}, {}, (gate,), finished_at=now()), "")
    outcome = kakeya_verb("bench", "report", str(reports), "--output", str(page), "--json")
    assert outcome.status == 1
    told = json.loads(outcome.out)["reports"]
    assert [each["name"] for each in told] == ["bad", "deep/ramp"]
    assert [len(each["gates"]) for each in told] == [1, 0]
