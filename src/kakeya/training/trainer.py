"""The training loop: batches to gradients to weights, and the checkpoint from which it goes on."""

import math
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from kakeya.errors import ConfigError, CorruptCheckpoint
from kakeya.models.drafter import DrafterConfig
from kakeya.training.batches import Batches, examples, margin_of
from kakeya.training.distillation import Figures, compiled_by_logits, loss_gradient
from kakeya.training.network import Network, Standard, drafted_states, new_weights
from kakeya.training.optimizer import Optimizer, follow
from kakeya.training.settings import TrainingSettings
from kakeya.training.verifier import SharedParts

_WARM_UP = 0.02
_LEAST_RATE = 0.02
_MEASURE_EVERY = 25
_MEASURE_S = 10.0  # sooner where steps take long
_SAVE_S = 45.0
_SAVED = {"identity", "step", "seconds", "weights", "averaged", "means", "squares"}


@dataclass(frozen=True)
class Progress:
    """How far a training is. Figures are those of the last measured step."""

    step: int
    share: float
    """Of the budget that is spent, from 0 to 1."""
    seconds: float
    figures: Figures | None


@dataclass(frozen=True)
class Frame:
    """What does not change while a drafter is trained."""

    config: DrafterConfig
    shared: SharedParts
    standard: Standard
    rotations: tuple[Tensor, Tensor]
    dtype: torch.dtype
    """Of the matmuls; weights and states are float32."""

    def network(self, weights: Mapping[str, Tensor]) -> Network:
        return Network(self.config, weights, self.rotations, self.shared.model.query_scale, self.dtype)


class Trainer:
    """Trains one drafter. `run` goes on from wherever it is; `save` and `resume` keep that in a file."""

    def __init__(self, frame: Frame, settings: TrainingSettings, batches: Batches) -> None:
        self._frame, self._settings, self._batches = frame, settings, batches
        self._places = settings.unroll if frame.config.kind == "steps" else frame.config.block
        device = frame.shared.head.device
        begun = new_weights(frame.config, frame.shared.final_norm, settings.seed)
        self.weights = {name: x.to(device).requires_grad_() for name, x in begun.items()}
        self.averaged = {name: x.detach().clone() for name, x in self.weights.items()}
        self._optimizer = Optimizer.of(self.averaged)
        self._by_logits = compiled_by_logits() if settings.compiled else None
        self.step = 0
        self._seconds = 0.0

    def run(self, save_to: Path | None = None) -> Iterator[Progress]:
        """Train until the budget is spent; yields after every measured step and at the end.

        A checkpoint is written from time to time, and when the caller stops early or an error comes.
        """
        began = time.monotonic() - self._seconds
        saved = measured = time.monotonic()
        figures: Figures | None = None
        try:
            while self.share < 1:
                is_due = self.step % _MEASURE_EVERY == 0 or time.monotonic() - measured > _MEASURE_S
                is_measured = is_due or figures is None
                figures = self._train(measure=is_measured) or figures
                self.step += 1
                self._seconds = time.monotonic() - began
                if save_to is not None and time.monotonic() - saved > _SAVE_S:
                    self.save(save_to)
                    saved = time.monotonic()
                if is_measured or self.share >= 1:
                    measured = time.monotonic()
                    yield Progress(self.step, self.share, self._seconds, figures)
        finally:
            if save_to is not None:
                self.save(save_to)

    @property
    def share(self) -> float:
        """How much of the budget is spent, from 0 to 1."""
        steps, minutes = self._settings.steps, self._settings.minutes
        spent = self.step / steps if steps is not None else self._seconds / (60 * (minutes or 1))
        return min(spent, 1.0)

    def _train(self, *, measure: bool) -> Figures | None:
        frame, settings = self._frame, self._settings
        batch = self._batches.at(self.step, margin_of(self._places))
        shown = examples(batch, frame.shared, frame.standard, settings, self._places, self.step)
        network = frame.network(self.weights)
        tokens = frame.shared.embed(shown.following)
        states = list(drafted_states(network, network.features(shown.features), shown.anchors, tokens))
        gradients, figures = loss_gradient(
            frame.shared, states, shown.targets, measure=measure, by_logits=self._by_logits
        )
        torch.autograd.backward(states, gradients)
        self._optimizer.update(self.weights, settings.learning_rate * _rate(self.share), self.step)
        follow(self.averaged, self.weights, self.step)
        return figures

    # The checkpoint.

    def save(self, path: Path) -> None:
        """Write all that the next step depends on. What was there before stays whole until then."""
        partial = path.with_name(path.name + ".partial")
        torch.save(
            {
                "identity": self._identity(),
                "step": self.step,
                "seconds": self._seconds,
                "weights": {name: x.detach() for name, x in self.weights.items()},
                "averaged": self.averaged,
                "means": self._optimizer.means,
                "squares": self._optimizer.squares,
            },
            partial,
        )
        partial.replace(path)

    def resume(self, path: Path) -> None:
        """Go on where a saved training was. Raises CorruptCheckpoint, and ConfigError for another one."""
        saved = _load(path, self._frame.shared.head.device)
        for name, mine in self._identity().items():
            its = saved["identity"].get(name)
            if its != mine:
                raise ConfigError(f"{path} is of a training with {name} {its}, not {mine}")
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(saved["weights"][name])
        self.averaged = saved["averaged"]
        self._optimizer = Optimizer(saved["means"], saved["squares"])
        self.step, self._seconds = saved["step"], saved["seconds"]

    def _identity(self) -> dict[str, Any]:
        shape = {name: value for name, value in asdict(self._frame.config).items() if name != "taps"}
        guessed = zlib.crc32(self._frame.shared.draft_vocab.cpu().numpy().tobytes())
        taps = list(self._frame.config.taps)
        return {**shape, **asdict(self._settings), "taps": taps, "draft vocabulary": guessed}


def _load(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read as a training: {error}") from error
    missing = _SAVED - set(saved if isinstance(saved, dict) else ())
    if missing:
        raise CorruptCheckpoint(f"{path} is not a saved training: {', '.join(sorted(missing))} missing")
    whole: dict[str, Any] = saved
    return whole


def _rate(share: float) -> float:
    """The learning rate's course: up in a line, then down along a cosine."""
    if share < _WARM_UP:
        return max(share / _WARM_UP, 0.01)
    course = (share - _WARM_UP) / (1 - _WARM_UP)
    return _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * course))
