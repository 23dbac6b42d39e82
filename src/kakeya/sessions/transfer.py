"""A session's whole state, taken out to be written somewhere and brought in again."""

from dataclasses import dataclass
from functools import partial

from kakeya.engine.engine import Engine
from kakeya.engine.recall import Retriever
from kakeya.engine.slab import SlabPool
from kakeya.engine.state import SequenceState, on_device, on_host
from kakeya.sessions.answers import Call
from kakeya.sessions.keeping import Keeping
from kakeya.sessions.lifetimes import Lifetimes
from kakeya.sessions.limits import Limits
from kakeya.sessions.session import Session


@dataclass(frozen=True)
class Transfer:
    """Moves states between the device and the host, beside what else the pool is asked to move."""

    engine: Engine
    pool: SlabPool
    limits: Limits
    keeping: Keeping
    lifetimes: Lifetimes

    def take_out(self, session: Session, notes: str = "") -> SequenceState:
        """The state, on the host, with a note of the caller's own."""
        working, device = self.keeping.working(session), self.engine.using_device()
        with working as sequence, self.pool.transfers, device:
            return on_host(self.engine.export_state(sequence, notes))

    def bring_in(
        self, state: SequenceState, label: str, owner: str, retriever: Retriever, request_id: str = ""
    ) -> str:
        """A new session that continues a checked state; its id."""
        call, tokens = Call("import", "", request_id), state.tokens.tolist()
        with self.pool.transfers, self.engine.using_device():
            moved = on_device(state, self.pool.device)
            with self.limits.new_session(owner):
                sequence = self.keeping.with_slab(partial(self.engine.import_state, moved, owner, retriever))
                stored = partial(self.keeping.created, call=call, tokens=tokens)
                return self.lifetimes.begin(sequence, label, "session imported", stored, request_id)
