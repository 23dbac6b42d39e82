"""A session: a server-held conversation, as its owner sees it."""

import time
from dataclasses import dataclass, field

from kakeya.engine.sequence import Sequence
from kakeya.types import SessionInfo


@dataclass
class Session:
    """An engine sequence with a name, an owner and an idle clock."""

    session_id: str
    owner: str
    client_label: str
    sequence: Sequence
    last_used_at: float = field(default_factory=time.monotonic)

    def touch(self) -> None:
        """Refresh the idle clock."""
        self.last_used_at = time.monotonic()

    def describe(self, sequence: Sequence) -> SessionInfo:
        """What the session holds. Call on the engine thread, which owns the sequence."""
        slab = sequence.slab
        return SessionInfo(
            session_id=self.session_id,
            state=_state(sequence),
            client_label=self.client_label,
            history_length=sequence.committed,
            computed_length=slab.committed,
            sink=slab.sink,
            window=slab.window,
            kv_live_bytes=slab.live_bytes,
            kv_capacity_bytes=slab.storage.nbytes,
            dropped_token_count=sequence.dropped,
            cache_invariant_inv1_violations=sequence.inv1_violations,
            cache_invariant_inv2_violations=sequence.inv2_violations,
            idle_seconds=time.monotonic() - self.last_used_at,
        )


def _state(sequence: Sequence) -> str:
    if sequence.error is not None:
        return "failed"
    return "idle" if sequence.request is None else "generating"
