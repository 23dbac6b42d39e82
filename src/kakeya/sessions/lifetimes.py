"""How sessions begin and end: stored before anybody finds them, and closed by a call or when idle."""

import logging
from collections.abc import Callable

from kakeya.config import RuntimeConfig
from kakeya.engine.engine import Engine
from kakeya.engine.sequence import TokenSequence
from kakeya.errors import SessionBusy, SessionNotFound, StorageFailed, Unavailable
from kakeya.sessions.keeping import Keeping
from kakeya.sessions.limits import Limits
from kakeya.sessions.session import Session
from kakeya.sessions.store import SessionStore

log = logging.getLogger(__name__)


class Lifetimes:
    """Adds sessions to a store and takes them out, with their sequences and their owners' counts."""

    def __init__(
        self,
        engine: Engine,
        store: SessionStore,
        limits: Limits,
        keeping: Keeping,
        settings: RuntimeConfig,
    ) -> None:
        self._engine = engine
        self._store = store
        self._limits = limits
        self._keeping = keeping
        self._settings = settings

    def begin(
        self,
        sequence: TokenSequence,
        label: str,
        message: str,
        store: Callable[[Session], None],
        request_id: str = "",
        original: Session | None = None,
        holder: str = "",
    ) -> str:
        """Add a session once it is stored; its id. Closes the sequence when it cannot be."""
        session = self._store.new(sequence, label)
        session.holder = holder
        if original is not None:
            session.share_past(original)
        try:
            store(session)
        except BaseException:
            self._engine.close(sequence)
            raise
        self._store.restore(session)
        ids = {"session_id": session.session_id, "request_id": request_id}
        log.info(message, extra=ids | {"client_label": label})
        return session.session_id

    def end(self, session: Session, *, expired: bool = False) -> int:
        """Close a session; its final length. Raises SessionNotFound when another thread has just done so, and
        SessionBusy when one that had `expired` has been used since."""
        with self._keeping.closing(session, expired=expired):
            if not self.forget(session):
                raise SessionNotFound(f"no session {session.session_id!r}")
            length = self._close_sequence(session)
        log.info("session closed", extra={"session_id": session.session_id, "history_length": length})
        return length

    def forget(self, session: Session) -> bool:
        """Remove it from the store and from its owner's count; False when another thread has just done so."""
        if not self._store.remove(session):
            return False
        self._limits.session_closed(session.owner)
        return True

    # Idle ones.

    @property
    def shortest_ttl(self) -> float | None:
        """The shortest time after which something happens to an idle session."""
        ttls = (self._settings.session_idle_ttl_s, self.retention_s)
        return min((ttl for ttl in ttls if ttl is not None), default=None)

    @property
    def retention_s(self) -> float | None:
        """For how long an unused session is kept; None for ever."""
        state = self._settings.state
        return self._settings.session_idle_ttl_s if state is None else state.hibernated_ttl_s

    def sweep(self) -> int:
        """Close sessions that were idle for the configured time; returns how many."""
        ttl = self._settings.session_idle_ttl_s
        if self._settings.state is not None:
            return sum(map(self._expire_asleep, self._keeping.sweep(ttl)))
        if ttl is None:
            return 0
        return sum(
            session.idle_seconds >= ttl and self._expire(session, ttl) for session in self._store.all()
        )

    def _close_sequence(self, session: Session) -> int:
        if session.sequence is not None:
            return self._engine.close(session.sequence)
        assert session.asleep is not None
        return session.asleep.length

    def _expire_asleep(self, session: Session) -> bool:
        """Delete a session that slept for too long."""
        try:
            self.end(session, expired=True)
        except (SessionNotFound, SessionBusy, StorageFailed, Unavailable) as error:
            # Gone, used again, kept, or on its way elsewhere.
            log.info("an expired session is not deleted: %s", error)
            return False
        return True

    def _expire(self, session: Session, ttl: float) -> bool:
        assert session.sequence is not None
        if not self._engine.close_if(session.sequence, lambda _: session.has_expired(ttl)):
            return False
        log.info("idle session closed", extra={"session_id": session.session_id, "idle_ttl_s": ttl})
        return self.forget(session)
