"""What running `kakeya` in a test gives back."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The exit status and what was written."""

    status: int
    out: str
    err: str


Run = Callable[..., Outcome]
