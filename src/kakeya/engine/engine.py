"""The engine: one thread owns the model, the pool and the device.

Other threads talk to it through calls that queue in a bounded inbox and through event streams. The thread
answers calls, ends what is to be ended, and steps (`stepping`): plan → launch → judge → commit → emit.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence as Tokens
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kakeya.config import EngineConfig
from kakeya.engine.batch import Segment, prefill_segment
from kakeya.engine.checks import check_count, check_tokens
from kakeya.engine.constraint import Constraint
from kakeya.engine.drafting import Drafter
from kakeya.engine.ending import Ending
from kakeya.engine.inbox import Inbox
from kakeya.engine.observer import EngineObserver, Unobserved
from kakeya.engine.proposer import Proposer
from kakeya.engine.request import Follower, Request
from kakeya.engine.runner import Backend, Reduction
from kakeya.engine.scheduler import Scheduler
from kakeya.engine.scoring import score_blocks
from kakeya.engine.sequence import Sequence
from kakeya.engine.state import SequenceState, restore, snapshot
from kakeya.engine.stepping import Stepper
from kakeya.engine.stream import EventStream
from kakeya.engine.watch import Watch
from kakeya.errors import (
    DeviceLost,
    HistoryMismatch,
    InvalidArgument,
    KakeyaError,
    ResourceExhausted,
    SessionNotFound,
    Unavailable,
)
from kakeya.types import SamplingParams

log = logging.getLogger(__name__)
T = TypeVar("T")


class Engine:
    """Continuous batching over bounded slabs. Public methods may be called from any thread.

    An engine whose device fails for good, or whose thread breaks, is dead: what runs fails with Unavailable,
    and so does every later call. `ended` is done when the thread ends, with the reason if it died.
    """

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        proposer: Proposer | None = None,
        observer: EngineObserver | None = None,
    ) -> None:
        self._backend = backend
        self._config = config
        self._observer = observer or Unobserved()
        self._drafter = Drafter(proposer, backend.vocab_size)
        self._scheduler = Scheduler(config)
        self._watch = Watch(backend)
        self._ending = Ending(self._scheduler, backend.pool, self._observer)
        self._stepper = Stepper(
            backend, config, self._scheduler, self._drafter, self._ending, self._observer, self._watch
        )
        self._inbox = Inbox(config.max_waiting, self._watch)
        self._draining = False
        self._stopping = False
        self._drained = threading.Event()
        self.ended: Future[str | None] = Future()
        self.ended.set_running_or_notify_cancel()  # nobody who waits for it may cancel it
        self._thread = threading.Thread(target=self._run, name="kakeya-engine", daemon=True)
        self._thread.start()

    # The door. Each call waits for the engine thread, at most one step.

    def open(self, owner: str, eos_token_ids: Tokens[int], pinned: int | None = None) -> Sequence:
        """A new sequence on a slab of its own. Raises ResourceExhausted when none is free."""
        check_tokens(eos_token_ids, self._backend.vocab_size)
        return self._inbox.ask(lambda: self._open(owner, eos_token_ids, pinned))

    def append(self, sequence: Sequence, token_ids: Tokens[int], expected_length: int | None = None) -> int:
        """Extend the history; the tokens are computed by the next generate. Returns the new length."""
        check_tokens(token_ids, self._backend.vocab_size)
        return self._inbox.ask(lambda: self._append(sequence, token_ids, expected_length))

    def generate(
        self,
        sequence: Sequence,
        max_tokens: int,
        sampling: SamplingParams,
        follower: Follower | None = None,
        constraint: Constraint | None = None,
    ) -> EventStream:
        """Start generating; events arrive on the stream, `follower` hears of it, `constraint` is used up."""
        check_count("max_tokens", max_tokens)
        check_tokens(sampling.logit_bias, self._backend.vocab_size)
        follower = follower or Follower()
        request = Request(follower.make_stream(self._inbox.wake), max_tokens, sampling, follower, constraint)
        return self._inbox.ask(lambda: self._generate(sequence, request))

    def read(self, sequence: Sequence, view: Callable[[Sequence], T]) -> T:
        """A consistent look at a sequence: `view` runs on the engine thread."""
        return self._inbox.ask(lambda: view(self._ending.settled(sequence)))

    def read_all(self, sequences: Iterable[Sequence], view: Callable[[Sequence], T]) -> list[T]:
        """The same look at many sequences at one moment."""
        return self._inbox.ask(lambda: [view(self._ending.settled(sequence)) for sequence in sequences])

    def rest(self, sequence: Sequence) -> None:
        """See to it that a cancelled generate is over. Raises SessionBusy for one that goes on."""
        self._inbox.ask(lambda: self._ending.resting(sequence))

    def fork(self, sequence: Sequence) -> Sequence:
        """An independent copy of a resting sequence, on a slab of its own."""
        return self._inbox.ask(lambda: self._fork(sequence))

    def export_state(self, sequence: Sequence, notes: str = "") -> SequenceState:
        """A copy of a resting sequence's whole state."""
        fingerprint = self._backend.fingerprint
        return self._inbox.ask(lambda: snapshot(self._ending.resting(sequence), fingerprint, notes))

    def import_state(self, state: SequenceState, owner: str) -> Sequence:
        """A new sequence that continues where `state` was taken."""
        check_tokens(state.tokens.tolist(), self._backend.vocab_size)
        return self._inbox.ask(lambda: self._import(state, owner))

    def close(self, sequence: Sequence) -> int:
        """Cancel what runs, free the slab; returns the final history length."""
        return self._inbox.ask(lambda: self._close(sequence))

    def close_if(self, sequence: Sequence, unwanted: Callable[[Sequence], bool]) -> bool:
        """Close it if `unwanted` says so on the engine thread, where nothing can begin meanwhile."""
        return self._inbox.ask(lambda: self._close_if(sequence, unwanted))

    def score(self, token_ids: Tokens[int], pinned: int | None = None) -> Tensor:
        """Next-token logits after each token [n, vocab], in canonical blocks on a slab of its own."""
        return torch.cat(list(score_blocks(self, token_ids, pinned)))

    def score_next(self, sequence: Sequence, reduce: Reduction[T]) -> list[T]:
        """Compute the next block of a resting sequence; what `reduce` makes of its logits, in order.

        It runs on the engine thread, so it should give the device work rather than wait for it.
        """
        return self._inbox.ask(lambda: self._score_block(sequence, reduce))

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new work and wait for what runs; True when all of it ended in time."""
        self._draining = True
        self._inbox.wake()
        return self._drained.wait(timeout)

    @contextmanager
    def using_device(self) -> Iterator[None]:
        """Around what the caller's own thread has the device do. One that it finds lost ends the engine."""
        try:
            yield
        except KakeyaError:
            raise
        except Exception as error:
            self._inbox.ask(partial(self._watch.raise_if_lost, error))
            raise

    def shutdown(self) -> None:
        """Cancel what still runs and stop the thread. Idempotent."""
        self._draining = self._stopping = True
        self._inbox.close()
        self._thread.join()

    # The loop, on the engine thread like all that follows.

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._watch(self._loop)
        except BaseException as error:
            self._die(error)
        else:
            self.ended.set_result(None)
        finally:
            self._drained.set()

    def _loop(self) -> None:
        while not self._stopping:
            self._inbox.answer(wait=not self._stepper.has_work)
            self._ending.end_requests()
            self._stepper.step()
            if self._draining and not self._scheduler.active:
                self._drained.set()
        for sequence in list(self._scheduler.active):
            self._ending.cancel(sequence)
        self._inbox.close()
        self._inbox.answer(wait=False)

    # What the calls do.

    def _open(self, owner: str, eos_token_ids: Tokens[int], pinned: int | None) -> Sequence:
        self._refuse_when_draining()
        slab = self._backend.pool.allocate(pinned)
        return Sequence(slab, owner, eos_token_ids, self._drafter.new_state())

    def _append(self, sequence: Sequence, token_ids: Tokens[int], expected_length: int | None) -> int:
        self._refuse_when_draining()
        self._ending.resting(sequence)
        if expected_length is not None and expected_length != sequence.committed:
            raise HistoryMismatch(
                f"expected_history_length is {expected_length}, the history has {sequence.committed} tokens"
            )
        sequence.append(token_ids)
        self._ending.count_evicted(sequence)
        return sequence.committed

    def _generate(self, sequence: Sequence, request: Request) -> EventStream:
        self._refuse_when_draining()
        self._ending.resting(sequence)
        if not sequence.tokens:
            raise InvalidArgument("cannot generate on an empty session: append at least one token first")
        if len(self._scheduler.active) >= self._config.max_waiting:
            raise ResourceExhausted(f"{self._config.max_waiting} requests are in flight already")
        sequence.begin(request)
        self._scheduler.add(sequence)
        self._observer.request_queued()
        return request.stream

    def _fork(self, sequence: Sequence) -> Sequence:
        copy = self._open(
            self._ending.resting(sequence).owner, tuple(sequence.eos_token_ids), sequence.slab.sink
        )
        with self._released_on_failure(copy):
            copy.copy_from(sequence)
        return copy

    def _import(self, state: SequenceState, owner: str) -> Sequence:
        sequence = self._open(owner, state.eos_token_ids, state.sink)
        with self._released_on_failure(sequence):
            restore(sequence, state)
            sequence.draft = self._drafter.restore(state.draft)
        return sequence

    @contextmanager
    def _released_on_failure(self, fresh: Sequence) -> Iterator[None]:
        """A sequence that nobody gets to know must not keep its slab."""
        try:
            yield
        except BaseException:
            self._backend.pool.release(fresh.slab)
            raise

    def _close(self, sequence: Sequence) -> int:
        if self._ending.settled(sequence).request is not None:
            self._ending.cancel(sequence)
        if sequence.error is None:
            sequence.error = SessionNotFound("the session is closed")
            self._backend.pool.release(sequence.slab)
        return sequence.committed

    def _close_if(self, sequence: Sequence, unwanted: Callable[[Sequence], bool]) -> bool:
        if not unwanted(self._ending.settled(sequence)):
            return False
        self._close(sequence)
        return True

    def _score_block(self, sequence: Sequence, reduce: Reduction[T]) -> list[T]:
        block = prefill_segment(sequence, self._config.prefill_block)
        segment = Segment(sequence, block.start, block.tokens, 0, block.rows)
        sequence.slab.reserve(segment.rows)
        reduced = self._backend.score(segment, reduce)
        sequence.commit_taken()
        return reduced

    # How the engine ends before its time.

    def _die(self, error: BaseException) -> None:
        """Nobody may wait for what will not come: end every request, refuse every call."""
        log.critical("the engine died", exc_info=error)
        reason = str(error) if isinstance(error, DeviceLost) else "the engine died; its log says why"
        self._draining = True
        self.ended.set_result(reason)
        for sequence in list(self._scheduler.active):
            self._ending.bury(sequence, Unavailable(reason))
        self._inbox.refuse(reason)

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise Unavailable("the engine is draining and takes no new work")
