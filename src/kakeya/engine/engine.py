"""The engine: one thread owns the model, the pool and the device.

Other threads talk to it through calls that queue in a bounded inbox and through event streams.
`_step` is the whole loop: plan → launch → judge → commit → emit. On a device that runs ahead, the next
step is launched before the last one is judged, and computed while its tokens are emitted.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence as Tokens
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kakeya.config import EngineConfig
from kakeya.engine.batch import PENDING, Segment, prefill_segment
from kakeya.engine.checks import check_count, check_tokens
from kakeya.engine.constraint import Constraint, is_last
from kakeya.engine.drafting import Drafter, accepted, sample_requests
from kakeya.engine.inbox import Inbox
from kakeya.engine.observer import EngineObserver, Unobserved
from kakeya.engine.proposer import Proposer
from kakeya.engine.request import Follower, Request
from kakeya.engine.runner import Backend, Failed, LaunchedStep, Reduction, StepResult
from kakeya.engine.sampler import SampleRequest
from kakeya.engine.scheduler import Scheduler, request_of
from kakeya.engine.scoring import score_blocks
from kakeya.engine.sequence import Sequence
from kakeya.engine.state import SequenceState, restore, snapshot
from kakeya.engine.stream import EventStream
from kakeya.errors import (
    DeviceLost,
    HistoryMismatch,
    InvalidArgument,
    InvariantViolation,
    KakeyaError,
    ResourceExhausted,
    SessionBusy,
    SessionNotFound,
    StepFailed,
    Unavailable,
)
from kakeya.types import SamplingParams, StopReason, TokenEvent, TruncatedEvent

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class _Step:
    """A planned batch on its way.

    `may_be_followed`: the next one can be launched before it is judged. `changes`: the scheduler's when it
    was planned. `offset`: how many steps its segments have been repeated, a token further each time.
    """

    segments: Tokens[Segment]
    launched: LaunchedStep
    may_be_followed: bool
    changes: int = 0
    offset: int = 0

    def moved(self) -> Tokens[Segment]:
        """The segments where this step has them."""
        if not self.offset:
            return self.segments
        return [replace(s, start=s.start + self.offset, tokens=[PENDING]) for s in self.segments]


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
        self._inbox = Inbox(config.max_waiting, self._watched)
        self._in_flight: _Step | None = None
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
        return self._inbox.ask(lambda: view(self._settled(sequence)))

    def read_all(self, sequences: Iterable[Sequence], view: Callable[[Sequence], T]) -> list[T]:
        """The same look at many sequences at one moment."""
        return self._inbox.ask(lambda: [view(self._settled(sequence)) for sequence in sequences])

    def rest(self, sequence: Sequence) -> None:
        """See to it that a cancelled generate is over. Raises SessionBusy for one that goes on."""
        self._inbox.ask(lambda: self._resting(sequence))

    def fork(self, sequence: Sequence) -> Sequence:
        """An independent copy of a resting sequence, on a slab of its own."""
        return self._inbox.ask(lambda: self._fork(sequence))

    def export_state(self, sequence: Sequence, notes: str = "") -> SequenceState:
        """A copy of a resting sequence's whole state."""
        fingerprint = self._backend.fingerprint
        return self._inbox.ask(lambda: snapshot(self._resting(sequence), fingerprint, notes))

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
            self._inbox.ask(partial(self._raise_if_lost, error))
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
                self._watched(self._loop)
        except BaseException as error:
            self._die(error)
        else:
            self.ended.set_result(None)
        finally:
            self._drained.set()

    def _loop(self) -> None:
        while not self._stopping:
            self._inbox.answer(wait=self._in_flight is None and not self._scheduler.has_work())
            self._end_requests()
            self._step()
            if self._draining and not self._scheduler.active:
                self._drained.set()
        for sequence in list(self._scheduler.active):
            self._cancel(sequence)
        self._inbox.close()
        self._inbox.answer(wait=False)

    def _step(self) -> None:
        """Launch the next step, then judge the one before it, or this one if it must not be followed."""
        before = self._in_flight
        step = self._in_flight = self._repeat(before) or self._launch(self._plan())
        if before is not None:
            self._judge(before)
        if step is not None and step is self._in_flight and not step.may_be_followed:
            self._in_flight = None
            self._judge(step)

    def _plan(self) -> Tokens[Segment]:
        ready = self._scheduler.ready()
        drafts = self._drafter.propose(ready, self._scheduler.draft_limit)
        segments = self._scheduler.plan(ready, drafts)
        for segment in segments:
            request_of(segment.sequence).planned(self._observer)
        return segments

    def _repeat(self, before: _Step | None) -> _Step | None:
        """One more token of each session that the step before had, if that is what a plan would be."""
        if before is None or before.changes != self._scheduler.changes:
            return None
        if not self._scheduler.may_repeat(before.segments):
            return None
        self._scheduler.repeat(before.segments)
        for segment in before.segments:
            segment.sequence.slab.written += 1
            request_of(segment.sequence).in_flight += 1
        launched = self._launched(lambda: self._backend.follow(before.launched))
        return replace(before, launched=launched, offset=before.offset + 1)

    def _launch(self, segments: Tokens[Segment]) -> _Step | None:
        if not segments:
            return None
        for segment in segments:
            if segment.logit_rows:
                request_of(segment.sequence).in_flight += 1
        try:
            for segment in segments:
                segment.sequence.slab.reserve(segment.rows)
            requests = [r for s in segments for r in sample_requests(s, self._config.cache.capacity)]
        except Exception as error:
            return _Step(segments, Failed(error), may_be_followed=False)
        hidden_layers = self._drafter.hidden_layers
        launched = self._launched(lambda: self._backend.launch(segments, requests, hidden_layers))
        followed = self._may_be_followed(segments, requests)
        return _Step(segments, launched, followed, self._scheduler.changes)

    def _launched(self, launch: Callable[[], LaunchedStep]) -> LaunchedStep:
        """What cannot be launched fails when it is judged, behind what was launched before it."""
        try:
            return launch()
        except Exception as error:
            return Failed(error)

    def _may_be_followed(self, segments: Tokens[Segment], requests: Tokens[SampleRequest]) -> bool:
        """Nothing but single tokens that go on, none of which anything on the host must see before the next.

        Rows beyond the spare slots are undone by putting back what they overwrote: not while more follow.
        """
        if not self._backend.runs_ahead or self._drafter.is_active:
            return False
        goes_on = all(s.rows == 1 and request_of(s.sequence).emitted for s in segments)
        return goes_on and all(request.is_plain for request in requests)

    def _judge(self, step: _Step) -> None:
        """Wait for a step and keep what may be kept of it."""
        try:
            result = self._watched(step.launched.result)
        except DeviceLost:
            raise
        except Exception as error:
            self._retry_alone(step.moved(), error)
            return
        if step.may_be_followed:
            for segment, token in zip(step.segments, result.sampled, strict=True):
                if not segment.is_stale:
                    self._go_on(segment.sequence, request_of(segment.sequence), token)
            return
        row, logit_row = 0, 0
        for segment in step.segments:
            if not segment.is_stale:
                sampled = result.sampled[logit_row : logit_row + segment.logit_rows]
                self._judge_segment(segment, sampled, result, row)
            row += segment.rows
            logit_row += segment.logit_rows

    def _go_on(self, sequence: Sequence, request: Request, token: TokenEvent) -> None:
        """Emit a plain token; if it was the last one, forget what was launched behind it."""
        computed = len(sequence.tokens)
        sequence.tokens.append(token.token_id)
        request.in_flight -= 1
        request.emit(token, self._observer)
        self._finish_if_last(sequence, request, token)
        if request.finished:
            sequence.slab.written = computed
            self._settled(sequence)

    def _finish_if_last(self, sequence: Sequence, request: Request, token: TokenEvent) -> None:
        if is_last(token.token_id, sequence.eos_token_ids, request.constraint):
            request.finish(StopReason.EOS)
        elif request.emitted == request.max_tokens:
            request.finish(StopReason.MAX_TOKENS)

    def _judge_segment(
        self, segment: Segment, sampled: Tokens[TokenEvent], result: StepResult, row: int
    ) -> None:
        """A failure is this segment's own from here on: others are committed."""
        try:
            chosen = accepted(segment, sampled)
        except Exception as error:
            self._fail_request(segment.sequence, error)
            return
        kept = segment.rows - (segment.draft_count - max(0, len(chosen) - 1))
        if self._drafter.is_active:
            self._drafter.observe(segment, result.hidden, slice(row, row + kept))
        self._commit(segment, kept, chosen)

    def _commit(self, segment: Segment, kept: int, chosen: Tokens[TokenEvent]) -> None:
        """Keep the accepted rows, forget the rest, and emit the chosen tokens."""
        sequence, request = segment.sequence, request_of(segment.sequence)
        sequence.slab.written = segment.start + kept
        if not request.emitted:
            self._observer.prompt_computed(kept)
        if segment.draft_count:
            request.judged(segment.draft_count, segment.rows - kept, self._observer)
        if chosen:
            request.in_flight -= 1
            if not request.emitted and sequence.dropped:
                request.stream.put(TruncatedEvent(sequence.dropped))
        for token in chosen:
            sequence.tokens.append(token.token_id)
            request.emit(token, self._observer)
        if chosen:
            self._finish_if_last(sequence, request, chosen[-1])
        self._settled(sequence)

    # What the calls do.

    def _open(self, owner: str, eos_token_ids: Tokens[int], pinned: int | None) -> Sequence:
        self._refuse_when_draining()
        slab = self._backend.pool.allocate(pinned)
        return Sequence(slab, owner, eos_token_ids, self._drafter.new_state())

    def _append(self, sequence: Sequence, token_ids: Tokens[int], expected_length: int | None) -> int:
        self._refuse_when_draining()
        self._resting(sequence)
        if expected_length is not None and expected_length != sequence.committed:
            raise HistoryMismatch(
                f"expected_history_length is {expected_length}, the history has {sequence.committed} tokens"
            )
        sequence.append(token_ids)
        self._count_evicted(sequence)
        return sequence.committed

    def _generate(self, sequence: Sequence, request: Request) -> EventStream:
        self._refuse_when_draining()
        self._resting(sequence)
        if not sequence.tokens:
            raise InvalidArgument("cannot generate on an empty session: append at least one token first")
        if len(self._scheduler.active) >= self._config.max_waiting:
            raise ResourceExhausted(f"{self._config.max_waiting} requests are in flight already")
        sequence.begin(request)
        self._scheduler.add(sequence)
        self._observer.request_queued()
        return request.stream

    def _fork(self, sequence: Sequence) -> Sequence:
        copy = self._open(self._resting(sequence).owner, tuple(sequence.eos_token_ids), sequence.slab.sink)
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
        if self._settled(sequence).request is not None:
            self._cancel(sequence)
        if sequence.error is None:
            sequence.error = SessionNotFound("the session is closed")
            self._backend.pool.release(sequence.slab)
        return sequence.committed

    def _close_if(self, sequence: Sequence, unwanted: Callable[[Sequence], bool]) -> bool:
        if not unwanted(self._settled(sequence)):
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

    # How requests end.

    def _settled(self, sequence: Sequence) -> Sequence:
        """The sequence itself, once all that its reader has taken is history.

        A finished request ends here, when its reader has taken the last token.
        """
        if sequence.error is not None:
            return sequence
        request = sequence.request
        try:
            self._commit_taken(sequence)
        except InvariantViolation as error:
            self._fail_sequence(sequence, error)
            return sequence
        if request is not None and request.finished and request.stream.unread_after_pause() == 0:
            self._commit_taken(sequence)
            self._release(sequence)
        return sequence

    def _resting(self, sequence: Sequence) -> Sequence:
        """The sequence itself, if it is usable and not generating; a cancel asked for comes first."""
        if sequence.request is not None and sequence.request.stream.cancel_requested:
            self._cancel(sequence)
        if sequence.error is None and self._settled(sequence).request is not None:
            raise SessionBusy("the session is generating: read its stream to the end or cancel it")
        if sequence.error is not None:
            raise sequence.error
        return sequence

    def _end_requests(self) -> None:
        """Cancel what its reader gave up, release what its reader has read to the end."""
        for sequence in list(self._scheduler.active):
            request = request_of(sequence)
            if request.stream.cancel_requested:
                self._cancel(sequence)
            elif request.finished or request.taken_length != sequence.committed:
                self._settled(sequence)

    def _cancel(self, sequence: Sequence) -> None:
        request = request_of(sequence)
        request.stream.cut(lambda taken: request.done(StopReason.CANCELLED, taken))
        self._take_back(sequence)

    def _take_back(self, sequence: Sequence) -> None:
        """End a request whose stream was cut: what the reader took stays, the rest is forgotten."""
        try:
            self._commit_taken(sequence)
        except InvariantViolation as error:
            self._fail_sequence(sequence, error)
            return
        sequence.rollback()
        self._release(sequence)

    def _commit_taken(self, sequence: Sequence) -> None:
        sequence.commit_taken()
        self._count_evicted(sequence)

    def _count_evicted(self, sequence: Sequence) -> None:
        if dropped := sequence.newly_dropped():
            self._observer.tokens_evicted(dropped)

    def _release(self, sequence: Sequence) -> None:
        """The request is over and the sequence rests."""
        request = request_of(sequence)
        self._scheduler.remove(sequence)
        sequence.request = None
        request.ended(self._observer)

    def _retry_alone(self, segments: Tokens[Segment], error: Exception) -> None:
        """A step raised: undo it, then run each segment by itself, so that only the guilty fail."""
        self._discard_in_flight()
        current = [segment for segment in segments if not segment.is_stale]
        for segment in current:
            segment.undo()
        if len(segments) == 1:
            for segment in current:
                self._fail_request(segment.sequence, error)
            return
        log.warning("a step of %d segments failed, running them one by one: %r", len(segments), error)
        for segment in current:
            step = self._launch([segment.renewed()])
            assert step is not None
            self._judge(step)

    def _discard_in_flight(self) -> None:
        """Undo the step that was launched upon one that failed; its generates are planned anew."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            for segment in step.moved():
                segment.undo()

    def _fail_request(self, sequence: Sequence, error: Exception) -> None:
        if isinstance(error, InvariantViolation):
            self._fail_sequence(sequence, error)
            return
        log.error("a generate failed", exc_info=error)
        failure = error if isinstance(error, StepFailed) else StepFailed(f"the step failed: {error!r}")
        request = request_of(sequence)
        request.stream.cut(lambda taken: request.failed(failure))
        self._take_back(sequence)

    def _give_up(self, sequence: Sequence, error: Exception) -> None:
        """End a request by an error, whatever state its sequence is in."""
        request = request_of(sequence)
        request.stream.cut(lambda taken: request.failed(error))
        self._release(sequence)

    def _fail_sequence(self, sequence: Sequence, error: InvariantViolation) -> None:
        """The bookkeeping of this sequence is broken: fail it for good and free its slab."""
        log.error("a session failed", exc_info=error)
        sequence.fail(error)
        self._observer.invariant_violated(error.invariant)
        if sequence.request is not None:
            self._give_up(sequence, error)
        self._backend.pool.release(sequence.slab)

    # How the engine ends before its time.

    def _watched(self, work: Callable[[], T]) -> T:
        """What `work` gives or raises; DeviceLost where what it raised was the end of the device."""
        try:
            return work()
        except KakeyaError:
            raise  # in our own words, so the device is not what failed
        except Exception as error:
            self._raise_if_lost(error)
            raise

    def _raise_if_lost(self, error: Exception) -> None:
        if self._backend.is_lost():
            fault = (str(error) or repr(error)).splitlines()[0]
            raise DeviceLost(f"the engine died: the device failed: {fault}") from error

    def _die(self, error: BaseException) -> None:
        """Nobody may wait for what will not come: end every request, refuse every call."""
        log.critical("the engine died", exc_info=error)
        reason = str(error) if isinstance(error, DeviceLost) else "the engine died; its log says why"
        self._draining = True
        self.ended.set_result(reason)
        for sequence in list(self._scheduler.active):
            self._bury(sequence, Unavailable(reason))
        self._inbox.refuse(reason)

    def _bury(self, sequence: Sequence, error: Unavailable) -> None:
        """End a request of the dead engine. An answer that is whole can still be read."""
        try:
            if request_of(sequence).finished:
                self._release(sequence)
            else:
                self._give_up(sequence, error)
        except Exception:
            log.exception("a request could not be wound back")

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise Unavailable("the engine is draining and takes no new work")
