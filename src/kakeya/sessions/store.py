"""The sessions a server holds, found by id and visible to their owner alone."""

import secrets
import threading
from collections import Counter

from kakeya.engine.sequence import TokenSequence
from kakeya.errors import SessionNotFound
from kakeya.sessions.paging import check_page_size, last_number, page_token
from kakeya.sessions.session import Session


class SessionStore:
    """Sessions by unguessable id. Safe to use from any thread."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._sessions: dict[str, Session] = {}
        self._created: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, sequence: TokenSequence, client_label: str) -> Session:
        """A new session that can be found from now on."""
        session = self.new(sequence, client_label)
        self.restore(session)
        return session

    def new(self, sequence: TokenSequence, client_label: str) -> Session:
        """A new session that nobody finds before `restore`."""
        session_id, owner = self._prefix + _new_id(), sequence.owner
        with self._lock:
            self._created[owner] += 1
            return Session(session_id, owner, client_label, sequence, self._created[owner])

    def get(self, session_id: str, owner: str) -> Session:
        """The owner's session. Someone else's is as unknown as one that never was."""
        with self._lock:
            session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise SessionNotFound(f"no session {session_id!r}")
        return session

    def find(self, session_id: str) -> Session:
        """Anybody's session. Raises SessionNotFound."""
        with self._lock:
            session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFound(f"no session {session_id!r}")
        return session

    def has(self, session_id: str) -> bool:
        """Whether it is anybody's session."""
        with self._lock:
            return session_id in self._sessions

    def next_number(self, owner: str) -> int:
        """The number of the owner's next session."""
        with self._lock:
            self._created[owner] += 1
            return self._created[owner]

    def restore(self, session: Session) -> None:
        """Let a session be found under its own name."""
        with self._lock:
            self._created[session.owner] = max(self._created[session.owner], session.number)
            self._sessions[session.session_id] = session

    def remove(self, session: Session) -> bool:
        """Forget a session; False when somebody else just did."""
        with self._lock:
            return self._sessions.pop(session.session_id, None) is not None

    def all(self) -> list[Session]:
        with self._lock:
            return list(self._sessions.values())

    def owned_by(self, owner: str) -> list[Session]:
        """The owner's sessions, oldest first."""
        return [session for session in self.all() if session.owner == owner]

    def page(self, owner: str, size: int, token: str) -> tuple[list[Session], str]:
        """Up to `size` of the owner's sessions from where `token` says, and the token of the next page."""
        check_page_size(size)
        after = last_number(token)
        rest = [session for session in self.owned_by(owner) if session.number > after]
        shown = rest[:size]
        return shown, page_token(shown[-1].number) if len(rest) > size else ""

    def by_age(self, owner: str, size: int, after: tuple[float, str]) -> tuple[list[Session], bool]:
        """Up to `size` of the owner's sessions, the oldest first, that come after the age `after`; whether
        there are more."""
        check_page_size(size)
        rest = sorted((each for each in self.owned_by(owner) if each.age > after), key=lambda each: each.age)
        return rest[:size], len(rest) > size

    def count(self, state: str) -> int:
        """How many sessions are in a state."""
        return sum(session.state == state for session in self.all())

    def live_bytes(self) -> int:
        """Bytes of keys and values in all slabs that a next token could attend to."""
        return sum(session.live_bytes for session in self.all())


def _new_id() -> str:
    """Unguessable, and never mistaken for an option of a command."""
    while (name := secrets.token_urlsafe(24)).startswith("-"):
        pass
    return name
