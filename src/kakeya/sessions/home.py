"""What a cluster asks of a runtime that is one of its homes: who is here, and sessions that come and go.

Sessions move between servers that have a state directory each.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kakeya.engine.engine import Engine
from kakeya.sessions.answers import Answers
from kakeya.sessions.describing import describe_all
from kakeya.sessions.keeping import Keeping
from kakeya.sessions.lifetimes import Lifetimes
from kakeya.sessions.limits import Limits
from kakeya.sessions.store import SessionStore
from kakeya.storage.handoffs import Leaving
from kakeya.storage.session_file import unpacked
from kakeya.types import OwnerUsage, SessionInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Home:
    """The side of a runtime that its cluster sees. It is asked for the sessions of all owners."""

    engine: Engine
    store: SessionStore
    limits: Limits
    answers: Answers
    keeping: Keeping
    lifetimes: Lifetimes

    @property
    def epoch(self) -> int:
        """How often the state directory was taken over; 0 unless it is fenced."""
        return self.keeping.epoch

    def check(self) -> None:
        """Raises Fenced when another process has taken the state directory over: this one must end."""
        self.keeping.check_home()

    # Who is here.

    def session_ids(self) -> list[str]:
        """Of all owners."""
        return [each.session_id for each in self.store.all()]

    def count_sessions(self) -> tuple[int, int]:
        """How many sessions there are, and how many of them a front end holds for its clients."""
        sessions = self.store.all()
        return len(sessions), sum(bool(each.holder) for each in sessions)

    def has_session(self, session_id: str) -> bool:
        """Whether somebody's session of this id is here."""
        return self.store.has(session_id)

    def movable(self) -> dict[str, bool]:
        """Sessions that may live at any server, since no front end holds them, and whether each generates."""
        return {each.session_id: each.state == "generating" for each in self.store.all() if not each.holder}

    def by_age(
        self, owner: str, page_size: int, after: tuple[float, str]
    ) -> tuple[list[tuple[float, SessionInfo]], bool]:
        """The owner's sessions with the times of their creation, the oldest first, after the one with this
        time and id; whether there are more. A session keeps its place in this order when it moves."""
        sessions, has_more = self.store.by_age(owner, page_size, after)
        return [(each.created_at, info) for each, info in describe_all(self.engine, sessions)], has_more

    def usage(self) -> dict[str, OwnerUsage]:
        """What each owner uses here. Tokens are all that it spent since the process began."""
        return self.limits.usage()

    def count_elsewhere(self, usage: Mapping[str, OwnerUsage]) -> None:
        """Let quotas count what owners use at other servers; tokens are those spent since the last call."""
        self.limits.count_elsewhere(usage)

    # Sessions that come and go.

    def hand_over(
        self, session_id: str, peer: str, send: Callable[[Sequence[bytes | memoryview]], None]
    ) -> int:
        """Give a session that rests to another server; returns how many bytes it took.

        `send` returns when the peer has stored it, and raises when that is not known: the session can then be
        used nowhere until `settle` is told what came of it. Raises SessionNotFound and SessionBusy.
        """
        session = self.store.find(session_id)
        with self.keeping.handing_over(session, peer) as parts:
            send(parts)
        self.lifetimes.forget(session)
        size = sum(map(len, parts))
        log.info("session handed over", extra={"session_id": session_id, "peer": peer, "bytes": size})
        return size

    def take_in(self, file: bytes | bytearray) -> str:
        """A session that another server hands over, stored when this returns; its id, which stays.

        It sleeps until it is used. Raises StateMismatch, and Conflict for one that was refused before.
        """
        moved = unpacked(file)
        session = self.keeping.take_in(moved, self.answers)
        self.store.restore(session)
        self.limits.session_recovered(session.owner)
        log.info("session taken in", extra={"session_id": session.session_id, "epoch": moved.epoch})
        return session.session_id

    def was_taken(self, session_id: str, epoch: int) -> bool:
        """Whether a session was taken in here under this epoch. If not, it never will be."""
        return self.keeping.was_taken(session_id, epoch)

    def leaving(self) -> list[Leaving]:
        """Sessions that were being handed over, and nobody knows whether they were taken."""
        return self.keeping.leaving()

    def settle(self, leaving: Leaving, *, taken: bool) -> None:
        """End the doubt about a session: its peer has it, or it is at home here again."""
        session = self.store.find(leaving.session_id)
        with session.lock:
            if not taken:
                self.keeping.stay(session)
                return
            self.keeping.left(session)
        self.lifetimes.forget(session)
