"""What `bench quality --part recall` concludes: whether a number said long ago is still known. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kakeya.bench.gates import Gate, at_most

FULL, BOUNDED, PINNED = "full", "bounded", "pinned"
LOSS_LIMIT = 0.2
# A model that fails with everything before its eyes says nothing about memory.
LEAST_FULL_RECALL = 0.5


@dataclass(frozen=True)
class Trial:
    """A number that was said, and what came when it was asked for `distance` tokens later."""

    distance: int
    key: str
    answer: str

    @property
    def is_right(self) -> bool:
        return self.key in self.answer


def recall_rows(memory: str, trials: Iterable[Trial], reach: int) -> list[dict[str, Any]]:
    """One row for each distance. Up to `reach` tokens away what was said is still in the window."""
    by_distance: dict[int, list[Trial]] = {}
    for trial in trials:
        by_distance.setdefault(trial.distance, []).append(trial)
    return [
        {
            "memory": memory,
            "distance": distance,
            "within_window": distance <= reach,
            "trials": len(members),
            "right": sum(trial.is_right for trial in members),
            "recall": sum(trial.is_right for trial in members) / len(members),
            "answers": [{"key": trial.key, "answer": trial.answer} for trial in members],
        }
        for distance, members in by_distance.items()
    ]


def recall_of(rows: Sequence[Mapping[str, Any]], memory: str, distances: Iterable[int]) -> float | None:
    """The share of right answers over these distances; None where nothing was asked."""
    wanted = set(distances)
    chosen = [row for row in rows if row["memory"] == memory and row["distance"] in wanted]
    asked = sum(row["trials"] for row in chosen)
    return sum(row["right"] for row in chosen) / asked if asked else None


def recall_gates(results: Mapping[str, Any]) -> tuple[Gate, ...]:
    """Within its window, bounded memory recalls nearly what full attention does."""
    rows = results["rows"]
    within = [row["distance"] for row in rows if row["memory"] == BOUNDED and row["within_window"]]
    full, bounded = (recall_of(rows, memory, within) for memory in (FULL, BOUNDED))
    value, absent = None, "no distance within the window was tried with both"
    if full is not None and bounded is not None:
        # Rounded: 0.9 - 0.7 is not to be more than 0.2.
        value = round(full - bounded, 9) if full >= LEAST_FULL_RECALL else None
        absent = f"full attention itself recalls {full:.2f}, less than {LEAST_FULL_RECALL}"
    return (at_most("recall_lost_within_the_window", value, LOSS_LIMIT, absent=absent),)
