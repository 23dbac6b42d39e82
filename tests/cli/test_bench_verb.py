import importlib.util
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kakeya.bench import engine, peers
from kakeya.bench.engine_results import Startup
from support.cli import Run


@pytest.fixture(autouse=True)
def start_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting fresh processes is tested where it is done; here it would only take time."""
    monkeypatch.setattr(engine, "measure_startup", lambda *_, **__: Startup((1.0,), (0.1,)))


def test_engine_quick_prints_the_report_and_writes_it(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "e.json"
    drawing = tmp_path / "e.svg"
    outputs = ("--output", str(output), "--picture", str(drawing))
    outcome = run("bench", "engine", "--quick", "--repeats", "1", "--json", *outputs)
    printed = json.loads(outcome.out)
    assert printed == json.loads(output.read_text())
    assert printed["kind"] == "engine"
    assert printed["partial"] is False
    assert [row["tokens"] for row in printed["results"]["prompt"]] == [32]
    assert {(row["sessions"], row["history"]) for row in printed["results"]["decode"]} == {
        (1, 16),
        (1, 64),
        (2, 16),
    }
    assert all(row["tokens_per_second"]["median"] > 0 for row in printed["results"]["decode"])
    assert outcome.status == int(any(gate["passed"] is False for gate in printed["gates"]))
    assert output.with_suffix(".html").read_text().startswith("<!doctype html>")
    assert "kakeya, 64:" in "".join(ElementTree.parse(drawing).getroot().itertext())


def test_engine_beside_the_peer_shows_ratios(run: Run, tmp_path: Path) -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    output = tmp_path / "e.json"
    arguments = ("--quick", "--repeats", "1", "--peers", "--threads", "1", "--output", str(output))
    outcome = run("bench", "engine", *arguments)
    written = json.loads(output.read_text())
    assert all(row["ratio"] > 0 for row in written["results"]["prompt"] + written["results"]["decode"])
    assert written["results"]["peer"]["library"].startswith("llama-cpp-python")
    assert "llama.cpp" in outcome.out
    assert f"{written['results']['prompt'][0]['ratio']:.2f}x" in outcome.out
    assert str(output) in outcome.err
    assert outcome.status == int(any(gate["passed"] is False for gate in written["gates"]))


def test_quality_quick_shows_the_default_choice(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "q.json"
    part = ("--part", "choices")
    outcome = run("bench", "quality", *part, "--quick", "--threads", "2", "--output", str(output))
    assert outcome.status == 0
    assert "the reference" in outcome.out
    assert "not judged" in outcome.out
    written = json.loads(output.read_text())
    assert written["config"]["engine"]["threads"] == 2
    assert len(written["results"]["choices"]) == 1


def test_absent_peer_is_refused_before_anything_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    outcome = run("bench", "engine", "--quick", "--peers", "--output", str(tmp_path / "e.json"))
    assert outcome.status == 2
    assert "pip install 'kakeya[peers]'" in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("engine", "--repeats", "0"), "repeats must be at least 1"),
        (("engine", "--longest-history", "63"), "longest-history must be at least 64"),
        (("engine", "--most-sessions", "0"), "most-sessions must be at least 1"),
        (("engine", "--output", "report.txt"), "*.json"),
        (("quality", "--output", "no/such/folder/q.json"), "existing directory"),
        (("quality", "--threads", "0"), "threads must be"),
        (("quality", "--windows", "252,many"), "windows must be whole numbers"),
        (("quality", "--windows", "0"), "window must be"),
        (("quality", "--history-tokens", "1"), "history_tokens must be at least 2"),
        (("quality", "--distances", "0"), "distances must be"),
        (("quality", "--trials", "0"), "trials must be"),
        (("quality", "--windows", "100", "--part", "recall"), "at least 256 tokens"),
        (("quality", "--part", "recall", "--picture", "p.svg"), "the part memory"),
        (("quality", "--text", "no-such-file.txt"), "cannot be read"),
        (("engine", "--window", "0"), "window must be"),
    ],
)
def test_bad_settings_are_refused(run: Run, arguments: tuple[str, ...], message: str) -> None:
    outcome = run("bench", *arguments)
    assert outcome.status == 2
    assert message in outcome.err
