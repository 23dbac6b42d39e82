"""The trained drafters that come with the package.

Each file says with what command it was made, under which licence it stands, and how often it was right.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "data"


@dataclass(frozen=True)
class ShippedDrafter:
    """A file in FOLDER, and its SHA-256."""

    file: str
    digest: str

    @property
    def path(self) -> Path:
        return FOLDER / self.file


DRAFTERS: Mapping[str, ShippedDrafter] = {
    "9b4050a8c9ab8919d950788df7ad3905973c35cfa8aabd7af97b31cbdadf940d": ShippedDrafter(
        "smollm2-135m-instruct.safetensors",
        "5907af2dafdd2aa40526b2f3d3aca65ba554b68e4b3bf745ccdaf393357c60eb",
    ),
}
"""By the fingerprint of the checkpoint that each was trained for."""


def shipped_drafter(fingerprint: str) -> Path | None:
    """The drafter for a checkpoint, or None where none comes with the package."""
    return DRAFTERS[fingerprint].path if fingerprint in DRAFTERS else None
