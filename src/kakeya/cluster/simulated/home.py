"""A simulated home and the sessions that it holds: what its state directory has, and who is awake."""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kakeya.cluster.replicas import Replica

if TYPE_CHECKING:
    from kakeya.cluster.simulated.moves import Transfer

MODEL = "model"


class Talk:
    """A session. `asked` is when the client sent the turn that has no answer yet; None between turns.

    `met`: what that turn waits or waited for: `move`, `death`, or nothing of the kind.
    """

    __slots__ = (
        *("asked", "closed", "holders", "home", "id", "met", "moves", "number", "redo", "tokens", "transfer"),
        "working",
    )

    def __init__(self, number: int, tokens: int) -> None:
        self.number, self.id, self.tokens = number, f"s{number:08}", tokens
        self.home: Home
        self.holders: list[Home] = []  # homes whose directories have it, whether they answer for it or not
        self.asked: float | None = None
        self.working = self.closed = False
        self.transfer: Transfer | None = None
        self.met = ""
        self.moves = 0
        self.redo = 0  # tokens to compute again when it wakes, because a node died

    @property
    def rests(self) -> bool:
        """Whether it can be moved or closed now."""
        return self.asked is None and self.transfer is None and not self.closed


@dataclass(eq=False, slots=True)
class Home:
    """A replica with its directory, which outlives the node. One node has one home."""

    name: str
    node: str
    slabs: int
    places: int
    host_places: int
    epoch: int = 1
    up: bool = True
    draining: bool = False
    closed: bool = False
    # The directory.
    sessions: dict[int, Talk] = field(default_factory=dict)
    leaving: dict[int, int] = field(default_factory=dict)
    taken: set[tuple[int, int]] = field(default_factory=set)
    # The process. The first of `awake` and of `host` was used least recently.
    working: dict[int, Talk] = field(default_factory=dict)
    queue: deque[Talk] = field(default_factory=deque)
    knocking: dict[int, Talk] = field(default_factory=dict)
    awake: dict[int, Talk] = field(default_factory=dict)
    host: dict[int, Talk] = field(default_factory=dict)
    # What travels.
    to_move: "deque[tuple[Talk, Home]]" = field(default_factory=deque)
    sending: int = 0
    receiving: int = 0
    expected: int = 0
    blocked: bool = False
    senders: "deque[Home]" = field(default_factory=deque)
    unsettled: "list[Transfer]" = field(default_factory=list)
    # What is told of it in the end.
    cut_off: set[int] = field(default_factory=set)
    died_at: float = 0.0
    drain_began: float = 0.0
    planned: bool = False
    drained_bytes: int = 0
    drained_sessions: int = 0
    returns: bool = True
    busy_s: float = 0.0
    busy_since: float = -1.0
    _replica: Replica | None = None
    _state: tuple[int, int, int, str, bool] | None = None

    def accepts(self, talk: Talk) -> bool:
        """Whether a session may come now. One that left cannot come back before it is forgotten."""
        return self.up and not self.draining and not self.closed and talk.number not in self.sessions

    @property
    def held(self) -> int:
        """Its sessions, and those that are planned to come."""
        return len(self.sessions) + self.expected

    @property
    def empty(self) -> bool:
        return not self.sessions and not self.expected and not self.sending

    def answers(self, talk: Talk) -> bool:
        """Whether its directory says that the session lives here."""
        return talk.number in self.sessions and talk.number not in self.leaving

    def store(self, talk: Talk) -> None:
        self.sessions[talk.number] = talk
        talk.holders.append(self)

    def forget(self, talk: Talk) -> None:
        del self.sessions[talk.number]
        self.leaving.pop(talk.number, None)
        self.awake.pop(talk.number, None)
        self.host.pop(talk.number, None)
        talk.holders.remove(self)

    def was_taken(self, talk: Talk, move: int) -> bool:
        """Whether it took the session in under this epoch, wherever the session is by now."""
        return (talk.number, move) in self.taken

    def wake(self, talk: Talk) -> str:
        """Give a session a slab; where it slept: `slab`, `host` or `disk`. Others make room for it."""
        number = talk.number
        if self.awake.pop(number, None) is not None:
            place = "slab"
        else:
            place = "disk" if self.host.pop(number, None) is None else "host"
        self.awake[number] = talk
        while len(self.awake) > self.slabs:
            idle = next(each for each in self.awake.values() if not each.working and each is not talk)
            del self.awake[idle.number]
            self.host[idle.number] = idle
        while len(self.host) > self.host_places:
            del self.host[next(iter(self.host))]
        return place

    def busy_until(self, now: float) -> float:
        """How long it has been at work."""
        return self.busy_s + (now - self.busy_since if self.busy_since >= 0 else 0.0)

    def replica_if_up(self) -> Replica:
        """As it will be again when it is back: so it counts for the autoscaler."""
        return replace(self.replica(), draining=self.draining)

    def replica(self) -> Replica:
        """As the planner sees it. A home that is down gets nobody, like one that drains."""
        shut = self.draining or not self.up
        state = (self.held, len(self.working), len(self.queue), self.node, shut)
        if state != self._state or self._replica is None:
            held, running, waiting, node, shut = self._state = state
            free = self.slabs - running
            self._replica = Replica(
                self.name, node, MODEL, self.slabs, free, self.places, held, running, waiting, draining=shut
            )
        return self._replica
