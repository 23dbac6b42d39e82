"""What `bench quality` concludes: how far each choice strays from float32 weights of the same file. Pure."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kakeya.bench.gates import Gate, at_least, at_most
from kakeya.types import DType, KernelChoice, WeightFormat

POSITIONS_NEEDED = 2000
# What the default settings may cost.
DEFAULT_KL_LIMIT = 0.01
DEFAULT_AGREEMENT_LIMIT = 0.95


class Part(StrEnum):
    """What there is to measure: arithmetic, long histories, recall of what was said, llama.cpp beside us."""

    CHOICES = "choices"
    MEMORY = "memory"
    RECALL = "recall"
    PEER = "peer"


@dataclass(frozen=True)
class Choice:
    """One way to hold the weights and compute with them."""

    dtype: DType
    weights: WeightFormat
    kernels: KernelChoice

    @property
    def label(self) -> str:
        return f"{self.dtype} / {self.weights} / {self.kernels}"


REFERENCE = Choice(DType.FLOAT32, WeightFormat.FLOAT32, KernelChoice.TORCH)
DEFAULT = Choice(DType.BFLOAT16, WeightFormat.AUTO, KernelChoice.AUTO)


def all_choices() -> Iterator[Choice]:
    """Every combination but the reference; the defaults first."""
    yield DEFAULT
    for kernels in (KernelChoice.NATIVE, KernelChoice.TORCH):
        for dtype in DType:
            for weights in WeightFormat:
                choice = Choice(dtype, weights, kernels)
                if choice != REFERENCE:
                    yield choice


@dataclass(frozen=True)
class Tally:
    """Sums over scored positions; tallies of several texts add up."""

    positions: int = 0
    divergence: float = 0.0
    agreements: int = 0
    predicted: int = 0
    surprise: float = 0.0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.positions + other.positions,
            self.divergence + other.divergence,
            self.agreements + other.agreements,
            self.predicted + other.predicted,
            self.surprise + other.surprise,
        )

    def to_dict(self) -> dict[str, Any]:
        """Means over the positions; None where there are none."""
        return {
            "positions": self.positions,
            "mean_kl": self.divergence / self.positions if self.positions else None,
            "top1_agreement": self.agreements / self.positions if self.positions else None,
            "perplexity": math.exp(self.surprise / self.predicted) if self.predicted else None,
        }


def choice_row(choice: Choice, held_as: str, tallies: Mapping[str, Tally]) -> dict[str, Any]:
    """A measured choice: what the loader made of it, and each way of feeding it."""
    scores = {rows: tally.to_dict() for rows, tally in tallies.items()}
    return {**_names(choice), "held_as": held_as, "refused": None, **scores}


def refused_row(choice: Choice, reason: str) -> dict[str, Any]:
    """A choice that this machine or model cannot have."""
    return {**_names(choice), "held_as": None, "refused": reason, "prompt": None, "decode": None}


def _names(choice: Choice) -> dict[str, str]:
    return {"dtype": choice.dtype, "weights": choice.weights, "kernels": choice.kernels}


def quality_gates(results: Mapping[str, Any]) -> tuple[Gate, ...]:
    """Enough text for a verdict, and a limit on what the defaults cost in decoding."""
    default = next((row for row in results["choices"] if _names(DEFAULT).items() <= row.items()), None)
    scores = (default["decode"] if default else None) or Tally().to_dict()
    positions = scores["positions"]
    enough = positions >= POSITIONS_NEEDED
    absent = f"needs {POSITIONS_NEEDED:,} positions, got {positions:,}"
    divergence = scores["mean_kl"] if enough else None
    agreement = scores["top1_agreement"] if enough else None
    return (
        at_most("mean KL divergence of the default choice", divergence, DEFAULT_KL_LIMIT, absent=absent),
        at_least("top-1 agreement of the default choice", agreement, DEFAULT_AGREEMENT_LIMIT, absent=absent),
    )
