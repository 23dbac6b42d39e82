"""The verbs of `kakeya bench`, from the command line to the exit status."""

import importlib.util
import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from kakeya.bench import engine
from kakeya.bench.benchmark import Benchmark, Results, Run
from kakeya.bench.peers import llama
from kakeya.bench.processes import ServerProcess
from kakeya.bench.registry import KINDS
from kakeya.bench.report import Report, at_most, now
from kakeya.bench.startup import Launch
from kakeya.cli import bench as verbs
from kakeya.cli.bench import BenchScreen
from kakeya.models import catalogue
from support.programs import Run as Verb

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "launch", lambda *_: Launch(1.0, 0.1, chats=True))
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Benches that were asked for and not run."""
    asked: list[Benchmark[Any]] = []
    monkeypatch.setattr(verbs, "execute", lambda bench, *_: asked.append(bench) or 0)
    return asked


def words(picture: str) -> str:
    root = ElementTree.parse(picture).getroot()
    assert root.tag.endswith("svg")
    return "".join(root.itertext())


FILES = ("--output", "r.json", "--picture", "r.svg")
TALK = ("--max-tokens", "2", "--message-tokens", "6", "--turns", "10")


@pytest.mark.parametrize(("limit", "status"), [("1000", 0), ("0.0001", 1)])
def test_a_conversation_is_written_shown_and_drawn(
    kakeya_verb: Verb, tiny_server: ServerProcess, limit: str, status: int
) -> None:
    server = ("--grpc-address", tiny_server.address)  # without its pid nobody knows how busy others are
    outcome = kakeya_verb("bench", "conversation", *TALK, *server, *FILES, "--tail-limit", limit)
    written = json.loads(Path("r.json").read_text())
    assert (written["kind"], written["results"]["ways"][0]["n_turns"]) == ("conversation", 10)
    assert outcome.status == status, "a failed gate is the exit status"
    assert ("failed" in outcome.out) is bool(status)
    assert "prefill_bounded" in outcome.out
    assert "medians of the first and last 20 turns" in outcome.out
    assert Path("r.html").read_text().startswith("<!doctype html>")
    assert words("r.svg")


@pytest.mark.usefixtures("on_shared_server")
def test_capacity_is_written_shown_and_drawn(kakeya_verb: Verb, chat_model: Path) -> None:
    ramp = ("--levels", "1,2", "--window", "30", "--sink", "2", "--gen-tokens", "3", "--seed", "5")
    outcome = kakeya_verb("bench", "capacity", "--model", str(chat_model), *ramp, *FILES)
    assert "Agents at once" in outcome.out
    assert "wrong outputs" in outcome.out
    written = json.loads(Path("r.json").read_text())
    assert [row["level"] for row in written["results"]["levels"]] == [1, 2]
    assert (written["config"]["levels"], written["config"]["numerics"]) == ("1,2", "exact")
    assert outcome.status == int(any(gate["passed"] is False for gate in written["gates"]))
    assert words("r.svg")


def test_engine_quick_prints_the_report_and_writes_it(kakeya_verb: Verb, default_model: Path) -> None:
    outcome = kakeya_verb("bench", "engine", "--quick", "--repeats", "1", "--json", *FILES)
    printed = json.loads(outcome.out)
    assert printed == json.loads(Path("r.json").read_text())
    assert [row["tokens"] for row in printed["results"]["prompt"]] == [32]
    decodes = [(row["sessions"], row["history"]) for row in printed["results"]["decode"]]
    assert decodes == [(1, 16), (1, 64), (2, 16)]
    assert all(row["tokens_per_second"]["median"] > 0 for row in printed["results"]["decode"])
    assert outcome.status == int(any(gate["passed"] is False for gate in printed["gates"]))
    assert "kakeya, 64:" in words("r.svg")


def test_engine_beside_the_peer_shows_ratios(kakeya_verb: Verb, default_model: Path) -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    outcome = kakeya_verb("bench", "engine", "--quick", "--repeats", "1", "--peers", "--threads", "1", *FILES)
    results = json.loads(Path("r.json").read_text())["results"]
    assert all(row["ratio"] > 0 for row in results["prompt"] + results["decode"])
    assert results["peer"]["library"].startswith("llama-cpp-python")
    assert f"{results['prompt'][0]['ratio']:.2f}x" in outcome.out
    assert "r.json" in outcome.err


def test_presets_say_what_the_command_line_does_not(kakeya_verb: Verb, asked: list[Any]) -> None:
    kakeya_verb("bench", "capacity")
    kakeya_verb("bench", "capacity", "--preset", "stress")
    changes = ("--window", "32", "--levels", "3", "--capacity", "2")
    kakeya_verb("bench", "capacity", "--preset", "stress", *changes)
    light, stress, changed = asked
    assert (light.sessions(), light.window, light.context_tokens()) == (256, 1024, 1028)
    assert (stress.sessions(), stress.window, stress.gen_tokens, stress.prompt_len) == (2048, 64, 8, 8)
    assert (changed.ramp(), changed.window, changed.sessions()) == ((3,), 32, 2)


def test_a_quick_load_says_what_the_command_line_does_not(kakeya_verb: Verb, asked: list[Any]) -> None:
    kakeya_verb("bench", "load")
    kakeya_verb("bench", "load", "--quick", "--rates", "0.5,3", "--system", "common")
    full, quick = asked
    assert (full.seconds, full.first_token_s, full.gap_ms) == (30, 2, 60)
    assert full.system.series == ["none", "common"]
    assert (quick.ramp(), quick.seconds, quick.system.series) == ((0.5, 3.0), 3, ["common"])


def test_defaults_are_what_the_figures_were_made_with(kakeya_verb: Verb, asked: list[Any]) -> None:
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
        (("load", "--rates", "1,x"), "rates must be numbers with commas"),
        (("load", "--rates", "2,1"), "rates must be rising numbers above 0"),
        (("load", "--rates", "0,1"), "rates must be rising numbers above 0"),
        (("load", "--seconds", "0"), "seconds must be above 0"),
        (("load", "--gap-ms", "-1"), "gap-ms must be above 0"),
        (("load", "--answer-tokens", "8,0"), "must be at least 1, got 0"),
        (("load", "--prompt-tokens", "many"), "prompt-tokens must be whole numbers"),
        (("load", "--capacity", "0"), "capacity must be"),
        (("load", "--peers", "--backend", "cuda"), "llama.cpp is measured on the CPU"),
        (("overhead", "--streams", "0"), "streams must be at least 1"),
        (("overhead", "--threads", "0"), "threads must be"),
        (("engine", "--repeats", "0"), "repeats must be at least 1"),
        (("engine", "--longest-history", "63"), "longest-history must be at least 64"),
        (("engine", "--most-sessions", "0"), "most-sessions must be at least 1"),
        (("engine", "--window", "0"), "window must be"),
        (("engine", "--quick", "--peers"), "pip install 'kakeya[peers]'"),
        (("report", "absent"), "looked for in a directory"),
        (("report", ".", "--output", "page.txt"), "must be named *.html"),
        (("report", ".", "--output", "no/page.html"), "needs an existing directory"),
        (("report", ".", "--pictures", "no"), "pictures need an existing directory"),
        (("report", "."), "there is no report"),
        *(((kind, "--picture", "p.png"), "must be named *.svg, got p.png") for kind in KINDS),
    ],
)
def test_bad_settings_are_refused_before_anything_is_fetched(
    kakeya_verb: Verb,
    arguments: tuple[str, ...],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llama, "find_spec", lambda name: None)
    monkeypatch.setattr(catalogue, "resolve", lambda *_: pytest.fail("a model was asked for"))
    outcome = kakeya_verb("bench", *arguments)
    assert outcome.status == 2
    assert message in outcome.err
    assert list(folder.iterdir()) == []


def test_a_model_that_a_peer_cannot_read_is_refused(
    kakeya_verb: Verb, chat_model: Path, folder: Path
) -> None:
    ways = ("--ways", "responses,llama", "--llama-server", "absent")
    outcome = kakeya_verb("bench", "conversation", "--model", str(chat_model), *ways)
    assert outcome.status == 2
    assert "needs a model in one .gguf file" in outcome.err
    assert list(folder.iterdir()) == []


def test_report_makes_a_page_and_pictures(kakeya_verb: Verb, folder: Path) -> None:
    for place in ("r/deep", "drawings"):
        (folder / place).mkdir(parents=True)
    committed = json.loads((EVIDENCE / "capacity-light.json").read_text())["results"]
    good = Report("capacity", {"model": "m"}, {}, committed, finished_at=now())
    Path("r/deep/ramp.json").write_text(good.to_json())
    outcome = kakeya_verb("bench", "report", "r", "--output", "all.html", "--pictures", "drawings")
    assert outcome.status == 0
    assert "1 reports" in outcome.out
    assert "page: all.html, pictures: 1 in drawings" in outcome.err
    assert '<h1 id="report-0">deep/ramp</h1>' in Path("all.html").read_text()
    assert words("drawings/deep-ramp.svg")
    gates = (at_most("errors", 1.0, 0, absent=""),)
    Path("r/bad.json").write_text(Report("unheard", {}, {}, {}, gates, finished_at=now()).to_json())
    outcome = kakeya_verb("bench", "report", "r", "--json")
    assert outcome.status == 1, "a gate of one of them failed"
    told = json.loads(outcome.out)
    bad, ramp = told["reports"]
    assert (bad["name"], len(bad["gates"]), bad["model"]) == ("bad", 1, "–")
    assert (ramp["name"], ramp["gates"], ramp["kind"], ramp["model"]) == ("deep/ramp", [], "capacity", "m")
    assert (ramp["partial"], ramp["started_at"]) == (False, good.started_at)
    assert ramp["finished_at"] == good.finished_at
    assert told["passed_over"] == {}


def test_the_time_left_outlasts_long_quiet_phases() -> None:
    clock, terminal, screen = 0.0, io.StringIO(), BenchScreen()
    screen.err = Console(file=terminal, force_terminal=True, width=160, get_time=lambda: clock)
    quiet = verbs.SPEED_SECONDS - 200
    with screen.progress() as progress:
        work = Run[Results](progress).work(4)
        for piece in range(3):
            clock = piece * quiet
            work.piece(f"piece {piece}")
    last = terminal.getvalue().rpartition("left:")[2]
    # Half of four pieces is left, at 400 seconds each.
    assert "0:13:20" in last
    assert "piece 2" in last
