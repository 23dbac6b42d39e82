"""The engine's step: plan → launch → judge → commit → emit. On the engine thread.

On a device that runs ahead, the next step is launched before the last one is judged, and computed while its
tokens are emitted.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kakeya.config import EngineConfig
from kakeya.engine.backend import Backend, Failed, LaunchedStep, StepResult, raise_if_lost
from kakeya.engine.batch import PENDING, PlannedSegment, RecallSegment
from kakeya.engine.drafting import Drafter, accepted
from kakeya.engine.own_drafts import NAME as OWN_DRAFTS, OwnDrafts
from kakeya.engine.request import QUEUED, Request
from kakeya.engine.sampler import SampleRequest
from kakeya.engine.scheduler import Scheduler
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.shared_prefixes import SharedPrefixes
from kakeya.errors import InvariantViolation
from kakeya.types import StopReason, TokenEvent, TruncatedEvent

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Step:
    """A planned batch on its way.

    `may_be_followed`: the next one can be launched before it is judged. `changes`: the scheduler's when it
    was planned. `offset`: how many steps its segments have been repeated, a token further each time.
    """

    segments: Sequence[PlannedSegment]
    launched: LaunchedStep
    may_be_followed: bool
    changes: int = 0
    offset: int = 0

    @property
    def own_drafts(self) -> int:
        """How many tokens the backend guesses for each segment."""
        return self.segments[0].own_drafts

    def moved(self) -> Sequence[PlannedSegment]:
        """The segments where this step has them. Call it when the steps before have been judged."""
        if self.own_drafts:
            return [_at_the_end(segment) for segment in self.segments]
        if not self.offset:
            return self.segments
        return [replace(s, start=s.start + self.offset, tokens=[PENDING]) for s in self.segments]


class Stepper:
    """Computes what the scheduler has in flight, a step at a time."""

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        scheduler: Scheduler,
        drafter: Drafter | None,
        prefixes: SharedPrefixes,
    ) -> None:
        self._backend, self._config, self._scheduler, self._drafter = backend, config, scheduler, drafter
        self._prefixes = prefixes
        counts = backend.draft_counts
        self._own_drafts = OwnDrafts(counts, backend.most_drafting) if counts else None
        self._in_flight: _Step | None = None

    @property
    def has_work(self) -> bool:
        """A step is on its way, or something is ready to be computed."""
        return self._in_flight is not None or self._scheduler.has_work()

    def step(self) -> None:
        """Launch the next step, then judge the one before it, or this one if it must not be followed."""
        began, before = time.perf_counter(), self._in_flight
        step = self._repeat(before)
        if step is None and before is not None and before.own_drafts:
            self._in_flight = None
            self._judge(before)  # only then is it known where it ended
            before = None
        step = self._in_flight = step or self._launch(self._plan())
        if before is not None:
            self._judge(before)
        if step is not None and step is self._in_flight and not step.may_be_followed:
            self._in_flight = None
            self._judge(step)
        if step is not None:
            self._learn(step, time.perf_counter() - began, ran_ahead=before is not None)

    def _learn(self, step: _Step, seconds: float, *, ran_ahead: bool) -> None:
        """A step has taken so long, with its planning; `ran_ahead`: the one before it was judged meanwhile.

        The first step of those that run ahead was only launched, and one behind them waited for the last:
        such times say nothing.
        """
        self._scheduler.learn(seconds)
        if self._own_drafts is not None and step.may_be_followed:
            self._own_drafts.learn(len(step.segments), step.own_drafts, seconds)
        is_whole = step.may_be_followed == ran_ahead
        if self._drafter is not None and is_whole and all(s.logit_rows == s.rows for s in step.segments):
            rows = sum(segment.rows for segment in step.segments)
            self._drafter.learn(len(step.segments), rows, seconds, ahead=ran_ahead)

    def _plan(self) -> Sequence[PlannedSegment]:
        ready = self._scheduler.ready()
        drafts = self._drafter.propose(ready, self._scheduler.draft_limit) if self._drafter else {}
        segments = self._scheduler.plan(ready, drafts)
        for segment in segments:
            if segment.request.state is QUEUED:
                segment.request.start()
        return segments

    def _repeat(self, before: _Step | None) -> _Step | None:
        """Launch the step before once more, a token further, if a plan would be the same."""
        if before is None or before.changes != self._scheduler.changes:
            return None
        if not self._scheduler.may_repeat(before.segments):
            return None
        if self._drafter is not None and not self._drafter.rest():
            return None
        if self._own_count(len(before.segments)) != before.own_drafts:
            return None
        self._scheduler.repeat(before.segments)
        for segment in before.segments:
            self._save_first_lap(segment.sequence, 1 + before.own_drafts)
            segment.sequence.slab.written += 1 + before.own_drafts
            segment.request.in_flight += 1 + before.own_drafts
        launched = self._launched(lambda: self._backend.follow(before.launched))
        return replace(before, launched=launched, offset=before.offset + 1)

    def _launch(self, segments: Sequence[PlannedSegment]) -> _Step | None:
        if not segments:
            return None
        drafts = self._count_own_drafts(segments)
        self._scheduler.charge_drafts(segments, drafts)
        for segment in segments:
            segment.own_drafts = drafts
            if segment.logit_rows:
                segment.request.in_flight += 1 + drafts
        try:
            for segment in segments:
                self._save_first_lap(segment.sequence, segment.rows + drafts)
                segment.reserve()
            requests = [r for s in segments for r in s.sample_requests(self._config.cache.capacity)]
        except Exception as error:
            return _Step(segments, Failed(error), may_be_followed=False)
        hidden_layers = self._drafter.layers_to_see(segments) if self._drafter else ()
        if drafts:
            launched = self._launched(lambda: self._backend.launch_drafting(segments, requests, drafts))
        else:
            launched = self._launched(lambda: self._backend.launch(segments, requests, hidden_layers))
        followed = self._may_be_followed(segments, requests)
        return _Step(segments, launched, followed, self._scheduler.changes)

    def _save_first_lap(self, sequence: TokenSequence, rows: int) -> None:
        """Let others have what the next rows may overwrite, if these are the first that may."""
        if sequence.slab.ends_first_lap(rows):
            self._prefixes.outgrows(sequence)

    def _own_count(self, sessions: int) -> int:
        return self._own_drafts.count(sessions) if self._own_drafts is not None else 0

    def _count_own_drafts(self, segments: Sequence[PlannedSegment]) -> int:
        """How many tokens the backend guesses behind each: only behind single tokens that it may choose by
        itself, and only as many as a cancel could take back."""
        count = self._own_count(len(segments))
        plain = all(s.rows == 1 and s.request.emitted and s.request.is_plain for s in segments)
        return count if count and plain and self._scheduler.has_room(segments, count) else 0

    def _launched(self, launch: Callable[[], LaunchedStep]) -> LaunchedStep:
        """A step that cannot be launched fails when it is judged, after the steps launched before it."""
        try:
            return launch()
        except Exception as error:
            return Failed(error)

    def _may_be_followed(self, segments: Sequence[PlannedSegment], requests: Sequence[SampleRequest]) -> bool:
        """Whether all segments are single tokens that the host need not see before the next step.

        Longer segments may overwrite slots, which a rollback puts back: it cannot do so once more follow.
        """
        if not self._backend.runs_ahead or (self._drafter is not None and not self._drafter.is_resting):
            return False
        goes_on = all(s.rows == 1 and s.request.emitted for s in segments)
        return goes_on and all(request.is_plain for request in requests)

    def _judge(self, step: _Step) -> None:
        try:
            result = step.launched.result()
        except Exception as error:
            raise_if_lost(self._backend, error)
            self._retry_alone(step.moved(), error)
            return
        if step.own_drafts:
            self._judge_runs(step.segments, result)
            return
        if step.may_be_followed:
            for segment, token in zip(step.segments, result.sampled, strict=True):
                if not segment.is_stale:
                    self._go_on(segment.request, token)
            return
        row, logit_row = 0, 0
        for segment in step.segments:
            if not segment.is_stale:
                sampled = result.sampled[logit_row : logit_row + segment.logit_rows]
                self._judge_segment(segment, sampled, result, row)
            row += segment.rows
            logit_row += segment.logit_rows

    def _judge_runs(self, segments: Sequence[PlannedSegment], result: StepResult) -> None:
        """Emit what each segment of a drafting step got."""
        first = 0
        for segment, count in zip(segments, result.runs, strict=True):
            if not segment.is_stale:
                self._emit_run(segment, result.sampled[first : first + count])
            first += count

    def _emit_run(self, segment: PlannedSegment, tokens: Sequence[TokenEvent]) -> None:
        """The guesses but for the last token were right. Forget what lies behind the last one."""
        request, sequence, drafts = segment.request, segment.sequence, segment.own_drafts
        request.in_flight -= 1 + drafts
        sequence.slab.written -= 1 + drafts - len(tokens)
        request.count_drafts(OWN_DRAFTS, drafts, len(tokens) - 1)
        if self._own_drafts is not None:
            self._own_drafts.judged(drafts, len(tokens) - 1)
        for token in tokens:
            sequence.tokens.append(token.token_id)
            request.emit(token)
            if self._finish_if_last(request, token):
                sequence.slab.written = len(sequence.tokens) - 1
                sequence.settle()
                return

    def _go_on(self, request: Request, token: TokenEvent) -> None:
        """Emit a plain token; if it was the last one, forget what was launched behind it."""
        sequence = request.sequence
        computed = len(sequence.tokens)
        sequence.tokens.append(token.token_id)
        request.in_flight -= 1
        request.emit(token)
        if self._finish_if_last(request, token):
            sequence.slab.written = computed
            sequence.settle()

    def _finish_if_last(self, request: Request, token: TokenEvent) -> bool:
        if request.ends_with(token.token_id):
            request.finish(StopReason.EOS)
        elif request.emitted == request.max_tokens:
            request.finish(StopReason.MAX_TOKENS)
        else:
            return False
        return True

    def _judge_segment(
        self, segment: PlannedSegment, sampled: Sequence[TokenEvent], result: StepResult, row: int
    ) -> None:
        """From here on a failure is this segment's own: others are committed."""
        if isinstance(segment, RecallSegment):
            self._recall(segment)
            return
        try:
            chosen = accepted(segment, sampled)
        except Exception as error:
            segment.request.fail(error)
            return
        kept = segment.rows - (segment.draft_count - max(0, len(chosen) - 1))
        if self._drafter is not None:
            self._drafter.observe(segment, result.hidden, slice(row, row + kept))
        self._commit(segment, kept, chosen)

    def _recall(self, segment: RecallSegment) -> None:
        try:
            segment.recall.computed(segment.rows)
        except InvariantViolation as error:
            segment.request.fail(error)

    def _commit(self, segment: PlannedSegment, kept: int, chosen: Sequence[TokenEvent]) -> None:
        """Keep the accepted rows, forget the rest, and emit the chosen tokens."""
        sequence, request = segment.sequence, segment.request
        sequence.slab.written = segment.start + kept
        is_prompt = not request.emitted
        if is_prompt:
            sequence.observer.prompt_computed(kept)
        if segment.draft_count and self._drafter is not None:
            self._drafter.judged(segment, segment.draft_count - (segment.rows - kept))
        if chosen:
            request.in_flight -= 1
            if not request.emitted and sequence.dropped:
                request.stream.put(TruncatedEvent(sequence.dropped))
        for token in chosen:
            sequence.tokens.append(token.token_id)
            request.emit(token)
        if chosen:
            self._finish_if_last(request, chosen[-1])
        sequence.settle()
        if is_prompt:
            self._prefixes.computed(sequence, segment.start, kept)
            if sequence.shared_prompt is not None:
                sequence.shared_prompt.computed(sequence)

    def _retry_alone(self, segments: Sequence[PlannedSegment], error: Exception) -> None:
        """A step raised: undo it, then run each segment alone, so that only the guilty request fails."""
        self._discard_in_flight()
        current = [segment for segment in segments if not segment.is_stale]
        for segment in current:
            segment.undo()
        if len(segments) == 1:
            for segment in current:
                segment.request.fail(error)
            return
        log.warning("a step of %d segments failed, running them one by one: %r", len(segments), error)
        for segment in current:
            step = self._launch([segment.renewed()])
            assert step is not None
            self._judge(step)

    def _discard_in_flight(self) -> None:
        """Undo the step that was launched after one that failed; its requests are planned again."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            for segment in step.moved():
                segment.undo()


def _at_the_end(segment: PlannedSegment) -> PlannedSegment:
    """The segment of a drafting step that comes next: its newest token is the sequence's."""
    tokens = segment.sequence.tokens
    return replace(segment, start=len(tokens) - 1, tokens=tokens[-1:])
