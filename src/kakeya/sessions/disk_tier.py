"""Sessions on the disk: their keys and values as snapshots, written beside the engine, and read back."""

import logging
import queue
import threading
import time
from array import array
from concurrent.futures import Future

from kakeya.engine.moves import Moves
from kakeya.engine.moving import rebuild_start
from kakeya.engine.recall import Turn
from kakeya.engine.slab import SlabGeometry
from kakeya.engine.state import SequenceState
from kakeya.engine.state_bytes import decode_state, encode_state
from kakeya.errors import KakeyaError, SessionBusy, SessionNotFound, StateMismatch, Unavailable
from kakeya.observer import EngineObserver
from kakeya.sessions.session import Asleep, Session
from kakeya.storage.records import Details, StoredAnswer
from kakeya.storage.store import StateStore

log = logging.getLogger(__name__)


class DiskTier:
    """`save` and `load` wait for the disk. `save_soon` leaves it to a thread of its own, from `start` on."""

    def __init__(
        self,
        store: StateStore,
        moves: Moves,
        fingerprint: str,
        geometry: SlabGeometry,
        period: int,
        block: int,
        observer: EngineObserver,
    ) -> None:
        self._store, self._moves, self._fingerprint, self._geometry = store, moves, fingerprint, geometry
        self.period, self._block = period, block
        self._observer = observer
        self._queue: queue.SimpleQueue[Session | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued: set[Session] = set()
        self._saving: set[Session] = set()
        self._thread = threading.Thread(target=self._live, name="kakeya-snapshots", daemon=True)

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._thread.start()

    def stop(self) -> None:
        """Save what was asked for, and end. Idempotent."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()

    # Onto the disk.

    def is_saved(self, session: Session, computed: int) -> bool:
        """Whether the newest snapshot has all that is computed."""
        return session.snapshot is not None and session.snapshot.computed == computed

    def is_being_saved(self, session: Session) -> bool:
        """Whether its state in host memory is still read."""
        with self._lock:
            return session in self._saving

    def progressed(self, session: Session, length: int) -> None:
        """The stored history has this length: a snapshot is written when the last one is too old."""
        computed = 0 if session.snapshot is None else session.snapshot.computed
        if length - computed > self.period:
            self.save_soon(session)

    def save_soon(self, session: Session) -> None:
        """Write a snapshot of what it has by then."""
        with self._lock:
            if session not in self._queued:
                self._queued.add(session)
                self._queue.put(session)

    def save(self, session: Session, state: SequenceState, tokens: "array[int]") -> None:
        """Store a state on the host, and what is not stored yet of its history. Raises StorageFailed."""
        with session.saving:
            if session.snapshot is not None and session.snapshot.computed >= state.committed:
                return  # another thread was first
            self._catch_up(session, tokens)
            needed_from = rebuild_start(state.committed, state.sink, self._geometry, self._block)
            session.snapshot = self._store.save(
                session.session_id, session.history, encode_state(state), state.committed, needed_from
            )

    def settle(self, session: Session, tokens: "array[int]") -> None:
        """It sleeps on the disk: what is stored is all there is."""
        self._catch_up(session, tokens)
        self.note(session, is_open=False).result()

    def rested(self, session: Session, length: int) -> None:
        """A generate is over: store its counters, and write what could not be written while it ran."""
        self.note(session, is_open=True)
        self.progressed(session, length)

    def note(self, session: Session, *, is_open: bool, answer: StoredAnswer | None = None) -> "Future[None]":
        """Store its counters and when it was used, and what a call on it was answered with."""
        details, used_at = details_of(session), _used_at(session)
        return self._store.update(session.session_id, details, used_at, answer, is_open=is_open)

    def woken(self, session: Session) -> None:
        """It may go on from here. Where that is not stored as it happens, say that what is stored is old."""
        if not self._store.is_durable:
            self.note(session, is_open=True).result()

    def _catch_up(self, session: Session, tokens: "array[int]") -> None:
        if self._store.is_durable:
            return
        self._store.write_rest(session.session_id, session.history, tokens).result()

    # And back.

    def turns(self, session: Session) -> tuple[Turn, ...]:
        """What its turns brought back, as far as it may have to be computed again."""
        return tuple(Turn(each.position, each.recalled) for each in self._store.turns_of(session.history))

    def load(self, session: Session, asleep: Asleep) -> "tuple[SequenceState | None, array[int]]":
        """Its state and its history. There is no state if no snapshot was written, or if it is damaged,
        which is reported: all of it follows from the history. Raises StateDamaged when that is lost."""
        tokens = self._store.tokens(session.history)
        if session.snapshot is None:
            return None, tokens
        source = f"the snapshot of session {session.session_id}"
        try:
            contents = self._store.load(session.snapshot)
            return decode_state(contents, source, self._fingerprint, self._geometry, tokens), tokens
        except StateMismatch as error:
            log.error("%s is damaged and is computed again: %s", source, error)
            self._observer.snapshot_damaged()
            session.snapshot = None
            return None, tokens

    # The thread.

    def _live(self) -> None:
        while True:
            session = self._queue.get()
            if session is None:
                return
            with self._lock:
                self._queued.discard(session)
                self._saving.add(session)
            try:
                self._save_now(session)
            except (SessionNotFound, SessionBusy, Unavailable):
                pass  # closed in the meantime, it recalls, or the engine is gone
            except KakeyaError as error:
                log.error("no snapshot could be written: %s", error)
            except Exception:  # a fault of ours: other sessions must have theirs
                log.exception("no snapshot could be written")
            finally:
                with self._lock:
                    self._saving.discard(session)

    def _save_now(self, session: Session) -> None:
        where = session.where
        if isinstance(where, Asleep):
            is_saved = self.is_saved(session, where.computed)
            if where.state is not None and where.tokens is not None and not is_saved:
                # Its own: once it has woken, the engine puts tokens there that nobody has taken.
                self.save(session, where.state, where.tokens[: where.length])
        elif self._store.is_durable:
            state = self._moves.copy_state(where)
            self.save(session, state, where.tokens)
            self._moves.buffers.give_back(state.storage)


def details_of(session: Session) -> Details:
    """What is stored of it beside its tokens."""
    recall = session.recall
    return Details(
        session.client_label,
        session.eos_token_ids,
        session.turns,
        session.generated_tokens,
        None if recall is None else recall.to_json(),
        session.holder,
        session.created_at,
    )


def _used_at(session: Session) -> float:
    return time.time() - session.idle_seconds
