"""What a training has to tell: in the drafter's file in short, in a JSON file in full."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import kakeya
from kakeya.models.drafter import DrafterConfig
from kakeya.training.acceptance import Walked
from kakeya.training.conversations import Conversations, temperature_of
from kakeya.training.settings import NetworkSettings, TrainingSettings
from kakeya.training.trainer import Progress


@dataclass
class Report:
    """Gathers what happens. `as_dict` is the whole of it."""

    model: str
    command: str
    licence: str
    backend: str
    settings: TrainingSettings
    network: NetworkSettings
    data: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)
    examined: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def describe_data(self, conversations: Conversations, held_out: int) -> None:
        usable = conversations.usable()
        temperatures = [temperature_of(each.number) for each in usable]
        self.data = {
            **asdict(conversations.settings),
            "usable": len(usable),
            "held_out": held_out,
            "all_tokens": sum(len(each.tokens) for each in usable),
            "answer_tokens": int(sum(each.answers.sum() for each in usable)),
            "by_temperature": {str(t): temperatures.count(t) for t in sorted(set(temperatures))},
        }

    def describe_drafter(self, config: DrafterConfig) -> None:
        parameters = sum(torch.Size(shape).numel() for shape in config.shapes.values())
        self.drafter = {**asdict(config), "parameters": parameters}

    def add_progress(self, progress: Progress) -> None:
        figures = progress.figures
        assert figures is not None, "the first step of a run is measured"
        self.curve.append(
            {
                "step": progress.step,
                "seconds": round(progress.seconds, 3),
                "loss": figures.loss,
                "acceptance": figures.acceptance,
            }
        )

    def add_examination(self, step: int, walked: Sequence[Walked]) -> None:
        answers = [
            {
                "temperature": each.temperature,
                "block": each.block,
                "every_answer": each.every.figures(),
                "ended_by_itself": each.ended.figures(),
            }
            for each in walked
        ]
        self.examined.append({"step": step, "answers": answers})

    def as_dict(self) -> dict[str, Any]:
        whole = {"kakeya": kakeya.__version__, "torch": torch.__version__, "date": today()}
        return whole | asdict(self)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def notes(self) -> dict[str, str]:
        """What the drafter's own file says of itself."""
        return {
            "command": self.command,
            "licence": self.licence,
            "date": today(),
            "model": self.model,
            "acceptance": json.dumps([short(each) for each in self.examined[-1]["answers"]]),
        }


def short(answers: dict[str, Any]) -> dict[str, Any]:
    """Tokens per step of one temperature and block."""
    return {
        "temperature": answers["temperature"],
        "block": answers["block"],
        "tokens_per_step": _rounded(answers["every_answer"]["tokens_per_step"]),
        "ended_by_itself": _rounded(answers["ended_by_itself"]["tokens_per_step"]),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def today() -> str:
    return datetime.now(UTC).date().isoformat()
