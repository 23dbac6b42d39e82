"""What things take in a simulated cluster. The benchmark's flags say where each figure comes from."""

import math
from dataclasses import dataclass
from random import Random

from kakeya.errors import ConfigError

# How far the 95th percentile of a normal distribution lies from its middle.
_NORMAL_P95 = 1.6449


@dataclass(frozen=True, slots=True)
class Spread:
    """A time that varies: lognormal with this median and this 95th percentile. Raises ConfigError."""

    p50: float
    p95: float

    def __post_init__(self) -> None:
        if not 0 < self.p50 <= self.p95:
            raise ConfigError(f"a median must be above 0 and at most its p95, got {self.p50} and {self.p95}")

    def draw(self, chance: Random) -> float:
        return self.p50 * math.exp(chance.gauss(0.0, 1.0) * math.log(self.p95 / self.p50) / _NORMAL_P95)


@dataclass(frozen=True, slots=True)
class Costs:
    """Sizes and times. `decode` has tokens per second of one node for so many sessions at once, rising.

    Raises ConfigError for what cannot be.
    """

    bytes_per_token: int
    slots: int
    host_wake: Spread
    disk_wake: Spread
    restart: Spread
    move: Spread
    call_s: float
    prompt_tokens_per_s: float
    decode: tuple[tuple[int, float], ...]
    detection_s: float
    node_start_s: float
    link_bytes_per_s: float

    def __post_init__(self) -> None:
        if not self.decode or list(self.decode) != sorted(set(self.decode)) or self.decode[0][0] < 1:
            raise ConfigError(f"decode needs numbers of sessions that rise from 1, got {self.decode}")
        if min(self.prompt_tokens_per_s, self.link_bytes_per_s, *(speed for _, speed in self.decode)) <= 0:
            raise ConfigError("speeds must be above 0")

    def bytes(self, tokens: int) -> int:
        """What a move of a session transfers: its filled slots, and four bytes a token of history."""
        return min(tokens, self.slots) * self.bytes_per_token + 4 * tokens

    def tokens_per_s(self, working: int) -> float:
        """The speed of a node with so many sessions at work: on a line between what was measured."""
        below = self.decode[0]
        for above in self.decode:
            if above[0] >= working:
                if above[0] == below[0]:
                    return above[1]
                part = (working - below[0]) / (above[0] - below[0])
                return below[1] + part * (above[1] - below[1])
            below = above
        return below[1]
