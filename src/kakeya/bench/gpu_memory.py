"""What an open shape has really taken of its device, beside what was planned for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


def free_bytes(device: torch.device) -> int | None:
    """What a device has left, for whoever asks; None for one that does not tell."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def gone_since(before: int | None, device: torch.device) -> int | None:
    """Bytes of the device that are not free any more; None for one that does not tell."""
    free = free_bytes(device)
    return None if free is None or before is None else before - free


@dataclass
class MemoryMeter:
    """Of one shape, from before it is opened. What it has taken is counted without its slabs.

    `earlier` is what the run had lost by then: libraries that other work brought along, and no other shape.
    """

    device: torch.device
    earlier: int | None
    planned: Mapping[str, int]
    """Bytes by purpose."""
    pool_bytes: int
    opened: int | None = None
    stepped: int | None = None

    def __post_init__(self) -> None:
        self._before = free_bytes(self.device)

    def note_opened(self) -> None:
        """It is open: weights, buffers and graphs are there, and nothing has run."""
        # Random weights are made on the device. What making them took would not be taken in a server.
        torch.cuda.empty_cache()  # nothing where there is no CUDA
        self.opened = self._taken()

    def note_stepped(self) -> None:
        """Steps have run; the most that such a look has found counts."""
        taken = self._taken()
        self.stepped = taken if self.stepped is None or taken is None else max(taken, self.stepped)

    def _taken(self) -> int | None:
        gone = gone_since(self._before, self.device)
        return None if gone is None else gone - self.pool_bytes

    def figures(self) -> dict[str, Any]:
        """In bytes."""
        return {
            "planned": {**self.planned, "total": sum(self.planned.values())},
            "pool": self.pool_bytes,
            "used": {"earlier": self.earlier, "opened": self.opened, "stepped": self.stepped},
        }
