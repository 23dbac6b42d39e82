"""How many sessions fit: a memory budget, a session's bytes, and the arithmetic between them."""

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from kakeya.cli.console import human_bytes
from kakeya.errors import ConfigError
from kakeya.types import BackendChoice

# A share of the machine's memory, which other programs use too; and of what the model leaves on a device.
DEFAULT_BUDGETS = {BackendChoice.CPU: "25%", BackendChoice.CUDA: "90%", BackendChoice.MLX: "25%"}
# The most that the default capacity grows to, however small sessions are.
MOST_BY_DEFAULT = 4096

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """Memory for the sessions' keys and values: bytes, or a share of what is free."""

    amount: float
    is_share: bool

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """From `8GB`, `512MiB`, `1000000` or `25%`. Raises ConfigError for anything else."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|[a-zA-Z]*)", text.strip())
        if match is not None and match[2] == "%" and 0 < float(match[1]) <= 100:
            return cls(float(match[1]) / 100, is_share=True)
        if match is not None and match[2].upper() in _UNITS and float(match[1]) > 0:
            return cls(float(match[1]) * _UNITS[match[2].upper()], is_share=False)
        raise ConfigError(f"memory-budget must look like 8GB, 512MiB or 25%, got {text!r}")

    def bytes_of(self, available: int) -> int:
        """The budget in bytes. Raises ConfigError when there is less memory than that."""
        budget = int(self.amount * available if self.is_share else self.amount)
        if budget > available:
            raise ConfigError(
                f"a memory budget of {human_bytes(budget)} is more than the {human_bytes(available)} free"
            )
        return budget

    def in_words(self, available: int) -> str:
        words = human_bytes(self.bytes_of(available))
        return f"{words} ({self.amount:.0%} of {human_bytes(available)} free)" if self.is_share else words


def fitting_capacity(
    asked: int | None,
    budget: Budget,
    *,
    bytes_per_token: int,
    slots: int,
    available: int,
    beside: Callable[[int], int],
) -> int:
    """How many sessions to make room for: what was asked, or what the budget holds.

    `beside`: what shared prefixes, recall and a proposer take beside so many sessions. Raises ConfigError
    with the arithmetic when that does not fit.
    """
    session_bytes, room = bytes_per_token * slots, budget.bytes_of(available)
    counts = range(1, room // session_bytes + 1)
    fitting = bisect_right(counts, room, key=lambda sessions: sessions * session_bytes + beside(sessions))
    wanted = min(fitting, MOST_BY_DEFAULT) if asked is None else asked
    if 1 <= wanted <= fitting:
        return wanted
    wanted = max(wanted, 1)
    total = human_bytes(session_bytes * wanted)
    raise ConfigError(
        f"capacity {wanted} does not fit: {bytes_per_token:,} bytes per token x {slots:,} slots "
        f"= {session_bytes:,} bytes per session, x {wanted:,} sessions = {total}, "
        f"beside {human_bytes(beside(wanted))} for shared prefixes, recall and a proposer, "
        f"and the memory budget is {budget.in_words(available)}: room for {fitting:,}. "
        "Lower --capacity or --window, or raise --memory-budget"
    )
