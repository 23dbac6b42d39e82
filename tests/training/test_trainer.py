"""Training lowers the loss, and goes on after an interruption as if there had been none."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kakeya.errors import ConfigError, CorruptCheckpoint
from kakeya.loading import LoadedModel
from kakeya.models.checkpoint import Checkpoint
from kakeya.training import trainer as module
from kakeya.training.batches import Batches
from kakeya.training.conversations import Conversations
from kakeya.training.features import FeatureReader, FeatureStore, measure_standard
from kakeya.training.settings import NetworkSettings, TrainingSettings
from kakeya.training.trainer import Frame, Trainer
from kakeya.training.verifier import SharedParts, rotation_tables
from support.trainings import TRAINING

MakeTrainer = Callable[..., Trainer]


@pytest.fixture(scope="module")
def make_trainer(model: LoadedModel, conversations: Conversations, checkpoint: Checkpoint) -> MakeTrainer:
    reader = FeatureReader(model, (0, 1), 40)
    standard = measure_standard(reader, conversations.items)
    store = FeatureStore(reader, standard, conversations.items, [len(x.tokens) for x in conversations.items])
    shared = SharedParts.of(checkpoint, torch.device("cpu"), torch.float32)

    def make(settings: TrainingSettings = TRAINING, kind: str = "steps") -> Trainer:
        network = NetworkSettings(kind, block=4, layers=1)  # type: ignore[arg-type]
        config = network.config_for(checkpoint.config, checkpoint.fingerprint)
        rotations = rotation_tables(checkpoint.config, 80, torch.device("cpu"))
        frame = Frame(config, shared, standard, rotations, torch.float32)
        return Trainer(frame, settings, Batches(settings, [range(12)], lambda part: store))

    return make


@pytest.fixture(autouse=True)
def measured_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MEASURE_EVERY", 5)


@pytest.mark.parametrize("kind", ["steps", "block"])
def test_the_loss_falls(make_trainer: MakeTrainer, kind: str) -> None:
    told = list(make_trainer(kind=kind).run())
    assert [each.step for each in told] == [1, 6, 11, 16]
    assert told[-1].share == 1.0
    first, last = told[0].figures, told[-1].figures
    assert first is not None
    assert last is not None
    assert last.loss < 0.8 * first.loss
    assert len(last.acceptance) == (3 if kind == "steps" else 4)


def test_an_interrupted_training_goes_on_bit_for_bit(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    whole = make_trainer()
    list(whole.run())
    begun = make_trainer()
    for progress in begun.run(tmp_path / "saved"):
        if progress.step == 6:
            break
    resumed = make_trainer()
    resumed.resume(tmp_path / "saved")
    assert resumed.step == 6
    list(resumed.run(tmp_path / "saved"))
    assert resumed.step == whole.step
    for name, weight in whole.weights.items():
        assert torch.equal(weight, resumed.weights[name]), name
        assert torch.equal(whole.averaged[name], resumed.averaged[name]), name


def test_a_long_training_saves_itself_now_and_then(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SAVE_S", 0.0)
    trainer = make_trainer()
    training = trainer.run(tmp_path / "saved")
    next(training)
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "saved.partial").exists()


def test_a_run_begins_with_figures_wherever_it_begins(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.step = TRAINING.steps - 1  # type: ignore[operator]
    (last,) = trainer.run()
    assert last.figures is not None


def test_slow_steps_are_measured_more_often(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MEASURE_S", 0.0)
    assert [each.step for each in make_trainer(replace(TRAINING, steps=4)).run()] == [1, 2, 3, 4]


def test_a_compiled_loss_trains_alike(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    plain, compiled = make_trainer(), make_trainer(replace(TRAINING, compiled=True))
    for trainer in (plain, compiled):
        next(trainer.run())
    for name, weight in plain.weights.items():
        torch.testing.assert_close(compiled.weights[name], weight, atol=1e-4, rtol=1e-3)


def test_minutes_are_a_budget_too(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(replace(TRAINING, steps=None, minutes=0.01))
    told = list(trainer.run())
    assert told[-1].share == 1.0
    assert told[-1].seconds >= 0.6


def test_another_training_is_not_gone_on_with(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer().save(tmp_path / "saved")
    with pytest.raises(ConfigError, match="saved is of a training with batch 2, not 5"):
        make_trainer(replace(TRAINING, batch=5)).resume(tmp_path / "saved")
    with pytest.raises(ConfigError, match="saved is of a training with kind steps, not block"):
        make_trainer(kind="block").resume(tmp_path / "saved")


@pytest.mark.parametrize(
    "write, message",
    [
        (lambda path: path.write_bytes(b"nothing of the kind"), "saved cannot be read as a training"),
        (lambda path: torch.save({"step": 3}, path), "saved is not a saved training: averaged, identity"),
        (lambda path: torch.save(7, path), "saved is not a saved training"),
        (lambda path: None, "saved cannot be read as a training"),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path, write: Callable[[Path], object], message: str
) -> None:
    write(tmp_path / "saved")
    with pytest.raises(CorruptCheckpoint, match=message):
        make_trainer().resume(tmp_path / "saved")


def test_the_rate_rises_and_falls() -> None:
    rates = [module._rate(share) for share in (0.0, 0.01, 0.02, 0.5, 1.0)]
    assert rates[0] == pytest.approx(0.01)
    assert rates[1] == pytest.approx(0.5)
    assert rates[2] == pytest.approx(1.0)
    assert 0.4 < rates[3] < 0.6
    assert rates[4] == pytest.approx(0.02)
