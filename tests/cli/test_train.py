"""`kakeya train drafter`: settings from flags, progress, what it shows and what it refuses."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kakeya.cli import train
from kakeya.cli.console import Screen
from kakeya.models.drafter import read_drafter
from kakeya.training import trainer
from kakeya.training.settings import DataSettings, NetworkSettings
from support.programs import Run
from support.tiny import write_chat_model


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


@pytest.fixture
def small(chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The flags of a training that takes a second."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(trainer, "_MEASURE_EVERY", 2)
    yield [
        "train", "drafter", "--model", str(chat_model), "--output", str(tmp_path / "it"), "--threads", "1",
        "--conversations", "8", "--conversation-tokens", "32", "--steps", "4", "--batch", "2",
        "--anchors", "4",
    ]  # fmt: skip
    torch.set_num_threads(threads)


def test_it_trains_and_shows_what_came_out(run: Run, small: list[str], tmp_path: Path) -> None:
    outcome = run(*small, "--licence", "ours")
    assert outcome.status == 0, outcome.err
    assert outcome.out == f"{tmp_path / 'it'}\n"
    assert "writing: 100%" in outcome.err
    assert "training: 100%, step 4, loss" in outcome.err
    assert "tokens per step" in outcome.err
    stored = read_drafter(tmp_path / "it")
    assert stored.config.kind == "steps"
    assert stored.notes["licence"] == "ours"
    report = json.loads((tmp_path / "it.json").read_text())
    assert report["settings"]["steps"] == 4
    assert report["settings"]["unroll"] == 6
    assert (tmp_path / "it.conversations").exists()


def test_conversations_alone(run: Run, small: list[str], tmp_path: Path) -> None:
    data = tmp_path / "kept"
    outcome = run(*small, "--only-write", "--data", str(data))
    assert outcome.status == 0, outcome.err
    assert outcome.out == f"{data}\n"
    assert not (tmp_path / "it").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--minutes", "1"], "either --steps or --minutes is the budget, not both"),
        (["--kind", "both"], "kind must be steps or block, got 'both'"),
        (["--conversations", "3"], "conversations must be at least 8, got 3"),
        (["--backend", "cuda"], "there is no CUDA device"),
        (["--backend", "mlx"], "training does not run on mlx; choose --backend cpu or cuda"),
        (["--output", "/nowhere/it"], "there is no directory /nowhere"),
        (["--sessions", "0"], "sessions must be at least 1, got 0"),
        (["--openings", "/nowhere/it"], "the openings cannot be read from /nowhere/it: "),
    ],
)
def test_wrong_settings_are_one_line(run: Run, small: list[str], flags: list[str], message: str) -> None:
    outcome = run(*small, *flags)
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1
    assert message in outcome.err


def test_a_resume_of_nothing_is_refused(run: Run, small: list[str]) -> None:
    outcome = run(*small, "--resume")
    assert outcome.status == 2
    assert "there is no training to go on with" in outcome.err


def test_minutes_and_defaults(small: list[str], tmp_path: Path) -> None:
    asked = train.DrafterOptions(output=tmp_path / "it", minutes=2.0)
    request = train._request(asked)
    assert (request.training.steps, request.training.minutes) == (None, 2.0)
    assert (request.training.batch, request.training.anchors, request.engine.capacity) == (8, 32, 16)
    assert train._request(train.DrafterOptions(output=tmp_path / "it")).training.steps == 3000


def test_openings_and_the_network_are_as_told(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("Was ist\n\n  Wie \n")
    asked = train.DrafterOptions(
        output=tmp_path / "it", openings=tmp_path / "words", width=64, draft_vocab=100
    )
    request = train._request(asked)
    assert request.data.openings == ("Was ist", "Wie")
    assert request.network == NetworkSettings(width=64, draft_vocab=100)
    assert train._request(train.DrafterOptions(output=tmp_path / "it")).data == DataSettings()


def test_a_terminal_gets_bars(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with train._stages(Screen()) as tell:
        tell("writing", 0.5, "a line")
        tell("writing", 1.0, "another line")
    assert "another line" in capsys.readouterr().err


def test_lines_come_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    tell = train._Lines(Screen(), every_s=3600)
    for share in (0.0, 0.1, 0.2, 1.0):
        tell("writing", share, "words")
    tell("training", 0.0, "more words")
    assert capsys.readouterr().err.splitlines() == [
        "writing: 0%, words", "writing: 100%, words", "training: 0%, more words"
    ]  # fmt: skip


def test_what_was_not_measured_is_a_dash() -> None:
    assert train._two_digits(None) == "-"
    assert train._two_digits(1.234) == "1.23"


def test_training_is_imported_when_it_is_wanted() -> None:
    import subprocess
    import sys

    program = "import sys, kakeya.cli.train; assert not any('kakeya.training' in m for m in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
