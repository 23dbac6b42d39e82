"""What placement is about: replicas, sessions, and plans that move sessions. Frozen values."""

from dataclasses import dataclass

from kakeya.errors import ConfigError

# A model, labels, and a shape: see `Session.kind`.
Kind = tuple[str, frozenset[str], str]


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine in the cluster, as it is now.

    `free_slabs` can be had at once: they are empty, or their session idles and may be put to sleep.
    `most_sessions` may live here, awake and asleep: as many as slabs where nobody can sleep.
    A `draining` replica gets no session. `shape` names the weights and the form of a session's memory: one
    that was computed in another shape cannot come here.
    """

    name: str
    node: str
    model: str
    slabs: int
    free_slabs: int
    most_sessions: int
    sessions: int = 0
    running: int = 0
    waiting: int = 0
    labels: frozenset[str] = frozenset()
    draining: bool = False
    shape: str = ""

    @property
    def room(self) -> int:
        """How many sessions more it may hold."""
        return 0 if self.draining else max(0, self.most_sessions - self.sessions)

    @property
    def fill(self) -> float:
        """The share of its places that are taken."""
        return self.sessions / self.most_sessions if self.most_sessions else 1.0

    @property
    def next_fill(self) -> float:
        """What `fill` is with one session more."""
        return (self.sessions + 1) / self.most_sessions if self.most_sessions else 1.0

    @property
    def load(self) -> float:
        """Its requests for each slab, and how full it is."""
        return (self.running + self.waiting) / max(1, self.slabs) + self.fill

    def serves(self, session: "Session") -> bool:
        """Whether it has the session's model, labels and shape."""
        return self.has(session.kind)

    def has(self, kind: Kind) -> bool:
        """Whether sessions of a kind fit."""
        model, labels, shape = kind
        return self.model == model and labels <= self.labels and shape in ("", self.shape)

    def with_session(self) -> "Replica":
        """The same with one session more."""
        return self._holding(self.sessions + 1, max(0, self.free_slabs - 1))

    def without_session(self) -> "Replica":
        """The same with one session less. A slab is not promised: the session may have slept."""
        return self._holding(self.sessions - 1, self.free_slabs)

    def _holding(self, sessions: int, free_slabs: int) -> "Replica":
        # A plan for a million sessions makes a million of these: `replace` takes twice as long.
        return Replica(
            self.name,
            self.node,
            self.model,
            self.slabs,
            free_slabs,
            self.most_sessions,
            sessions,
            self.running,
            self.waiting,
            self.labels,
            self.draining,
            self.shape,
        )


@dataclass(frozen=True, slots=True)
class Session:
    """A session as far as its place is concerned; `bytes` is what a move of it transfers.

    `home` names its replica. `working`: a generate runs or waits. `shape` is that of its replica; empty for
    one that was computed nowhere yet.
    """

    id: str
    model: str
    bytes: int
    labels: frozenset[str] = frozenset()
    home: str | None = None
    working: bool = False
    shape: str = ""

    @property
    def kind(self) -> Kind:
        """What a replica must have for it."""
        return self.model, self.labels, self.shape


@dataclass(frozen=True, slots=True)
class Move:
    """One session goes from one replica to another."""

    session: str
    source: str
    target: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A session for which no replica has a place, and what is missing."""

    session: str
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Every session that needs a place is in one of the three; `working` ones move in a later plan."""

    moves: tuple[Move, ...] = ()
    unplaced: tuple[Unplaced, ...] = ()
    working: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(move.bytes for move in self.moves)


@dataclass(frozen=True, slots=True)
class Scaling:
    """When a group of replicas grows and shrinks.

    It has enough replicas to keep `free_share` of slabs and of places free, and grows while requests wait
    longer than `longest_queue_s`. Raises ConfigError for values that cannot work.
    """

    free_share: float = 0.2
    longest_queue_s: float = 1.0
    fewest: int = 1
    most: int = 1000

    def __post_init__(self) -> None:
        if not 0 <= self.free_share < 1:
            raise ConfigError(f"free_share must be at least 0 and below 1, got {self.free_share}")
        if self.longest_queue_s <= 0:
            raise ConfigError(f"longest_queue_s must be above 0, got {self.longest_queue_s}")
        if not 0 <= self.fewest <= self.most:
            raise ConfigError(f"fewest must lie between 0 and most, got {self.fewest} and {self.most}")
