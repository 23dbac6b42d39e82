"""Sessions without a slab: they sleep in host memory, then on the disk, and wake when they are needed.

The least recently used of the idle ones leaves first; one that works never does. Copies are made by the
thread that needs the slab, beside the engine. Where sessions wake again and again, one slab is kept free for
the next, so a wake waits for nobody.
"""

import logging
import math
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

from kakeya.engine.moves import Moves
from kakeya.engine.recall import Retriever
from kakeya.engine.request import FINISHED
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.slab import SlabGeometry
from kakeya.engine.state import RecallState, SequenceState
from kakeya.errors import Conflict, InvariantViolation, NoFreeSlab, SessionNotFound, StorageFailed
from kakeya.observer import EngineObserver
from kakeya.sessions.disk_tier import DiskTier
from kakeya.sessions.reserve import Reserve
from kakeya.sessions.session import Asleep, Session

log = logging.getLogger(__name__)
T = TypeVar("T")
# How long a call waits for a slab while all of them work, and how often it looks again.
PATIENCE_S = 30.0
_LOOK_EVERY_S = 0.005
# With fewer slabs, one of them in reserve would be too many.
_LEAST_FOR_RESERVE = 4
# A session that has rested while so many others woke will hardly be the next one to be used.
_WAKES_TO_REST = 2


class Hibernation:
    """Who holds a session's lock may call `wake` and `sleep` for it. Safe from any thread."""

    def __init__(
        self,
        moves: Moves,
        geometry: SlabGeometry,
        disk: DiskTier,
        host_bytes: int,
        block: int,
        observer: EngineObserver,
        retriever: Callable[[], Retriever | None] = lambda: None,
        patience: float = PATIENCE_S,
    ) -> None:
        self._moves, self._geometry, self._disk, self._block = moves, geometry, disk, block
        self._retriever = retriever
        self._host_limit, self._observer, self._patience = host_bytes, observer, patience
        self._lock = threading.Lock()
        self._active: dict[Session, None] = {}
        self._host: OrderedDict[Session, int] = OrderedDict()  # and their bytes, the oldest sleeper first
        self._wakes: deque[float] = deque(maxlen=_WAKES_TO_REST)
        self._left_early: Session | None = None
        self._reserve = Reserve(self._keep_reserve)
        self._reserve.start()

    @property
    def active(self) -> list[Session]:
        with self._lock:
            return list(self._active)

    @property
    def host_bytes(self) -> int:
        with self._lock:
            return sum(self._host.values())

    def came(self, session: Session) -> None:
        """It has a slab."""
        with self._lock:
            self._active[session] = None

    def went(self, session: Session) -> None:
        """It is no more."""
        with self._lock:
            self._active.pop(session, None)
            self._host.pop(session, None)

    def stop(self) -> None:
        """Put nobody to sleep any more, unless asked to. Idempotent."""
        self._reserve.stop()

    # Slabs.

    def with_slab(self, take: Callable[[], T]) -> T:
        """What `take` returns, once a slab is free for it. Others are put to sleep for that.

        Raises NoFreeSlab when all sessions go on working, and StorageFailed when there is no room to sleep.
        """
        end = time.monotonic() + self._patience
        while True:
            # To be refused first would take as long as a step.
            has_made_room = self._moves.is_full and self._make_room() is not None
            try:
                return take()
            except NoFreeSlab:
                if has_made_room or self._make_room() is not None:
                    continue
                if time.monotonic() >= end:
                    raise
                time.sleep(_LOOK_EVERY_S)

    def _make_room(self, unused_since: float = math.inf) -> Session | None:
        """Put the least recently used session that is idle to sleep, of those not used since then."""
        for session in sorted(self.active, key=lambda each: each.last_used_at):
            if session.last_used_at <= unused_since and session.lock.acquire(blocking=False):
                try:
                    if self.sleep(session):
                        return session
                finally:
                    session.lock.release()
        return None

    def _keep_reserve(self) -> None:
        """Free a slab for the next wake. Only a session that has rested while others woke leaves for that:
        where all that are used have a slab, they keep it."""
        with self._lock:
            unused_since = self._wakes[0] if len(self._wakes) == _WAKES_TO_REST else -math.inf
        if self._moves.is_full:
            self._left_early = self._make_room(unused_since)

    def _expect_another(self, woken: Session) -> None:
        """One has woken, so others may. If it is the one that has just left for others, it left too early."""
        if self._moves.capacity < _LEAST_FOR_RESERVE or woken is self._left_early:
            return
        with self._lock:
            self._wakes.append(time.monotonic())
        self._reserve.look()

    # To sleep.

    def sleep(self, session: Session, *, on_disk: bool = False) -> bool:
        """Put it to sleep; False when it works or sleeps. Raises StorageFailed, and it stays awake."""
        sequence = session.sequence
        if sequence is None or _has_failed(sequence) or _works(sequence):
            return False
        try:
            state = self._moves.lend(sequence)
        except (Conflict, InvariantViolation, SessionNotFound):
            return False
        except Exception:
            if _has_failed(sequence):
                return False  # the engine could not take it in
            raise
        try:
            asleep = self._put_away(session, sequence, state, on_disk=on_disk)
        except BaseException:
            self._moves.stay(sequence)
            raise
        session.asleep, session.sequence = asleep, None
        with self._lock:
            self._active.pop(session, None)
        self._moves.leave(sequence)
        if asleep.state is not None:
            self._disk.save_soon(session)  # not before: of a slab that is lent nothing can be copied
        return True

    def settle_down(self, session: Session) -> None:
        """Have it sleep on the disk, wherever it is. One that works stays. Raises StorageFailed."""
        if not self.sleep(session, on_disk=True):
            self._leave_host(session)

    def _put_away(
        self, session: Session, sequence: TokenSequence, state: SequenceState, *, on_disk: bool
    ) -> Asleep:
        tokens, eos = sequence.tokens, state.eos_token_ids
        asleep = Asleep(len(tokens), state.committed, state.sink, eos, self._geometry, state.recall)
        in_host = replace(asleep, state=state, tokens=tokens, retriever=_retriever_of(sequence))
        needed = in_host.bytes_beside + self._moves.lifted_bytes(state)
        if not on_disk and self._take_host_room(session, needed):
            try:
                return replace(in_host, state=self._moves.lift(state))
            except BaseException:
                with self._lock:
                    del self._host[session]
                raise
        if not self._disk.is_saved(session, state.committed):
            copy = self._moves.lift(state)
            self._disk.save(session, copy, tokens)
            self._moves.buffers.give_back(copy.storage)
        self._disk.settle(session, tokens)
        return asleep

    def _take_host_room(self, session: Session, needed: int) -> bool:
        """Whether the host tier has room for so many bytes, which are the session's from then on. Older
        sleepers move to the disk for that."""
        while True:
            with self._lock:  # so that no two take the same room
                if sum(self._host.values()) + needed <= self._host_limit:
                    self._host[session] = needed
                    return True
            if needed > self._host_limit or not self._move_to_disk():
                return False

    def _move_to_disk(self) -> bool:
        """Move the oldest sleeper in host memory to the disk; False when none can be moved."""
        with self._lock:
            sleepers = list(self._host)
        for session in sleepers:
            if session.lock.acquire(blocking=False):
                try:
                    return self._leave_host(session)
                except StorageFailed as error:
                    log.warning("a sleeping session stays in host memory: %s", error)
                    return False
                finally:
                    session.lock.release()
        return False

    def _leave_host(self, session: Session) -> bool:
        asleep = session.asleep
        if asleep is None or asleep.state is None or asleep.tokens is None:
            return True  # it woke in the meantime
        if not self._disk.is_saved(session, asleep.computed):
            self._disk.save(session, asleep.state, asleep.tokens)
        self._disk.settle(session, asleep.tokens)
        session.asleep = replace(asleep, state=None, tokens=None, retriever=None)
        with self._lock:
            self._host.pop(session, None)
        self._recycle(session, asleep.state)
        return True

    # And back.

    def wake(self, session: Session) -> TokenSequence:
        """Give it a slab. Raises NoFreeSlab, StorageFailed, and StateDamaged when its history is lost.

        Does not wait for the engine if a slab is free. Should the engine not be able to take it in, it sleeps
        on, and what is asked of its sequence raises the reason.
        """
        if session.sequence is not None:
            return session.sequence
        began, asleep = time.monotonic(), session.asleep
        assert asleep is not None
        state, tokens = asleep.state, asleep.tokens
        if state is None or tokens is None:
            state, tokens = self._disk.load(session, asleep)
        sequence = self._prepare(session, asleep, state)
        try:
            self._disk.woken(session)
            entered = self._enter(sequence, state, tokens)
        except BaseException:
            self._moves.leave(sequence)
            raise
        session.sequence, session.asleep = sequence, None
        with self._lock:
            self._host.pop(session, None)
            self._active[session] = None
        entered.add_done_callback(partial(self._entered, session, asleep))
        self._observer.session_woken(asleep.place, time.monotonic() - began)
        self._expect_another(session)
        return sequence

    def _prepare(self, session: Session, asleep: Asleep, state: SequenceState | None) -> TokenSequence:
        recall = asleep.recall
        if recall is not None and asleep.state is None:
            recall = self._read_recall(session, recall, state)
        prepare = partial(self._moves.prepare, session.owner, asleep.eos_token_ids, asleep.sink)
        retriever = asleep.retriever or self._retriever()
        return self.with_slab(lambda: prepare(recall, retriever))

    def _read_recall(self, session: Session, known: RecallState, state: SequenceState | None) -> RecallState:
        """Of a session on the disk: what its slots hold, and the turns that are computed again. What a client
        named is newer than its snapshot."""
        turns = self._disk.turns(session)
        if state is None or state.recall is None:
            return replace(known, recalled=(), past=turns)
        held = state.recall
        past = tuple(turn for turn in turns if turn.at >= state.committed)
        return replace(known, recalled=held.recalled, past=past or held.past)

    def _enter(
        self, sequence: TokenSequence, state: SequenceState | None, tokens: "array[int]"
    ) -> "Future[None]":
        if state is not None:
            return self._moves.enter(sequence, state, tokens)
        self._moves.rebuild(sequence, tokens, self._block)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _entered(self, session: Session, asleep: Asleep, entered: "Future[None]") -> None:
        """The engine has its sequence, or could not take it in, and nobody has used it. Whoever woke it still
        has its lock, or has done nothing."""
        error = entered.exception()
        if error is None:
            if asleep.state is not None:
                self._recycle(session, asleep.state)
            return
        log.error("a session could not wake and sleeps on", exc_info=error)
        session.sequence, session.asleep = None, asleep
        with self._lock:
            self._active.pop(session, None)
            if asleep.state is not None:
                taken = self._moves.buffers.taken_by(asleep.state.storage.nbytes)
                self._host[session] = asleep.bytes_beside + taken

    def _recycle(self, session: Session, state: SequenceState) -> None:
        if not self._disk.is_being_saved(session):
            self._moves.buffers.give_back(state.storage)


def _retriever_of(sequence: TokenSequence) -> Retriever | None:
    """What searches its past, if anything does."""
    if sequence.recall is None or sequence.recall.retriever is None:
        return None
    return sequence.recall.retriever()


def _has_failed(sequence: TokenSequence) -> bool:
    return sequence.error is not None


def _works(sequence: TokenSequence) -> bool:
    """Whether it surely generates: others are asked on the engine thread, at most a step later."""
    request = sequence.request
    return request is not None and request.state is not FINISHED
