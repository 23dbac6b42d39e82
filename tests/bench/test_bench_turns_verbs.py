"""The verbs that compare conversations and collect reports, from the command line to the exit status."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kakeya.bench import comparison, http_session, turns
from kakeya.bench.comparison import PeersBench
from kakeya.bench.comparison_results import comparison_rows
from kakeya.bench.gates import at_most
from kakeya.bench.http_session import HttpSessionBench
from kakeya.bench.http_session_results import http_session_results
from kakeya.bench.report import Report, now, write_report
from kakeya.bench.turns import TurnsBench
from kakeya.bench.turns_results import (
    LLAMA,
    MATCHED,
    RESPONSES,
    UNMATCHED,
    Answered,
    Turn,
    turns_results,
)
from kakeya.bench.turns_talk import Ends
from support.cli import Run

MACHINE = {"cpu": "any", "os": "any"}
SAID = [Turn(n, 1.0, Answered(0.2, 0.1, 10 * n, 2, 0)) for n in range(1, 13)]
TURNS = {"contestants": turns_results({RESPONSES: SAID, LLAMA: SAID}, 100), "software": {}}
SIDES = http_session_results({MATCHED: SAID, UNMATCHED: SAID}, 12.0, 8, 100)
ENGINE: dict[str, Any] = {
    "prompt": [],
    "decode": [],
    "peer": None,
    "memory": dict.fromkeys(
        ("before_open_bytes", "after_open_bytes", "after_warm_up_bytes", "at_end_bytes", "pool_bytes"), 1
    ),
    "startup": {"ready_seconds": None, "first_token_seconds": None},
}
PEERS = {"engine": ENGINE, "turns": TURNS, "comparison": comparison_rows(ENGINE, TURNS)}

Asked = list[Any]


@pytest.fixture(autouse=True)
def keep_sigterm() -> Iterator[None]:
    """`main` gives SIGTERM a meaning of its own, for the process; tests share theirs."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def faked(kind: str, results: dict[str, Any], asked: Asked, errors: float = 0) -> Callable[..., Report]:
    """A run that writes a checkpoint and ends with these results."""

    def run(bench: Any, progress: Callable[[float, str], None], checkpoint: Any) -> Report:
        asked.append(bench)
        progress(0.5, "half")
        part = Report(kind, {"model": "m"}, MACHINE, results)
        checkpoint(part)
        gate = at_most("errors", errors, 0, absent="")
        return Report(kind, part.config, MACHINE, results, (gate,), finished_at=now())

    return run


def test_turns_writes_prints_and_draws(
    kakeya_verb: Run, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TurnsBench] = []
    monkeypatch.setattr(turns, "run", faked("turns", TURNS, asked))
    output, drawing = tmp_path / "t.json", tmp_path / "t.svg"
    talk = ("--turns", "7", "--max-tokens", "3", "--message-tokens", "4", "--seed", "5", "--no-llama")
    files = ("--output", str(output), "--picture", str(drawing))
    model = ("--model", str(chat_model), "--window", "30", "--threads", "1")
    outcome = kakeya_verb(
        "bench", "turns", *model, *talk, *files, "--transformers-turns", "2", "--flat-limit", "1.5", "--json"
    )
    assert outcome.status == 0
    assert json.loads(outcome.out) == json.loads(output.read_text())
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")
    assert output.with_suffix(".html").exists()
    (bench,) = asked
    assert (bench.turns, bench.max_tokens, bench.message_tokens, bench.seed) == (7, 3, 4, 5)
    assert (bench.llama, bench.transformers_turns, bench.limit) == (False, 2, 1.5)
    assert (bench.ways, bench.model_path) == ((RESPONSES, MATCHED, UNMATCHED), str(chat_model))
    assert (bench.config.cache.window, bench.config.threads) == (30, 1)


def test_turns_shows_tables_and_fails_with_its_gates(
    kakeya_verb: Run, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TurnsBench] = []
    monkeypatch.setattr(turns, "run", faked("turns", TURNS, asked, errors=1))
    files = ("--output", str(tmp_path / "t.json"))
    ways = ("--no-llama", "--no-unmatched")
    outcome = kakeya_verb("bench", "turns", "--model", str(chat_model), *ways, *files)
    assert outcome.status == 1
    assert "medians of the first and last 20 turns" in outcome.out
    assert "Who took part" in outcome.out
    assert asked[0].ways == (RESPONSES, MATCHED)
    assert asked[0].turns == 200


def test_llama_is_asked_for_by_program(
    kakeya_verb: Run, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = kakeya_verb("bench", "turns", "--model", str(chat_model), "--llama-server", "absent")
    assert outcome.status == 2
    assert "needs a model in one .gguf file" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_http_session_writes_prints_and_draws(
    kakeya_verb: Run, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[HttpSessionBench] = []
    monkeypatch.setattr(http_session, "run", faked("http-session", SIDES, asked))
    output, drawing = tmp_path / "h.json", tmp_path / "h.svg"
    files = ("--model", str(chat_model), "--output", str(output), "--picture", str(drawing))
    outcome = kakeya_verb("bench", "http-session", *files, "--max-tokens", "3", "--tail-limit", "1.2")
    assert outcome.status == 0
    assert "One conversation over chat completions" in outcome.out
    assert json.loads(output.read_text())["kind"] == "http-session"
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")
    assert (asked[0].ends, asked[0].max_tokens, asked[0].limit) == (Ends(turns=100), 3, 1.2)
    ends = ("--duration-s", "9", "--target-history-tokens", "500")
    kakeya_verb("bench", "http-session", "--model", str(chat_model), "--output", str(output), *ends)
    assert asked[1].ends == Ends(None, 9.0, 500)


def test_peers_writes_prints_and_draws(
    kakeya_verb: Run, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PeersBench] = []
    monkeypatch.setattr(comparison, "run", faked("peers", PEERS, asked))
    monkeypatch.setattr(comparison, "require_peer", lambda path: None)
    monkeypatch.setattr(turns, "require_llama_server", lambda path, program: None)
    output, drawing = tmp_path / "p.json", tmp_path / "p.svg"
    files = ("--model", str(chat_model), "--output", str(output))
    quick = ("--quick", "--picture", str(drawing), "--llama-server", "some-program")
    outcome = kakeya_verb("bench", "peers", *files, *quick)
    assert outcome.status == 0
    assert "how many times as fast we are" in outcome.out
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")
    kakeya_verb("bench", "peers", *files, "--repeats", "2", "--transformers-turns", "0")
    first, second = asked
    assert (first.turns.turns, first.turns.transformers_turns, first.turns.llama_server) == (
        4,
        2,
        "some-program",
    )
    assert (second.turns.turns, second.turns.transformers_turns, second.turns.ways) == (100, 0, (RESPONSES,))
    assert second.engine.peers
    assert len(second.engine.plan.cases) > len(first.engine.plan.cases)
    assert second.engine.plan.repeats == 2


def test_report_makes_a_page_and_pictures(kakeya_verb: Run, tmp_path: Path) -> None:
    reports, drawings, page = tmp_path / "r", tmp_path / "d", tmp_path / "all.html"
    for place in (reports / "deep", drawings):
        place.mkdir(parents=True)
    good = Report("turns", {"model": "m"}, MACHINE, TURNS, finished_at=now())
    write_report(reports / "deep" / "talk.json", good, "")
    outcome = kakeya_verb("bench", "report", str(reports), "--output", str(page), "--pictures", str(drawings))
    assert outcome.status == 0
    assert "1 reports" in outcome.out
    assert "pictures: 1" in outcome.err
    assert '<h1 id="report-0">deep/talk</h1>' in page.read_text()
    assert ElementTree.parse(drawings / "deep-talk.svg").getroot().tag.endswith("svg")
    gate = at_most("errors", 1.0, 0, absent="")
    write_report(reports / "bad.json", Report("turns", {}, MACHINE, TURNS, (gate,), finished_at=now()), "")
    outcome = kakeya_verb("bench", "report", str(reports), "--output", str(page), "--json")
    assert outcome.status == 1
    assert [each["name"] for each in json.loads(outcome.out)["reports"]] == ["bad", "deep/talk"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("turns", "--turns", "0", "--no-llama"), "turns must be at least 1"),
        (("turns", "--output", "t.txt"), "must be named *.json"),
        (("http-session", "--duration-s", "0"), "duration-s must be above 0"),
        (("http-session", "--message-tokens", "0"), "message-tokens must be at least 1"),
        (("peers", "--repeats", "0"), "repeats must be at least 1"),
        (("report", "absent"), "looked for in a directory"),
        (("report", ".", "--output", "page.txt"), "must be named *.html"),
        (("report", ".", "--output", "no/page.html"), "needs an existing directory"),
        (("report", ".", "--pictures", "no"), "pictures need an existing directory"),
        (("report", "."), "there is no report"),
    ],
)
def test_bad_settings_are_refused(
    kakeya_verb: Run,
    chat_model: Path,
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    model = () if arguments[0] == "report" else ("--model", str(chat_model))
    outcome = kakeya_verb("bench", *arguments, *model)
    assert outcome.status == 2
    assert message in outcome.err
    assert list(tmp_path.iterdir()) == []
