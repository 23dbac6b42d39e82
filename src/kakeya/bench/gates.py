"""Gates: limits a report is held to. A gate with nothing to judge is null and says why."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Direction = Literal["at least", "at most"]

# What everybody else may use of the machine while anything is timed.
BYSTANDERS_LIMIT = 0.05


@dataclass(frozen=True)
class Gate:
    """One limit and how it fared; `passed` is None when there was nothing to judge, and `reason` says why."""

    name: str
    value: float | None
    direction: Direction
    limit: float
    passed: bool | None
    reason: str

    @property
    def verdict(self) -> str:
        return {True: "passed", False: "failed", None: "not judged"}[self.passed]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def at_least(name: str, value: float | None, limit: float, *, absent: str) -> Gate:
    """`value` must reach `limit`. `absent` is the reason given when there is no value."""
    return _judge(name, value, "at least", limit, absent)


def at_most(name: str, value: float | None, limit: float, *, absent: str) -> Gate:
    """`value` must not exceed `limit`. `absent` is the reason given when there is no value."""
    return _judge(name, value, "at most", limit, absent)


def _judge(name: str, value: float | None, direction: Direction, limit: float, absent: str) -> Gate:
    if value is None:
        return Gate(name, None, direction, limit, None, absent)
    if not math.isfinite(value):
        return Gate(
            name, None, direction, limit, None, f"the measured value is {value}, which is not a number"
        )
    passed = value >= limit if direction == "at least" else value <= limit
    reason = f"{value:.4g} is {'' if passed else 'not '}{direction} {limit:g}"
    return Gate(name, value, direction, limit, passed, reason)


def exit_status(gates: Iterable[Gate]) -> int:
    """1 when any gate failed, otherwise 0. A gate that was not judged did not fail."""
    return int(any(gate.passed is False for gate in gates))
