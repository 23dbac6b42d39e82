"""Sessions in a state directory: stored before their clients are told, and asleep when they have no slab."""

import logging
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from kakeya.engine.engine import Engine
from kakeya.engine.recall import Retriever
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.slab import SlabPool
from kakeya.engine.state import RecallState, geometry_name
from kakeya.engine.stream import EventStream
from kakeya.errors import KakeyaError, SessionBusy, SessionNotFound, StorageFailed, Unavailable
from kakeya.observer import EngineObserver
from kakeya.sessions.answers import Answers, Call
from kakeya.sessions.disk_tier import DiskTier, details_of
from kakeya.sessions.hibernation import Hibernation
from kakeya.sessions.journal import GenerateJournal, StoredGenerate
from kakeya.sessions.keeping import Keeping
from kakeya.sessions.session import Asleep, Session
from kakeya.sessions.store import SessionStore
from kakeya.sessions.stored_stream import RecordedStoredStream, StoredStream
from kakeya.storage.handoffs import Leaving
from kakeya.storage.records import StoredAnswer, StoredSession
from kakeya.storage.session_file import SessionFile
from kakeya.storage.store import StateStore
from kakeya.storage.turns import StoredTurn
from kakeya.types import Document, TierFacts, TokenRange

log = logging.getLogger(__name__)
T = TypeVar("T")
# A session that would have expired while no server ran can still be used for so long: clocks are set.
_GRACE_S = 3600.0


class Durable(Keeping):
    """Over an open state directory, which it closes."""

    def __init__(
        self,
        store: StateStore,
        engine: Engine,
        pool: SlabPool,
        fingerprint: str,
        block: int,
        sessions: SessionStore,
        observer: EngineObserver,
        retriever: Callable[[], Retriever | None] = lambda: None,
    ) -> None:
        """Raises ConfigError when the directory has sessions of another model or geometry."""
        config = store.config
        store.check_model(fingerprint, geometry_name(pool.geometry, spare=False))
        self._store, self._sessions, self._geometry = store, sessions, pool.geometry
        period = config.snapshot_tokens or pool.geometry.cache.window
        self._disk = DiskTier(store, engine.moves, fingerprint, pool.geometry, period, block, observer)
        self._tiers = Hibernation(
            engine.moves, pool.geometry, self._disk, config.host_tier_bytes, block, observer, retriever
        )
        self._ends_lock = threading.Lock()
        self._ends: list[StoredAnswer] = []  # of generates that are over, which is not stored yet
        self._disk.start()

    # What was there before.

    def recovered(self) -> list[Session]:
        """All sessions, asleep on the disk. Those that went on without being stored are lost."""
        stored = self._store.sessions()
        lost = [each for each in stored if each.is_open and not self._store.was_durable]
        for each in lost:
            self._store.delete(each.session_id)
        if lost:
            log.warning("%d sessions were awake in a crash of a server with durability none", len(lost))
        self._store.take_over()
        gone, turns = {each.session_id for each in lost}, self._store.newest_turns()
        kept = [each for each in stored if each.session_id not in gone]
        sessions = [self._asleep(each, turns.get(each.history)) for each in kept]
        leaving = {each.session_id for each in self._store.leaving()}
        for session in sessions:
            session.is_leaving = session.session_id in leaving
        return sessions

    def _asleep(self, stored: StoredSession, turn: StoredTurn | None) -> Session:
        details, snapshot = stored.details, stored.snapshot
        computed = 0 if snapshot is None else snapshot.computed
        eos, recall = details.eos_token_ids, _recall_after(details.recall, turn)
        asleep = Asleep(stored.length, computed, stored.sink, eos, self._geometry, recall)
        session = Session(
            stored.session_id,
            stored.owner,
            details.client_label,
            None,
            stored.number,
            asleep,
            stored.history,
            snapshot,
            turns=details.turns,
            generated_tokens=details.generated_tokens,
            holder=details.holder,
            created_at=details.created_at,
        )
        session.last_used_at -= self.idle_since(stored.used_at)
        return session

    def idle_since(self, used_at: float) -> float:
        idle, ttl = max(0.0, time.time() - used_at), self._store.config.hibernated_ttl_s
        return idle if ttl is None else min(idle, max(0.0, ttl - _GRACE_S))

    def recall_answers(self, answers: Answers) -> None:
        """Remember what earlier processes answered."""
        lengths = {each.session_id: each.length for each in self._store.sessions()}
        stored = [_ended(each, lengths) for each in self._store.answers()]
        _remember([each for each, _ in stored], lengths, answers)
        self._ends += [each for each, was_open in stored if was_open]
        try:
            self._store_ends()
        except StorageFailed as error:
            log.warning("answers that a crash has cut short are not stored as such yet: %s", error)

    def _store_ends(self) -> None:
        """Say where generates ended that a crash or a full disk has cut short. Raises StorageFailed.

        A later process would take what comes behind them for their tokens. So nothing comes before this.
        """
        with self._ends_lock:
            ends = list(self._ends)
        if ends:
            self._store.put_answers(ends)
            with self._ends_lock:
                self._ends = [each for each in self._ends if each not in ends]

    def _end_not_stored(self, answer: StoredAnswer) -> None:
        with self._ends_lock:
            self._ends.append(answer)

    def tell_again(self, session: Session, first: object) -> EventStream | None:
        if not isinstance(first, StoredGenerate):
            return None
        return first.replay(self._store.tokens(session.history))

    # Slabs.

    @contextmanager
    def working(self, session: Session) -> Iterator[TokenSequence]:
        with session.lock:
            self._check_there(session)
            self._store_ends()
            yield self._tiers.wake(session)

    def with_slab(self, take: Callable[[], T]) -> T:
        return self._tiers.with_slab(take)

    @property
    def could_leave(self) -> int:
        return sum(session.state == "idle" for session in self._tiers.active)

    # What happens to sessions.

    def created(self, session: Session, call: Call, tokens: Sequence[int] = ()) -> None:
        told = session.session_id if call.name == "create" else [session.session_id, len(tokens)]
        answer = call.answered(session.owner, told)
        kept = tokens if self._store.is_durable else ()
        session.history = self._store.add(self._stored(session, 0), kept, answer).result()
        self._tiers.came(session)
        if tokens:  # it comes from elsewhere, with more than should ever be computed again
            self._disk.save_soon(session)

    def forked(self, session: Session, original: Session, call: Call) -> None:
        assert session.sequence is not None
        length = session.sequence.committed
        answer = call.answered(session.owner, [session.session_id, length])
        stored = self._stored(session, length)
        if self._store.is_durable:
            added = self._store.fork(stored, original.history, original.session_id, answer)
            session.history, session.snapshot = added.result()
        else:
            session.history = self._store.add(stored, (), answer).result()
        self._tiers.came(session)

    def appended(self, session: Session, length: int, tokens: Sequence[int], call: Call) -> None:
        if self._store.is_durable:
            answer = call.answered(session.owner, length)
            start = length - len(tokens)
            self._store.write(session.history, start, tokens, answer).result()

    def stream(self, session: Session, call: Call, wake: Callable[[], None], limit: int) -> EventStream:
        if not self._store.is_durable:
            return super().stream(session, call, wake, limit)
        stream = RecordedStoredStream(wake, limit) if call.request_id else StoredStream(wake)
        progressed = self._disk.progressed
        stream.journal = GenerateJournal(self._store, session, call, progressed, self._end_not_stored)
        return stream

    def rested(self, session: Session) -> None:
        try:
            self._disk.rested(session, session.sequence.committed if session.sequence else 0)
        except KakeyaError as error:  # closed: what is not stored here is counters
            log.info("counters of a session are not stored: %s", error)

    def recalled(self, session: Session, named: Sequence[TokenRange], call: Call) -> None:
        answer = call.answered(session.owner, [(each.start, each.end) for each in named])
        self._disk.note(session, is_open=True, answer=answer).result()

    @contextmanager
    def closing(self, session: Session, *, expired: bool = False) -> Iterator[None]:
        with session.lock:
            self._check_there(session)
            if expired and not self._has_expired(session):
                raise SessionBusy("the session was used in the meantime")
            self._store.delete(session.session_id)
            self._tiers.went(session)
            yield

    def sweep(self, idle_ttl: float | None) -> list[Session]:
        for session in self._tiers.active if idle_ttl is not None else ():
            if session.idle_seconds >= (idle_ttl or 0) and session.lock.acquire(blocking=False):
                try:
                    self._tiers.sleep(session, on_disk=True)
                except StorageFailed as error:  # what has expired may make the room
                    log.warning("an idle session stays awake: %s", error)
                finally:
                    session.lock.release()
        return list(filter(self._has_expired, self._sessions.all()))

    def _has_expired(self, session: Session) -> bool:
        ttl = self._store.config.hibernated_ttl_s
        return ttl is not None and session.sequence is None and session.idle_seconds >= ttl

    # Sessions that move between servers.

    @property
    def epoch(self) -> int:
        return self._store.epoch

    def check_home(self) -> None:
        self._store.check_home()

    @contextmanager
    def handing_over(self, session: Session, peer: str) -> Iterator[list[bytes | memoryview]]:
        with session.lock:
            self._check_there(session)
            self._store_ends()
            self._tiers.settle_down(session)
            if session.sequence is not None:
                raise SessionBusy("the session is generating, and moves when it rests")
            epoch = self._store.leave(session.session_id, peer)
            session.is_leaving = True
            yield self._store.pack(session.session_id, epoch)
            self.left(session)

    def left(self, session: Session) -> None:
        self._store.left(session.session_id)
        self._tiers.went(session)

    def stay(self, session: Session) -> None:
        self._store.stay(session.session_id)
        session.is_leaving = False

    def leaving(self) -> list[Leaving]:
        return self._store.leaving()

    def take_in(self, moved: SessionFile, answers: Answers) -> Session:
        owner = moved.session.owner
        stored = self._store.take_in(moved, self._sessions.next_number(owner))
        _remember(moved.answers, {stored.session_id}, answers)
        return self._asleep(stored, moved.turns[-1] if moved.turns else None)

    def was_taken(self, session_id: str, epoch: int) -> bool:
        return self._store.was_taken(session_id, epoch)

    @property
    def has_documents(self) -> bool:
        return True

    def documents(self, kind: str) -> list[Document]:
        return self._store.documents(kind)

    def change_documents(
        self, put: Sequence[Document], delete: Sequence[tuple[str, str]] = ()
    ) -> "Future[None]":
        return self._store.change_documents(put, delete)

    def tiers(self) -> TierFacts:
        sessions = self._sessions.all()
        asleep = [each.asleep for each in sessions if each.sequence is None]
        host = sum(each is not None and each.state is not None for each in asleep)
        config = self._store.config
        return TierFacts(
            active=len(sessions) - len(asleep),
            host=host,
            disk=len(asleep) - host,
            host_bytes=self._tiers.host_bytes,
            disk_bytes=self._store.disk_bytes,
            host_limit=config.host_tier_bytes,
            disk_limit=config.disk_tier_bytes,
            lag_tokens=max(map(_lag, sessions), default=0),
        )

    def close(self) -> None:
        """Put every session to sleep on the disk, so that the next server need not compute anything."""
        self._tiers.stop()
        for session in self._sessions.all():
            with session.lock:
                try:
                    self._tiers.settle_down(session)
                except KakeyaError as error:
                    log.error("session %s could not be stored: %s", session.session_id, error)
        self._disk.stop()

    def end(self) -> None:
        """The engine has ended, and nothing more happens."""
        self._tiers.stop()
        self._disk.stop()
        self._store.close()

    def _check_there(self, session: Session) -> None:
        """Raises SessionNotFound when it was closed while its lock was waited for."""
        if self._sessions.get(session.session_id, session.owner) is not session:
            raise SessionNotFound(f"no session {session.session_id!r}")
        if session.is_leaving:
            raise Unavailable(f"session {session.session_id!r} is on its way to another server")

    def _stored(self, session: Session, length: int) -> StoredSession:
        assert session.sequence is not None
        return StoredSession(
            session.session_id,
            session.owner,
            session.number,
            session.history,
            length,
            session.sequence.slab.sink,
            details_of(session),
            time.time(),
            is_open=True,
        )


def _ended(stored: StoredAnswer, lengths: Mapping[str, int]) -> tuple[StoredAnswer, bool]:
    """The answer, and whether it was that of a generate that never ended: it has ended where its session's
    history does."""
    length = lengths.get(stored.session_id)
    if stored.call != "generate" or stored.answer["count"] is not None or length is None:
        return stored, False
    return replace(stored, answer=stored.answer | {"count": length - stored.answer["start"]}), True


def _remember(stored: Sequence[StoredAnswer], sessions: Container[str], answers: Answers) -> None:
    """Have answers of other processes again, those about a session as long as it is there."""
    for each in stored:
        answer = each.answer
        if each.call == "generate":
            if each.session_id not in sessions:
                continue
            answer = StoredGenerate.read(answer)
        elif each.call in ("fork", "import"):
            answer = (answer[0], answer[1])
        elif each.call == "recall":
            answer = tuple(TokenRange(*pair) for pair in answer)
        answers.remember(each.owner, Call(each.call, each.session_id, each.request_id), answer)


def _recall_after(written: str | None, turn: StoredTurn | None) -> RecallState | None:
    """What a session has of recall after its last turn, where what was written of it may be older."""
    if written is None:
        return None
    kept = RecallState.from_json(written)
    if turn is None or turn.end <= kept.turn_from:
        return kept
    return replace(kept, recalled=turn.recalled, past=(), wanted=None, turn_from=turn.end)


def _lag(session: Session) -> int:
    """Tokens of a session that would have to be computed again after a crash."""
    where = session.where
    computed = where.computed if isinstance(where, Asleep) else where.slab.committed
    return computed - (0 if session.snapshot is None else session.snapshot.computed)
