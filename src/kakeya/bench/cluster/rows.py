"""What was seen of the cluster: what happened to it in the storm, and how fast it is."""

from dataclasses import dataclass, field

from kakeya.bench.benchmark import Results
from kakeya.bench.stats import Samples, median_of_ratios

HOME, ACTOR, NODE, FRONT, HEAD, DRAIN = "home", "actor", "node", "front end", "head", "drain"
KILLS = (HOME, ACTOR, NODE, FRONT, HEAD)


@dataclass(frozen=True)
class Event:
    """What was done to the cluster. `seconds` until a session that it met answered again; of a drain, until
    the node was empty, with the sessions and bytes that moved.

    Sessions do not meet the death of Ray's head. Then `seconds` begin when the nodes leave it to join the
    next one, and `answered` are the generates that came to their end before.
    """

    kind: str
    seconds: float
    sessions: int = 0
    bytes: int = 0
    answered: int = 0


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The same turns of the same sessions on two paths: through the front end, and straight to their homes.

    One sample for each repetition.
    """

    agents: int = 0
    homes: tuple[int, ...] = ()
    """How many agents each home had."""
    through: Samples = field(default_factory=Samples)
    """Tokens a second of all agents through the front end."""
    direct: Samples = field(default_factory=Samples)
    """The same where clients call the homes."""
    through_token: Samples = field(default_factory=Samples)
    """Seconds between tokens of a stream that is alone, through the front end."""
    direct_token: Samples = field(default_factory=Samples)
    generates: int = 0
    wrong: int = 0
    """Generates whose tokens a session on a server of its own does not say."""

    @property
    def kept(self) -> float | None:
        """The front end's share of what the homes do without it."""
        return median_of_ratios(self.through.samples, self.direct.samples)

    @property
    def overhead(self) -> float | None:
        """A token's time through the front end over its time without."""
        return median_of_ratios(self.through_token.samples, self.direct_token.samples)


@dataclass(frozen=True, kw_only=True)
class ClusterResults(Results):
    """What the agents did in the storm, and what was wrong with it; and the speed."""

    events: tuple[Event, ...] = ()
    sessions: int = 0
    forks: int = 0
    appended_tokens: int = 0
    generated_tokens: int = 0
    generates: int = 0
    checked_lengths: int = 0
    lost: int = 0
    """Sessions whose history has another length than their client was told."""
    wrong: int = 0
    """Generates whose tokens a session on a server of its own does not say."""
    twice: int = 0
    """Sessions that two homes had at the end."""
    errors: tuple[str, ...] = ()
    speed: Speed | None = None

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]
