"""What is simulated, and what came of it."""

from collections import defaultdict
from dataclasses import dataclass, field

from kakeya.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A cluster and what happens to it. Raises ConfigError for what cannot be.

    Sessions come `surge` times as fast as they end in the first half of the time, and not at all in the
    second, so that the cluster grows and shrinks. A `cut_off_share` of deaths are none: the node goes on and
    reaches the storage, but the others do not hear of it.
    """

    nodes: int
    spare_nodes: int
    sessions: int
    places: int
    slabs: int
    host_places: int
    seconds: float
    turn_every_s: float
    prompt_tokens: float
    answer_tokens: float
    history_tokens: float
    lifetime_s: float
    surge: float
    node_life_s: float
    cut_off_share: float
    drain_every_s: float
    rebalance_every_s: float
    scale_every_s: float
    moves_at_once: int
    look_every_s: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._require(1, "nodes", "sessions", "places", "slabs", "moves_at_once")
        self._require(0, "spare_nodes", "host_places", "surge", "cut_off_share")
        times = [each for each in self.__slots__ if each.endswith("_s")]
        for name in (*times, "seconds", "prompt_tokens", "answer_tokens", "history_tokens"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{_flag(name)} must be above 0, got {getattr(self, name)}")
        if self.cut_off_share > 1:
            raise ConfigError(f"cut-off-share must be at most 1, got {self.cut_off_share}")
        room = self.nodes * self.places
        if self.sessions > room:
            raise ConfigError(f"{self.sessions:,} sessions need more than the {room:,} places of the nodes")

    def _require(self, least: int, *names: str) -> None:
        for name in names:
            if getattr(self, name) < least:
                raise ConfigError(f"{_flag(name)} must be at least {least}, got {getattr(self, name)}")


def _flag(name: str) -> str:
    return name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Look:
    """The cluster at one moment. `fullest`, `mean` and `emptiest`: sessions of homes that take new ones."""

    at_s: float
    sessions: int
    homes: int
    down: int
    draining: int
    working: int
    fullest: int
    mean: float
    emptiest: int


@dataclass(slots=True)
class Outcome:
    """What happened, in virtual seconds. `planner_s` alone is real: wall and processor time of each call."""

    placed: int = 0
    refused: int = 0
    refused_with_room: int = 0
    unplaced: int = 0
    unplaced_with_room: int = 0
    closed: int = 0
    turns: int = 0
    tokens: int = 0
    wakes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    queued_s: list[float] = field(default_factory=list)
    waits_for_move_s: list[float] = field(default_factory=list)
    waits_after_death_s: list[float] = field(default_factory=list)
    deaths: int = 0
    cut_off: int = 0
    fenced: int = 0
    stored_by_cut_off: int = 0
    recovery_s: list[float] = field(default_factory=list)
    waited_for_node: int = 0
    drains_put_off: int = 0
    drain_s: list[float] = field(default_factory=list)
    drain_bytes: list[int] = field(default_factory=list)
    drain_sessions: list[int] = field(default_factory=list)
    rebalanced: int = 0
    nodes_added: int = 0
    nodes_removed: int = 0
    busy_share: float = 0.0
    looks: list[Look] = field(default_factory=list)
    planner_s: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    moves: int = 0
    broken_moves: int = 0
    moved_bytes: int = 0
    pauses_s: list[float] = field(default_factory=list)
    checks: int = 0
    audits: int = 0
    lost: int = 0
    doubled: int = 0
    overfull: int = 0
    violations: tuple[str, ...] = ()
