"""The sessions a server holds, found by id and visible to their owner alone."""

import secrets
import threading

from kakeya.engine.sequence import Sequence
from kakeya.errors import SessionNotFound
from kakeya.sessions.session import Session


class SessionStore:
    """Sessions by unguessable id. Safe to use from any thread."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def add(self, sequence: Sequence, client_label: str) -> Session:
        session = Session(secrets.token_urlsafe(24), sequence.owner, client_label, sequence)
        with self._lock:
            self._sessions[session.session_id] = session
        return session

    def get(self, session_id: str, owner: str) -> Session:
        """The owner's session. Someone else's is as unknown as one that never was."""
        with self._lock:
            session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise SessionNotFound(f"no session {session_id!r}")
        return session

    def remove(self, session: Session) -> None:
        with self._lock:
            self._sessions.pop(session.session_id, None)

    def owned_by(self, owner: str) -> list[Session]:
        with self._lock:
            return [session for session in self._sessions.values() if session.owner == owner]
