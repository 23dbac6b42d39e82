"""A session: a server-held conversation, as its owner sees it."""

import threading
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

from kakeya.engine.recall import Retriever
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.slab import SlabGeometry
from kakeya.engine.state import RecallState, SequenceState, recall_of
from kakeya.errors import InvalidArgument, SessionNotFound
from kakeya.storage.records import Snapshot
from kakeya.types import SessionInfo, TurnRecord

MAX_LABEL = 256
# Enough for a plot; older turns are only counted.
RECENT_TURNS = 256


def check_label(label: str) -> None:
    if len(label) > MAX_LABEL:
        raise InvalidArgument(f"client_label must have at most {MAX_LABEL} characters, got {len(label)}")


@dataclass(frozen=True)
class Asleep:
    """A session without a slab: its `state` and `tokens` are in host memory, or both are on the disk. In host
    memory it keeps what searches its past, too."""

    length: int
    computed: int
    sink: int
    eos_token_ids: tuple[int, ...]
    geometry: SlabGeometry
    recall: RecallState | None = None
    state: SequenceState | None = None
    tokens: "array[int] | None" = None
    retriever: Retriever | None = None

    @property
    def place(self) -> str:
        return "disk" if self.state is None else "host"

    @property
    def bytes_beside(self) -> int:
        """What it takes in host memory beside its keys and values."""
        if self.state is None or self.tokens is None:
            return 0
        drafts = sum(tensor.nbytes for tensor in self.state.draft.values())
        searching = 0 if self.retriever is None else self.retriever.nbytes
        return drafts + len(self.tokens) * self.tokens.itemsize + searching


@dataclass(eq=False)
class Session:
    """An engine sequence with a name, an owner and an idle clock. One that is `asleep` has no sequence.

    `lock` is held by whoever moves it or changes its history.
    """

    session_id: str
    owner: str
    client_label: str
    sequence: TokenSequence | None
    number: int
    """Counts the owner's sessions in the order of their creation, from 1."""
    holder: str = field(default="", kw_only=True)
    """The front end that keeps it for its own clients; empty for a session that a client named."""
    created_at: float = field(default_factory=time.time, kw_only=True)
    asleep: Asleep | None = None
    history: int = 0
    """The number of its history in a state directory."""
    snapshot: Snapshot | None = None
    """The newest in a state directory."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_leaving: bool = False
    """It was being sent to another server, and nobody knows yet whether that has it."""
    saving: threading.Lock = field(default_factory=threading.Lock)
    """Held while a snapshot of it is written."""
    last_used_at: float = field(default_factory=time.monotonic)
    turns: int = 0
    generated_tokens: int = 0
    recent_turns: tuple[TurnRecord, ...] = ()

    @property
    def age(self) -> tuple[float, str]:
        """What sessions of many servers are listed by: it stays the same wherever this one goes."""
        return self.created_at, self.session_id

    @property
    def where(self) -> TokenSequence | Asleep:
        """Its sequence, or how it sleeps. It may wake or fall asleep while this looks."""
        while (found := self.sequence or self.asleep) is None:
            pass
        return found

    @property
    def state(self) -> str:
        where = self.where
        if isinstance(where, Asleep):
            return where.place
        if where.error is not None:
            return "failed"
        return "idle" if where.request is None else "generating"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self.where.eos_token_ids))

    @property
    def recall(self) -> RecallState | None:
        """What it has of recall beside its slab; None for a session without."""
        where = self.where
        return where.recall if isinstance(where, Asleep) else recall_of(where)

    @property
    def length(self) -> int:
        """Of its history, roughly while it generates."""
        where = self.where
        return where.length if isinstance(where, Asleep) else where.committed

    @property
    def is_closed(self) -> bool:
        return self.sequence is not None and isinstance(self.sequence.error, SessionNotFound)

    @property
    def live_bytes(self) -> int:
        """What its slab holds; a failed or sleeping session has none."""
        sequence = self.sequence
        return 0 if sequence is None or sequence.error is not None else sequence.slab.live_bytes

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
        if self.sequence is not None and self.sequence.request is not None:
            self.touch()
        return self.idle_seconds >= ttl

    def describe(self) -> SessionInfo:
        """What the session holds. Call on the engine thread, which owns the sequence.

        Raises SessionNotFound when it has been closed.
        """
        sequence = self.where
        if isinstance(sequence, Asleep):
            return self._describe_asleep(sequence)
        if isinstance(sequence.error, SessionNotFound):
            raise sequence.error
        slab = sequence.slab
        return SessionInfo(
            session_id=self.session_id,
            state=self.state,
            client_label=self.client_label,
            history_length=sequence.committed,
            computed_length=slab.committed,
            sink=slab.pinned,
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
            **_recall_figures(self.recall),
            cache_invariant_inv4_violations=sequence.inv4_violations,
        )

    def _describe_asleep(self, asleep: Asleep) -> SessionInfo:
        geometry = asleep.geometry
        capacity = geometry.cache.capacity
        return SessionInfo(
            session_id=self.session_id,
            state=asleep.place,
            client_label=self.client_label,
            history_length=asleep.length,
            computed_length=asleep.computed,
            sink=asleep.sink - (asleep.recall.slots if asleep.recall else 0),
            window=capacity - asleep.sink,
            kv_live_bytes=min(asleep.computed, capacity) * geometry.bytes_per_token,
            kv_capacity_bytes=geometry.slab_bytes,
            dropped_token_count=max(0, asleep.length - capacity),
            cache_invariant_inv1_violations=0,
            cache_invariant_inv2_violations=0,
            idle_seconds=self.idle_seconds,
            turns=self.turns,
            generated_tokens=self.generated_tokens,
            recent_turns=self.recent_turns,
            **_recall_figures(asleep.recall),
        )


def _recall_figures(recall: RecallState | None) -> dict[str, Any]:
    """The same awake and asleep."""
    if recall is None:
        return {}
    return {
        "recall_tokens": recall.slots,
        "recalled": recall.sees,
        "remembered": recall.remembered,
        "recall_duration_seconds": recall.seconds,
    }


def _taken(sequence: TokenSequence) -> int:
    """Tokens that the reader of a running generate has taken so far."""
    return 0 if sequence.request is None else sequence.request.stream.taken
