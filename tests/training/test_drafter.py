"""From a model's name to a drafter's file: whole trainings of a tiny model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kakeya.errors import ConfigError
from kakeya.models.checkpoint import Checkpoint
from kakeya.models.drafter import read_drafter
from kakeya.training import drafter as module, trainer
from kakeya.training.conversations import Conversations, write_conversations
from kakeya.training.drafter import Request, train_drafter
from kakeya.training.report import Report
from kakeya.training.settings import DataSettings, NetworkSettings
from support.trainings import TRAINING, config_of

MakeRequest = Callable[..., Request]


@pytest.fixture(autouse=True)
def measured_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_MEASURE_EVERY", 5)


def quiet(stage: str, share: float, words: str) -> None:
    assert 0 <= share <= 1


def tokens_per_step(report: Report, examination: int) -> float:
    answers = report.examined[examination]["answers"]
    walked = [each["every_answer"] for each in answers if each["block"] == 4]
    return float(sum(each["tokens"] for each in walked) / sum(each["steps"] for each in walked))


def test_a_training_makes_a_drafter_that_guesses_better(
    request_for: MakeRequest, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EXAMINATIONS", 50)  # at the first step too
    request = request_for(training=replace(TRAINING, steps=50))
    stages: dict[str, float] = {}
    report = train_drafter(request, lambda stage, share, words: stages.__setitem__(stage, share))
    assert stages == {
        "writing": 1.0, "features of held-out conversations": 1.0, "features": 1.0, "training": 1.0
    }  # fmt: skip
    assert tokens_per_step(report, -1) > tokens_per_step(report, 0) + 0.1
    assert report.curve[-1]["loss"] < 0.5 * report.curve[0]["loss"]
    stored = read_drafter(request.output)
    stored.config.check_fits(checkpoint.config)
    assert stored.config.verifier == checkpoint.fingerprint
    assert stored.config.taps == (0, 1)
    assert stored.notes["command"] == "kakeya train drafter"
    assert stored.notes["licence"] == "that of the model it is for"
    acceptance = json.loads(stored.notes["acceptance"])
    assert [(each["temperature"], each["block"]) for each in acceptance] == [(0.0, 4)]
    assert not request.checkpoint_file.exists()
    whole = json.loads(request.report_file.read_text())
    assert whole["data"]["held_out"] == 1
    assert whole["data"]["by_temperature"] == {"0.0": 6, "0.7": 4, "1.0": 2}
    assert whole["drafter"]["parameters"] == sum(each.numel() for each in stored.tensors.values())
    assert set(whole["seconds"]) == {"writing", "features", "training"}


class Interrupted(Exception):
    pass


def interrupt_at(wanted: str, least: float) -> Callable[[str, float, str], None]:
    def tell(stage: str, share: float, words: str) -> None:
        if stage == wanted and share >= least:
            raise Interrupted

    return tell


@pytest.mark.parametrize("kind", ["steps", "block"])
def test_an_interrupted_training_makes_the_same_file(
    request_for: MakeRequest, conversations: Conversations, kind: str
) -> None:
    network = NetworkSettings(kind, block=4, layers=1)  # type: ignore[arg-type]
    request = request_for(network=network)
    write_conversations(request.data_file, conversations)
    train_drafter(request, quiet)
    again = replace(request, output=request.output.with_name("again"))
    with pytest.raises(Interrupted):
        train_drafter(again, interrupt_at("training", 0.5))
    assert again.checkpoint_file.exists()
    assert not again.output.exists()
    with pytest.raises(Interrupted):  # once more, when all but the last examination is done
        train_drafter(replace(again, resume=True), interrupt_at("training", 1.0))
    train_drafter(replace(again, resume=True), quiet)
    assert again.output.read_bytes() == request.output.read_bytes()


def test_conversations_alone_train_nothing(request_for: MakeRequest) -> None:
    request = request_for(only_write=True)
    assert not train_drafter(request, quiet).examined
    assert request.data_file.exists()
    assert not request.output.exists()


def test_a_short_block_is_examined_at_its_own_length(
    request_for: MakeRequest, conversations: Conversations
) -> None:
    request = request_for(network=NetworkSettings("block", block=3, layers=1))
    write_conversations(request.data_file, conversations)
    report = train_drafter(request, quiet)
    assert {each["block"] for each in report.examined[-1]["answers"]} == {3}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"output": Path("/nowhere/it")}, "/nowhere/it cannot be written: there is no directory /nowhere"),
        ({"writers": 0}, "writers must be at least 1, got 0"),
        ({"data": DataSettings(tokens=100)}, "conversations of 100 tokens need a window that holds them"),
    ],
)
def test_what_cannot_work_is_refused_first(
    request_for: MakeRequest, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        request_for(**changes)


def test_conversations_without_answers_teach_nothing(
    request_for: MakeRequest, conversations: Conversations
) -> None:
    request = request_for()
    silent = [replace(each, answers=each.answers & False) for each in conversations.items]
    write_conversations(request.data_file, replace(conversations, items=silent))
    with pytest.raises(ConfigError, match="of 12 conversations too few have answers"):
        train_drafter(request, quiet)


def test_features_leave_room_for_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(module, "free_memory", lambda device: 100 * 10**9)
    assert module._feature_budget(torch.device("cpu")) == 25 * 10**9
    assert module._feature_budget(torch.device("cuda")) == 84 * 10**9
    monkeypatch.setattr(module, "free_memory", lambda device: 20 * 10**9)
    assert module._feature_budget(torch.device("cuda")) == 5 * 10**9


def test_a_device_gets_large_steps(request_for: MakeRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from kakeya.types import BackendChoice

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    engine = config_of(backend=BackendChoice.CUDA, max_batch_tokens=None, prefill_block=None)
    assert module._engine_config(request_for(engine=engine)).step_tokens == 8192
