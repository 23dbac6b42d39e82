"""The engine: one thread owns the model, the pool and the device.

Other threads talk to it through calls that queue in a bounded inbox and through event streams. The thread
answers calls, ends what is to be ended, and steps (`stepping`): plan → launch → judge → commit → emit.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Self, TypeVar

import torch
from torch import Tensor

from kakeya.config import EngineConfig
from kakeya.engine.backend import Backend, Reduction, raise_if_lost
from kakeya.engine.batch import score_segment
from kakeya.engine.constraint import Constraint
from kakeya.engine.draft_length import DraftLength
from kakeya.engine.drafting import Drafter
from kakeya.engine.inbox import Inbox
from kakeya.engine.moves import Moves
from kakeya.engine.proposer import Proposer
from kakeya.engine.recall import Ranges, Recalls, Retriever, SessionRecall, let_search
from kakeya.engine.request import Request, RequestListener
from kakeya.engine.scheduler import Scheduler
from kakeya.engine.scoring import score_blocks
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.shared_prefixes import COMMON, SharedPrefixes
from kakeya.engine.shared_prompt import share_prompt
from kakeya.engine.state import SequenceState, restore, snapshot
from kakeya.engine.stepping import Stepper
from kakeya.engine.stream import EventStream
from kakeya.errors import (
    DeviceLost,
    HistoryMismatch,
    InvalidArgument,
    KakeyaError,
    ResourceExhausted,
    Restarting,
    Unavailable,
)
from kakeya.observer import UNOBSERVED, EngineObserver
from kakeya.types import SamplingParams, TokenRange

log = logging.getLogger(__name__)
# How long a device runs ahead before proposers are asked again, where none of their guesses was right.
_MOST_REST = 64
T = TypeVar("T")


class Engine:
    """Continuous batching over bounded slabs. Public methods may be called from any thread.

    `start` starts its thread; every other call waits for that thread, at most one step.
    The engine dies when its device fails for good or its thread breaks. Requests then fail with Unavailable,
    and so does every later call. `ended` is done when the thread ends, with the reason if the engine died.
    """

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        proposers: Sequence[Proposer] = (),
        observer: EngineObserver = UNOBSERVED,
        length: DraftLength | None = None,
    ) -> None:
        self._backend = backend
        self._config = config
        self._observer = observer
        rest = _MOST_REST if backend.runs_ahead else 0
        self._drafter = Drafter(proposers, backend.vocab_size, length, rest) if proposers else None
        self._prefixes = SharedPrefixes(
            config.share_beginnings, backend.pool, any_cut=backend.any_cut, observer=observer
        )
        self._scheduler = Scheduler(config, self._prefixes, any_cut=backend.any_cut)
        self._stepper = Stepper(backend, config, self._scheduler, self._drafter, self._prefixes)
        self._inbox = Inbox(config.max_waiting, self._checked)
        self.moves = Moves(backend, self._inbox, self._prefixes, self._drafter, self._open)
        self._recalls = Recalls(backend.pool, config.block_tokens, self._inbox.wake, any_cut=backend.any_cut)
        self._draining = False
        self._stopping = False
        self._drained = threading.Event()
        self.ended: Future[str | None] = Future()
        self.ended.set_running_or_notify_cancel()  # so that a waiter cannot cancel it
        self._thread = threading.Thread(target=self._run, name="kakeya-engine", daemon=True)

    def start(self) -> Self:
        """Start the thread. Call it once."""
        self._thread.start()
        return self

    # The calls. What `ask` is given runs on the engine thread.

    def open(
        self,
        owner: str,
        eos_token_ids: Sequence[int],
        pinned: int | None = None,
        recall: int = 0,
        retriever: Retriever | None = None,
    ) -> TokenSequence:
        """A new sequence on a slab of its own. Raises ResourceExhausted when none is free.

        Each turn may bring back `recall` tokens that left the window: what `retriever` chooses, or only what
        `recall` names.
        """
        self._check_tokens(eos_token_ids)

        def opened() -> TokenSequence:
            sequence = self._open(owner, eos_token_ids, pinned, recall)
            let_search(sequence, retriever)
            return sequence

        return self._inbox.ask(opened)

    def append(
        self, sequence: TokenSequence, token_ids: Sequence[int], expected_length: int | None = None
    ) -> int:
        """Extend the history; the tokens are computed by the next generate. Returns the new length."""
        self._check_tokens(token_ids)

        def extend() -> int:
            self._refuse_when_draining()
            sequence.rest()
            if expected_length is not None and expected_length != sequence.committed:
                raise HistoryMismatch(
                    f"expected_history_length is {expected_length}, "
                    f"the history has {sequence.committed} tokens"
                )
            sequence.append(token_ids)
            return sequence.committed

        return self._inbox.ask(extend)

    def generate(
        self,
        sequence: TokenSequence,
        max_tokens: int,
        sampling: SamplingParams,
        listener: RequestListener | None = None,
        constraint: Constraint | None = None,
        prediction: Sequence[int] = (),
    ) -> EventStream:
        """Start generating; events arrive on the stream. `constraint` serves this generate only.

        `prediction`: what the caller expects as the answer. It may make it faster.
        """
        _check_count("max_tokens", max_tokens)
        self._check_tokens(sampling.logit_bias)
        self._check_tokens(sampling.stop_token_ids)
        self._check_tokens(prediction)
        listener = listener or RequestListener()
        stream = listener.make_stream(self._inbox.wake)
        request = Request(sequence, stream, max_tokens, sampling, listener, constraint, prediction)
        request.hold_to_least_length(self._backend.vocab_size)
        self._inbox.ask(lambda: self._queue(request))
        return stream

    def recall(
        self, sequence: TokenSequence, ranges: Sequence[TokenRange], *, remember: bool = False
    ) -> Ranges:
        """Bring back these ranges in the next turn. Ranges to be remembered come back in every turn that does
        not see them, in the place of those remembered so far. The next generate computes them. Returns what
        it is known to bring back."""

        def name() -> Ranges:
            self._refuse_when_draining()
            sequence.rest()
            return self._recalls.name(sequence, ranges, remember=remember)

        return self._inbox.ask(name)

    def take_back_recall(self, sequence: TokenSequence) -> None:
        """Undo a `recall` that nothing has followed."""
        assert sequence.recall is not None, "its ranges were taken"
        self._inbox.ask(sequence.recall.take_back_named)

    def read(self, sequence: TokenSequence, view: Callable[[TokenSequence], T]) -> T:
        """A consistent look at a sequence: `view` runs on the engine thread."""
        return self.read_all([sequence], partial(view, sequence))

    def read_all(self, sequences: Iterable[TokenSequence], view: Callable[[], T]) -> T:
        """The same for many sequences at one moment."""

        def look() -> T:
            for sequence in sequences:
                sequence.settle()
            return view()

        return self._inbox.ask(look)

    def rest(self, sequence: TokenSequence) -> None:
        """Make sure that a cancelled generate is over. Raises SessionBusy for one that still runs."""
        self._inbox.ask(sequence.rest)

    def fork(self, sequence: TokenSequence) -> TokenSequence:
        """An independent copy of a resting sequence, on a slab of its own.

        What is not computed yet of their history, only one of them computes.
        """

        def fork() -> TokenSequence:
            sequence.rest()
            slab, eos = sequence.slab, tuple(sequence.eos_token_ids)
            copy = self._open(sequence.owner, eos, slab.pinned, slab.recall, is_new=False)
            with self._released_on_failure(copy):
                copy.slab.ready.block_stream()
                copy.copy_from(sequence)
                copy.recall = self._recalls.fork(sequence.recall) if sequence.recall is not None else None
            self._prefixes.hold(copy)
            if self._backend.any_cut:
                share_prompt(sequence, copy, self._recalls.recalls_at(sequence))
            return copy

        return self._inbox.ask(fork)

    def export_state(self, sequence: TokenSequence, notes: str = "") -> SequenceState:
        """A copy of a resting sequence's whole state."""

        def export() -> SequenceState:
            sequence.rest()
            return snapshot(sequence, self._backend.fingerprint, notes)

        return self._inbox.ask(export)

    def import_state(
        self, state: SequenceState, owner: str, retriever: Retriever | None = None
    ) -> TokenSequence:
        """A new sequence that continues where `state` was taken."""
        self._check_tokens(state.tokens.tolist())

        def adopt() -> TokenSequence:
            slots = state.recall.slots if state.recall is not None else 0
            sequence = self._open(owner, state.eos_token_ids, state.sink - slots, slots)
            with self._released_on_failure(sequence):
                restore(sequence, state)
                let_search(sequence, retriever)
                sequence.replace_drafts(self._drafter.restore(state.draft) if self._drafter else None)
            self._prefixes.rests(sequence)
            return sequence

        return self._inbox.ask(adopt)

    def take_back(self, sequence: TokenSequence, length: int) -> None:
        """Undo an append that nothing has followed: the history has `length` tokens again."""
        self._inbox.ask(lambda: sequence.take_back(length))

    def close(self, sequence: TokenSequence) -> int:
        """Cancel what runs, free the slab; returns the final history length."""

        def close() -> int:
            sequence.close()
            return sequence.committed

        return self._inbox.ask(close)

    def close_if(self, sequence: TokenSequence, unwanted: Callable[[TokenSequence], bool]) -> bool:
        """Close it if `unwanted` says so on the engine thread, where nothing can start in between."""

        def close_if() -> bool:
            sequence.settle()
            if not unwanted(sequence):
                return False
            sequence.close()
            return True

        return self._inbox.ask(close_if)

    def warm(self, token_ids: Sequence[int]) -> bool:
        """Compute a prefix that sessions of every owner may copy; whether there is room to keep it."""
        # One that wraps, with the token it generates, would keep its sink alone.
        prefix = token_ids[: self._config.cache.capacity - 2]
        sequence = self.open(COMMON, ())
        try:
            self.append(sequence, prefix)
            for _ in self.generate(sequence, 1, SamplingParams()):
                pass
        finally:
            self.close(sequence)
        return self._inbox.ask(lambda: self._prefixes.is_kept(prefix))

    def score(self, token_ids: Sequence[int], pinned: int | None = None) -> Tensor:
        """Next-token logits after each token [n, vocab], in aligned blocks on a slab of its own."""
        return torch.cat(list(score_blocks(self, token_ids, pinned)))

    def score_next(self, sequence: TokenSequence, reduce: Reduction[T]) -> list[T]:
        """Compute the next block of a resting sequence; what `reduce` makes of its logits, in order.

        It runs on the engine thread, so it should give the device work rather than wait for it.
        """

        def score() -> list[T]:
            segment = score_segment(sequence, self._config.block_tokens)
            sequence.slab.reserve(segment.rows)
            reduced = self._backend.score(segment, reduce)
            sequence.commit()
            return reduced

        return self._inbox.ask(score)

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new work and wait for what runs; True when all of it ended in time."""
        self._draining = True
        self._inbox.wake()
        return self._drained.wait(timeout)

    def cancel_all(self) -> None:
        """Refuse new work and cancel what runs: all sequences rest then."""
        self._draining = True
        if self._thread.is_alive():
            with suppress(Unavailable):  # it has died, and nothing runs
                self._inbox.ask(self._cancel_active)

    @contextmanager
    def using_device(self) -> Iterator[None]:
        """Wrap device work of the caller's own thread. A device that turns out to be lost ends the engine."""
        try:
            yield
        except KakeyaError:
            raise
        except Exception as error:
            self._inbox.ask(partial(raise_if_lost, self._backend, error))
            raise

    def shutdown(self) -> None:
        """Cancel what still runs and stop the thread. Idempotent."""
        self._draining = self._stopping = True
        self._inbox.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._recalls.close()

    # The loop, on the engine thread like all that follows.

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._checked(self._loop)
        except BaseException as error:
            self._die(error)
        else:
            self.ended.set_result(None)
        finally:
            self._drained.set()

    def _loop(self) -> None:
        while not self._stopping:
            self._inbox.answer(wait=not self._stepper.has_work)
            self._scheduler.settle()
            self._stepper.step()
            if self._draining and not self._scheduler.active:
                self._drained.set()
        self._cancel_active()
        self._inbox.close()
        self._inbox.answer(wait=False)

    def _cancel_active(self) -> None:
        for request in list(self._scheduler.active):
            request.cancel()

    def _open(
        self,
        owner: str,
        eos_token_ids: Sequence[int],
        pinned: int | None,
        recall: int = 0,
        *,
        is_new: bool = True,
    ) -> TokenSequence:
        """An empty sequence. One that is not new gets its keys, values and drafts from a state, and may be
        opened by any thread."""
        self._refuse_when_draining()
        slab = self._backend.pool.allocate(pinned, recall, clean=is_new)
        draft = self._drafter.new_drafts() if self._drafter and is_new else None
        remembers = SessionRecall() if recall else None
        leave = self._prefixes.release
        return TokenSequence(slab, owner, eos_token_ids, draft, self._observer, leave, remembers)

    def _queue(self, request: Request) -> None:
        self._refuse_when_draining()
        request.sequence.rest()
        if not request.sequence.tokens:
            raise InvalidArgument("cannot generate on an empty session: append at least one token first")
        if len(self._scheduler.active) >= self._config.max_waiting:
            raise ResourceExhausted(f"{self._config.max_waiting} requests are in flight already")
        request.recall = self._recalls.begin(request)
        self._scheduler.add(request)
        if self._drafter is not None:
            self._drafter.expect(request)

    @contextmanager
    def _released_on_failure(self, fresh: TokenSequence) -> Iterator[None]:
        """Release the slab of a new sequence if the body raises: nobody else knows of it yet."""
        try:
            yield
        except BaseException:
            fresh.replace_drafts(None)
            self._backend.pool.release(fresh.slab)
            raise

    def _check_tokens(self, token_ids: Iterable[object]) -> None:
        """Raises InvalidArgument for the first that is no token id. Runs on the caller's thread."""
        size = self._backend.vocab_size
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise InvalidArgument(f"token id {token!r} is not in the vocabulary of {size} tokens")

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise Restarting("the engine is draining and takes no new work")

    # How the engine dies.

    def _checked(self, work: Callable[[], T]) -> T:
        """Do the work. What it raises becomes DeviceLost if it was the end of the device."""
        try:
            return work()
        except Exception as error:
            raise_if_lost(self._backend, error)
            raise

    def _die(self, error: BaseException) -> None:
        """End every request and refuse every call, so that nobody waits for ever."""
        log.critical("the engine died", exc_info=error)
        reason = str(error) if isinstance(error, DeviceLost) else "the engine died; its log says why"
        self._draining = True
        self.ended.set_result(reason)
        for request in list(self._scheduler.active):
            request.bury(Unavailable(reason))
        self._inbox.refuse(reason)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{name} must be a whole number of at least 1, got {value!r}")
