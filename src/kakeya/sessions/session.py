"""A session: a server-held conversation, as its owner sees it."""

import time
from dataclasses import dataclass, field

from kakeya.engine.sequence import TokenSequence
from kakeya.errors import InvalidArgument, SessionNotFound
from kakeya.types import SessionInfo, TurnRecord

MAX_LABEL = 256
# Enough for a plot; older turns are only counted.
RECENT_TURNS = 256


def check_label(label: str) -> None:
    if len(label) > MAX_LABEL:
        raise InvalidArgument(f"client_label must have at most {MAX_LABEL} characters, got {len(label)}")


@dataclass
class Session:
    """An engine sequence with a name, an owner and an idle clock."""

    session_id: str
    owner: str
    client_label: str
    sequence: TokenSequence
    number: int
    """Counts the owner's sessions in the order of their creation, from 1."""
    last_used_at: float = field(default_factory=time.monotonic)
    turns: int = 0
    generated_tokens: int = 0
    recent_turns: tuple[TurnRecord, ...] = ()

    @property
    def state(self) -> str:
        if self.sequence.error is not None:
            return "failed"
        return "idle" if self.sequence.request is None else "generating"

    @property
    def is_closed(self) -> bool:
        return isinstance(self.sequence.error, SessionNotFound)

    @property
    def live_bytes(self) -> int:
        """What its slab holds; a failed session has none any more."""
        return self.sequence.slab.live_bytes if self.sequence.error is None else 0

    @property
    def idle_seconds(self) -> float:
        return time.monotonic() - self.last_used_at

    def touch(self) -> None:
        """Refresh the idle clock."""
        self.last_used_at = time.monotonic()

    def turn_ended(self, turn: TurnRecord) -> None:
        """Count a turn and remember its figures. Call on the engine thread."""
        self.turns += 1
        self.generated_tokens += turn.generated_tokens
        self.recent_turns = (*self.recent_turns[-(RECENT_TURNS - 1) :], turn)

    def share_past(self, original: "Session") -> None:
        """A fork has the same history, so it has had the same turns."""
        self.turns, self.generated_tokens = original.turns, original.generated_tokens
        self.recent_turns = original.recent_turns

    def has_expired(self, ttl: float) -> bool:
        """Whether nobody has used it for `ttl` seconds. Call on the engine thread.

        Generating is use, so its idle clock starts again.
        """
        if self.sequence.request is not None:
            self.touch()
        return self.idle_seconds >= ttl

    def describe(self, sequence: TokenSequence) -> SessionInfo:
        """What the session holds. Call on the engine thread, which owns the sequence.

        Raises SessionNotFound when it has been closed.
        """
        if isinstance(sequence.error, SessionNotFound):
            raise sequence.error
        slab = sequence.slab
        return SessionInfo(
            session_id=self.session_id,
            state=self.state,
            client_label=self.client_label,
            history_length=sequence.committed,
            computed_length=slab.committed,
            sink=slab.sink,
            window=slab.window,
            kv_live_bytes=self.live_bytes,
            kv_capacity_bytes=slab.storage.nbytes,
            dropped_token_count=sequence.dropped,
            cache_invariant_inv1_violations=sequence.inv1_violations,
            cache_invariant_inv2_violations=sequence.inv2_violations,
            idle_seconds=self.idle_seconds if sequence.request is None else 0.0,
            turns=self.turns,
            generated_tokens=self.generated_tokens + _taken(sequence),
            recent_turns=self.recent_turns,
            shared_tokens=sequence.copied,
        )


def _taken(sequence: TokenSequence) -> int:
    """Tokens that the reader of a running generate has taken so far."""
    return 0 if sequence.request is None else sequence.request.stream.taken
