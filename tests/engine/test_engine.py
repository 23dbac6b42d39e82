"""The engine's behaviour: cancel, stalls, failures, fairness, drafts, shutdown."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from kakeya.engine.backend import Backend
from kakeya.engine.batch import Segment
from kakeya.engine.cpu.backend import CpuBackend, StepOutput
from kakeya.engine.engine import Engine
from kakeya.engine.proposer import DraftRequest
from kakeya.engine.request import RequestListener
from kakeya.engine.slab import KVSlab
from kakeya.engine.stream import EventStream
from kakeya.errors import (
    HistoryMismatch,
    InvalidArgument,
    InvariantViolation,
    ResourceExhausted,
    SessionBusy,
    SessionNotFound,
    StepFailed,
    Unavailable,
)
from kakeya.models.decoder import Decoder
from kakeya.types import DoneEvent, Event, FailedEvent, SamplingParams, StopReason, TokenEvent, TruncatedEvent
from support import tiny
from support.oracle import Oracle
from support.turns import GREEDY, done_of, say, tokens_of

MakeEngine = Callable[..., Engine]
PROMPT = [5, 9, 22, 13, 7]


class Hooked(CpuBackend):
    """The real backend with something that happens before each run."""

    def __init__(self, source: CpuBackend, before: Callable[[Sequence[Segment]], None]) -> None:
        self.__dict__ |= source.__dict__
        self.before = before
        self.batches: list[list[tuple[str, int]]] = []

    def run(self, segments: Sequence[Segment], hidden_layers: Sequence[int] = ()) -> StepOutput:
        self.batches.append([(s.sequence.owner, s.rows) for s in segments])
        self.before(segments)
        return super().run(segments, hidden_layers)


@pytest.fixture
def hooked(
    decoder: Decoder, paced: Callable[[Backend], Backend], request: pytest.FixtureRequest
) -> Callable[..., tuple[Engine, Hooked]]:
    def make(before: Callable[[Sequence[Segment]], None], **changes: object) -> tuple[Engine, Hooked]:
        config = tiny.engine_config(**changes)
        backend = Hooked(tiny.make_backend(decoder, config), before)
        engine = Engine(paced(backend), config).start()
        request.addfinalizer(engine.shutdown)
        return engine, backend

    return make


# Turns.


def test_a_turn_reports_what_it_did(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    first = done_of(engine.generate(sequence, 3, GREEDY))
    assert (first.stop_reason, first.generated_token_count, first.cached_token_count) == (
        StopReason.MAX_TOKENS,
        3,
        0,
    )
    assert 0 < first.prefill_duration_seconds <= first.total_duration_seconds
    assert engine.append(sequence, [8]) == len(PROMPT) + 3 + 1
    assert done_of(engine.generate(sequence, 1, GREEDY)).cached_token_count == len(PROMPT) + 2


def test_eos_is_emitted_kept_and_ends_the_turn(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine()
    answer = oracle.greedy(PROMPT, 8, 2, 8)
    eos = answer[3]
    expected = answer[: answer.index(eos) + 1]
    sequence = engine.open("someone", [eos])
    engine.append(sequence, PROMPT)
    events = list(engine.generate(sequence, 8, GREEDY))
    assert [e.token_id for e in events if isinstance(e, TokenEvent)] == expected
    assert isinstance(events[-1], DoneEvent)
    assert events[-1].stop_reason is StopReason.EOS
    assert engine.read(sequence, lambda s: s.tokens.tolist()) == PROMPT + expected


def test_truncation_is_announced_once_before_any_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    engine.append(sequence, list(range(2, 16)))
    events = list(engine.generate(sequence, 3, GREEDY))
    assert events[0] == TruncatedEvent(14 - 10)
    assert sum(isinstance(e, TruncatedEvent) for e in events) == 1
    assert engine.read(sequence, lambda s: s.dropped) == 14 + 3 - 10


def test_the_live_bytes_grow_to_an_exact_plateau(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    live = [engine.read(sequence, lambda s: s.slab.live_bytes)]
    for _ in range(12):
        say(engine, sequence, [7], 1)
        live.append(engine.read(sequence, lambda s: s.slab.live_bytes))
    per_token = sequence.slab.geometry.bytes_per_token
    assert per_token == 2 * 2 * 2 * 16 * 4
    assert live[:4] == [0, per_token, 3 * per_token, 5 * per_token]
    assert set(live[6:]) == {10 * per_token}


def test_a_fork_goes_its_own_way(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    answer = say(engine, sequence, PROMPT * 4, 3)
    copy = engine.fork(sequence)
    spoken = PROMPT * 4 + answer
    assert say(engine, copy, [30], 4) == oracle.greedy([*spoken, 30], 4, 2, 8)
    assert say(engine, sequence, [31], 4) == oracle.greedy([*spoken, 31], 4, 2, 8)


# Bad input.


@pytest.mark.parametrize("bad", [[-1], [tiny.VOCAB], [3, 10**9], [True], ["5"], [1.5]])
def test_a_bad_token_id_changes_nothing(make_engine: MakeEngine, bad: list[int]) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    with pytest.raises(InvalidArgument, match="not in the vocabulary"):
        engine.append(sequence, [4, *bad])
    assert engine.read(sequence, lambda s: s.committed) == len(PROMPT)
    with pytest.raises(InvalidArgument):
        engine.open("someone", bad)
    with pytest.raises(InvalidArgument):
        engine.generate(sequence, 1, SamplingParams(logit_bias=dict.fromkeys(bad, 1.0)))


def test_generating_needs_a_history_and_a_positive_count(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    with pytest.raises(InvalidArgument, match="empty session"):
        engine.generate(sequence, 1, GREEDY)
    engine.append(sequence, PROMPT)
    for bad in (0, -1, 1.5, True):
        with pytest.raises(InvalidArgument, match="max_tokens"):
            engine.generate(sequence, bad, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="zero tokens"):
        engine.score([])


@pytest.mark.parametrize("pinned", [-1, 10, 11])
def test_a_pin_must_leave_a_window(make_engine: MakeEngine, pinned: int) -> None:
    with pytest.raises(InvalidArgument, match="pinned prefix must be from 0 to 9"):
        make_engine().open("someone", [], pinned)


def test_a_full_pool_refuses_and_recovers(make_engine: MakeEngine) -> None:
    engine = make_engine()
    held = [engine.open("someone", []) for _ in range(4)]
    with pytest.raises(ResourceExhausted, match="all 4 sessions"):
        engine.open("someone", [])
    with pytest.raises(ResourceExhausted):
        engine.fork(held[0])
    assert engine.close(held[0]) == 0
    engine.open("someone", [])


def test_an_optimistic_append_must_match(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    assert engine.append(sequence, PROMPT, 0) == 5
    with pytest.raises(HistoryMismatch, match="expected_history_length is 4, the history has 5"):
        engine.append(sequence, [4], 4)
    assert engine.append(sequence, [], 5) == 5


def test_a_closed_sequence_is_gone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    engine.close(sequence)
    for use in (lambda: engine.append(sequence, [3]), lambda: engine.generate(sequence, 1, GREEDY)):
        with pytest.raises(SessionNotFound):
            use()
    assert engine.close(sequence) == 0


# Readers that stall, cancel or vanish.


def test_one_generate_at_a_time(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    stream = engine.generate(sequence, 3, GREEDY)
    for use in (
        lambda: engine.generate(sequence, 1, GREEDY),
        lambda: engine.append(sequence, [3]),
        lambda: engine.fork(sequence),
        lambda: engine.export_state(sequence),
    ):
        with pytest.raises(SessionBusy):
            use()
    tokens_of(stream)
    engine.append(sequence, [3])


@pytest.mark.parametrize("taken", [0, 1, 3, 7])
@pytest.mark.parametrize("spare", [0, 1, 4])
def test_a_cancel_keeps_exactly_the_tokens_taken(
    make_engine: MakeEngine, oracle: Oracle, taken: int, spare: int
) -> None:
    engine = make_engine(tiny.engine_config(spare=spare))
    sequence = engine.open("someone", [])
    prompt = PROMPT * 5
    engine.append(sequence, prompt)
    stream = engine.generate(sequence, 50, GREEDY)
    kept = []
    while len(kept) < taken:
        event = stream.next_event(10)
        if isinstance(event, TokenEvent):
            kept.append(event.token_id)
    # Let the engine run as far ahead as it may.
    time.sleep(0.05)
    stream.cancel()
    tail = list(stream)  # what comes before the engine has noticed is taken too
    kept += [event.token_id for event in tail if isinstance(event, TokenEvent)]
    done = tail[-1]
    assert isinstance(done, DoneEvent)
    assert (done.stop_reason, done.generated_token_count) == (StopReason.CANCELLED, len(kept))
    assert len(kept) <= taken + spare + 1
    assert engine.read(sequence, lambda s: s.tokens.tolist()) == prompt + kept
    # The session goes on as if the unread tokens had never been.
    assert say(engine, sequence, [4], 5) == oracle.greedy([*prompt, *kept, 4], 5, 2, 8)


def test_generating_again_right_after_a_cancel(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT * 3)
    stream = engine.generate(sequence, 50, GREEDY)
    time.sleep(0.05)
    stream.cancel()
    spoken = PROMPT * 3 + tokens_of(stream)
    assert tokens_of(engine.generate(sequence, 4, GREEDY)) == oracle.greedy(spoken, 4, 2, 8)


def test_cancelling_in_the_middle_of_a_prompt(
    hooked: Callable[..., tuple[Engine, Hooked]], oracle: Oracle
) -> None:
    started, proceed = threading.Event(), threading.Event()

    def before(segments: Sequence[Segment]) -> None:
        if segments[0].start == 16 and not proceed.is_set():
            started.set()
            proceed.wait(10)

    engine, _ = hooked(before)
    sequence = engine.open("someone", [])
    prompt = PROMPT * 8
    engine.append(sequence, prompt)
    stream = engine.generate(sequence, 5, GREEDY)
    assert started.wait(10)
    stream.cancel()
    proceed.set()
    assert done_of(stream).generated_token_count == 0
    assert tokens_of(engine.generate(sequence, 5, GREEDY)) == oracle.greedy(prompt, 5, 2, 8)


def test_cancelling_after_the_end_takes_the_unread_tail_back(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    stream = engine.generate(sequence, 3, GREEDY)
    stream.next_event(10)
    time.sleep(0.05)  # the other two and the done event are waiting by now
    stream.cancel()
    while engine.read(sequence, lambda s: s.request) is not None:
        time.sleep(0.001)
    assert done_of(stream).stop_reason is StopReason.CANCELLED
    assert engine.read(sequence, lambda s: s.committed) == len(PROMPT) + 1


def test_closing_cancels_what_runs(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    stream = engine.generate(sequence, 1000, GREEDY)
    stream.next_event(10)
    assert engine.close(sequence) == len(PROMPT) + 1
    assert done_of(stream).stop_reason is StopReason.CANCELLED


def test_a_stalled_reader_neither_stalls_others_nor_grows_memory(
    make_engine: MakeEngine, oracle: Oracle
) -> None:
    engine = make_engine()
    stalled, lively = engine.open("a", []), engine.open("b", [])
    engine.append(stalled, PROMPT)
    stream = engine.generate(stalled, 1000, GREEDY)
    assert say(engine, lively, PROMPT, 200) == oracle.greedy(PROMPT, 200, 2, 8)
    assert stream.unread <= 4 + 1
    # It picks up where it stopped when the reader comes back.
    late = [stream.next_event(10) for _ in range(30)]
    assert [e.token_id for e in late if isinstance(e, TokenEvent)] == oracle.greedy(
        PROMPT, sum(isinstance(e, TokenEvent) for e in late), 2, 8
    )
    stream.cancel()


def test_waiting_for_an_event_can_time_out(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    stream = engine.generate(sequence, 1, GREEDY)
    tokens_of(stream)
    with pytest.raises(TimeoutError):
        stream.next_event(0.01)


# Failures.


def test_a_failing_step_fails_its_own_request_only(
    hooked: Callable[..., tuple[Engine, Hooked]], oracle: Oracle
) -> None:
    def before(segments: Sequence[Segment]) -> None:
        if any(s.sequence.owner == "cursed" and s.end > 20 for s in segments):
            raise RuntimeError("boom")

    engine, _ = hooked(before)
    good, cursed = engine.open("good", []), engine.open("cursed", [])
    engine.append(good, PROMPT * 6)
    engine.append(cursed, PROMPT * 3)
    streams = engine.generate(good, 30, GREEDY), engine.generate(cursed, 30, GREEDY)
    spoken: list[int] = []
    readers = threading.Thread(target=lambda: spoken.extend(tokens_of(streams[0])))
    readers.start()
    received = []
    with pytest.raises(StepFailed, match="boom"):
        received.extend(streams[1])
    readers.join()
    assert spoken == oracle.greedy(PROMPT * 6, 30, 2, 8)
    # What was received before the failure is history, and the session is usable.
    kept = [e.token_id for e in received if isinstance(e, TokenEvent)]
    assert engine.read(cursed, lambda s: s.tokens.tolist()) == PROMPT * 3 + kept
    engine.append(cursed, [4])


def test_a_failed_prompt_block_past_the_wrap_is_undone(
    hooked: Callable[..., tuple[Engine, Hooked]], oracle: Oracle, decoder: Decoder
) -> None:
    """The block overwrote ring slots that are still needed; they must come back."""
    fail = [True]
    real = decoder.logits

    def broken(hidden: Tensor) -> Tensor:
        if fail[0]:
            raise MemoryError("no room for logits")
        return real(hidden)

    engine, _ = hooked(lambda segments: None, prefill_block=32)
    sequence = engine.open("someone", [])
    fail[0] = False
    first = say(engine, sequence, PROMPT * 4, 2)
    fail[0] = True
    engine.append(sequence, PROMPT * 5)
    decoder.logits = broken  # type: ignore[method-assign]
    try:
        with pytest.raises(StepFailed, match="no room for logits"):
            tokens_of(engine.generate(sequence, 3, GREEDY))
        fail[0] = False
        spoken = [*PROMPT * 4, *first, *PROMPT * 5]
        assert tokens_of(engine.generate(sequence, 3, GREEDY)) == oracle.greedy(spoken, 3, 2, 8)
    finally:
        del decoder.logits


def test_broken_bookkeeping_fails_and_frees_the_session(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence, other = engine.open("someone", []), engine.open("other", [])
    engine.append(sequence, PROMPT)
    say(engine, sequence, [], 2)
    sequence.slab.committed = 99
    engine.append(other, PROMPT)
    with pytest.raises(InvariantViolation, match="INV-2"):
        engine.append(sequence, [3])
    assert engine.read(sequence, lambda s: (s.inv1_violations, s.inv2_violations)) == (0, 1)
    with pytest.raises(InvariantViolation):
        engine.generate(sequence, 1, GREEDY)
    for _ in range(3):  # its slab is free again
        engine.open("someone", [])
    assert len(say(engine, other, [], 2)) == 2


def test_a_layer_that_was_not_written_is_an_inv1_violation(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    monkeypatch.setattr(type(decoder), "forward", lambda self, ids, attend, tap: torch.zeros(len(ids), 32))
    with pytest.raises(InvariantViolation, match="INV-1"):
        tokens_of(engine.generate(sequence, 2, GREEDY))
    assert engine.read(sequence, lambda s: s.inv1_violations) == 1


# Batching and fairness.


def test_a_long_prompt_does_not_stall_a_stream(hooked: Callable[..., tuple[Engine, Hooked]]) -> None:
    engine, backend = hooked(lambda segments: None, prefill_block=8, max_batch_tokens=16)
    talker, reader = engine.open("talker", []), engine.open("reader", [])
    engine.append(talker, PROMPT)
    stream = engine.generate(talker, 100, GREEDY)
    stream.next_event(10)
    engine.append(reader, PROMPT * 40)
    long = engine.generate(reader, 1, GREEDY)
    tokens_of(stream)
    tokens_of(long)
    shared = [batch for batch in backend.batches if len(batch) == 2]
    assert len(shared) >= 200 // 8 - 1
    assert all(("talker", 1) in batch for batch in shared)
    assert all(sum(rows for _, rows in batch) <= 16 for batch in backend.batches)


def test_too_many_requests_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(tiny.engine_config(max_waiting=1))
    first, second = engine.open("a", []), engine.open("b", [])
    engine.append(first, PROMPT)
    engine.append(second, PROMPT)
    stream = engine.generate(first, 1000, GREEDY)
    with pytest.raises(ResourceExhausted, match="1 requests are in flight"):
        engine.generate(second, 1, GREEDY)
    stream.cancel()
    done_of(stream)
    assert len(tokens_of(engine.generate(second, 2, GREEDY))) == 2


def test_a_full_inbox_refuses(hooked: Callable[..., tuple[Engine, Hooked]]) -> None:
    running, proceed = threading.Event(), threading.Event()

    def before(segments: Sequence[Segment]) -> None:
        running.set()
        proceed.wait(10)

    engine, _ = hooked(before, max_waiting=1)
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    stream = engine.generate(sequence, 1, GREEDY)
    assert running.wait(10)
    waiting = threading.Thread(target=lambda: engine.read(sequence, len_of_history))
    waiting.start()
    while not engine._inbox._queue.full():
        time.sleep(0.001)
    with pytest.raises(ResourceExhausted, match="1 calls wait"):
        engine.read(sequence, len_of_history)
    stream.cancel()  # a full inbox does not lose the wake-up
    proceed.set()
    waiting.join()


def len_of_history(sequence: object) -> int:
    return len(sequence.tokens)  # type: ignore[attr-defined]


# The end.


def test_a_drain_hears_of_a_request_that_ends_within_a_step(make_engine: MakeEngine) -> None:
    class Eager(EventStream):
        """Its reader takes every event at once."""

        def put(self, event: Event) -> None:
            super().put(event)
            self.poll()

    class EagerListener(RequestListener):
        def make_stream(self, wake: Callable[[], None]) -> EventStream:
            return Eager(wake)

    engine = make_engine()
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    engine.generate(sequence, 500, GREEDY, EagerListener())
    assert engine.drain(10)
    assert sequence.committed == len(PROMPT) + 500


def test_draining_finishes_what_runs_and_refuses_the_rest(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    stream = engine.generate(sequence, 20, GREEDY)
    assert not engine.drain(0.05)  # nobody reads yet
    for use in (
        lambda: engine.open("someone", []),
        lambda: engine.append(sequence, [3]),
        lambda: engine.generate(sequence, 1, GREEDY),
    ):
        with pytest.raises(Unavailable, match="draining"):
            use()
    assert len(tokens_of(stream)) == 20
    assert engine.drain(10)
    assert engine.close(sequence) == 25


def test_an_idle_engine_drains_at_once(make_engine: MakeEngine) -> None:
    assert make_engine().drain(10)


def test_shutting_down_cancels_and_then_refuses(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    stream = engine.generate(sequence, 10_000, GREEDY)
    stream.next_event(10)
    engine.shutdown()
    engine.shutdown()
    assert done_of(stream).stop_reason is StopReason.CANCELLED
    with pytest.raises(Unavailable, match="shut down"):
        engine.append(sequence, [3])
    stream.cancel()  # late, and harmless


def test_a_dying_engine_thread_leaves_nobody_waiting(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the reader nor who keeps count of what runs."""
    engine, heard = make_engine(), []
    listener = RequestListener()
    monkeypatch.setattr(listener, "ended", lambda request: heard.append(request.terminal))
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    stream = engine.generate(sequence, 1000, GREEDY, listener)
    stream.next_event(10)

    def bug(*args: object) -> None:
        raise AssertionError("a bug in the scheduler")

    monkeypatch.setattr(engine._scheduler, "plan", bug)
    with pytest.raises(Unavailable, match="died"):
        tokens_of(stream)
    with pytest.raises(Unavailable):
        engine.append(sequence, [3])
    assert engine.drain(10)
    assert [type(end) for end in heard] == [FailedEvent]


# Drafts.


class Notebook:
    """A draft state that writes down what it is told."""

    def __init__(self, observed: list[int] | None = None) -> None:
        self.observed = observed or []

    def fork(self) -> "Notebook":
        return Notebook(list(self.observed))

    def rollback(self, length: int) -> None:
        del self.observed[length:]

    def export(self) -> Mapping[str, Tensor]:
        return {"observed": torch.tensor(self.observed)}


class Guesser:
    """Guesses with a function of the tokens so far, and checks what it observes."""

    max_draft = 3
    hidden_layers = (0, 1)

    def __init__(self, guess: Callable[[Sequence[int]], list[int]]) -> None:
        self.guess = guess
        self.limits: list[int] = []

    def new_state(self) -> Notebook:
        return Notebook()

    def restore(self, tensors: Mapping[str, Tensor]) -> Notebook:
        return Notebook(tensors["observed"].tolist())

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        self.limits += [request.limit for request in requests]
        return [self.guess(request.tokens) for request in requests]

    def observe(self, state: Notebook, start: int, hidden: Mapping[int, Tensor]) -> None:
        assert set(hidden) == {0, 1}
        assert hidden[0].shape == hidden[1].shape
        assert len(state.observed) == start
        state.observed += range(start, start + len(hidden[0]))


def clairvoyant(oracle: Oracle, wrong_every: int = 0) -> Callable[[Sequence[int]], list[int]]:
    def guess(tokens: Sequence[int]) -> list[int]:
        draft = oracle.greedy(list(tokens), 3, 2, 8)
        if wrong_every and len(tokens) % wrong_every == 0:
            draft[1] = (draft[1] + 1) % tiny.VOCAB
        return draft

    return guess


@pytest.mark.parametrize("wrong_every", [0, 2, 1])
@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.3)]
)
def test_drafts_change_the_speed_and_never_the_output(
    make_engine: MakeEngine, oracle: Oracle, wrong_every: int, sampling: SamplingParams
) -> None:
    plain, drafted = make_engine(), make_engine(None, Guesser(clairvoyant(oracle, wrong_every)))
    prompt = PROMPT * 4
    expected = say(plain, plain.open("someone", []), prompt, 25, sampling)
    sequence = drafted.open("someone", [])
    drafted.append(sequence, prompt)
    events = list(drafted.generate(sequence, 25, sampling))
    assert [e.token_id for e in events if isinstance(e, TokenEvent)] == expected
    done = events[-1]
    assert isinstance(done, DoneEvent)
    assert done.proposed_draft_tokens > 0
    if sampling is GREEDY and not wrong_every:
        assert done.accepted_draft_tokens == done.proposed_draft_tokens
    assert drafted.read(sequence, lambda s: s.draft.observed) == list(range(len(prompt) + 24))


def test_drafts_stop_at_an_eos(make_engine: MakeEngine, oracle: Oracle) -> None:
    answer = oracle.greedy(PROMPT, 12, 2, 8)
    eos = answer[5]
    expected = answer[: answer.index(eos) + 1]
    engine = make_engine(None, Guesser(clairvoyant(oracle)))
    sequence = engine.open("someone", [eos])
    assert say(engine, sequence, PROMPT, 12) == expected
    assert say(engine, sequence, [4], 1) == oracle.greedy([*PROMPT, *expected, 4], 1, 2, 8)


def test_a_cancel_rolls_drafts_back(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine(None, Guesser(clairvoyant(oracle)))
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT * 4)
    stream = engine.generate(sequence, 50, GREEDY)
    kept = [e.token_id for e in (stream.next_event(10) for _ in range(4)) if isinstance(e, TokenEvent)]
    time.sleep(0.05)
    stream.cancel()
    kept += tokens_of(stream)
    spoken = PROMPT * 4 + kept
    assert engine.read(sequence, lambda s: s.draft.observed) == list(range(len(spoken) - 1))
    assert say(engine, sequence, [4], 9) == oracle.greedy([*spoken, 4], 9, 2, 8)


def test_draft_state_travels_with_fork_and_export(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine(None, Guesser(clairvoyant(oracle)))
    sequence = engine.open("someone", [])
    say(engine, sequence, PROMPT, 3)
    observed = engine.read(sequence, lambda s: list(s.draft.observed))
    assert observed == list(range(7))
    assert engine.read(engine.fork(sequence), lambda s: s.draft.observed) == observed
    imported = engine.import_state(engine.export_state(sequence), "someone")
    assert engine.read(imported, lambda s: s.draft.observed) == observed


@pytest.mark.parametrize("guess", [[], [-1, 4], [tiny.VOCAB], [4] * 50])
def test_odd_guesses_do_no_harm(make_engine: MakeEngine, oracle: Oracle, guess: list[int]) -> None:
    engine = make_engine(None, Guesser(lambda tokens: guess))
    assert say(engine, engine.open("someone", []), PROMPT, 12) == oracle.greedy(PROMPT, 12, 2, 8)


def test_a_draft_never_overruns_spare_slots_or_the_request(make_engine: MakeEngine, oracle: Oracle) -> None:
    proposer = Guesser(clairvoyant(oracle))
    engine = make_engine(tiny.engine_config(spare=2), proposer)
    assert len(say(engine, engine.open("someone", []), PROMPT, 6)) == 6
    assert max(proposer.limits) <= 2


@pytest.mark.parametrize("method", ["propose", "observe"])
def test_a_proposer_that_raises_costs_speed_only(
    make_engine: MakeEngine, oracle: Oracle, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = Guesser(clairvoyant(oracle))

    def broken(*args: object) -> None:
        raise ValueError("a proposer's bug")

    monkeypatch.setattr(proposer, method, broken)
    engine = make_engine(None, proposer)
    sequence = engine.open("someone", [])
    assert say(engine, sequence, PROMPT, 12) == oracle.greedy(PROMPT, 12, 2, 8)
    assert engine.read(sequence, lambda s: s.draft) is None


def test_a_fork_that_fails_gives_its_slab_back(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    say(engine, sequence, PROMPT, 2)
    free = engine._backend.pool.free_count

    def refuse(copy: object, other: object) -> None:
        raise RuntimeError("no copy today")

    with monkeypatch.context() as patch:
        patch.setattr("kakeya.engine.sequence.TokenSequence.copy_from", refuse)
        with pytest.raises(RuntimeError, match="no copy today"):
            engine.fork(sequence)
    assert engine._backend.pool.free_count == free
    assert len(say(engine, engine.fork(sequence), [30], 3)) == 3


def test_a_slab_that_cannot_be_reserved_fails_its_own_request(
    make_engine: MakeEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    good, bad = engine.open("good", []), engine.open("bad", [])
    reserve = KVSlab.reserve

    def without_memory(slab: KVSlab, rows: int) -> int:
        if slab is bad.slab:
            raise MemoryError("no room to save what is overwritten")
        return reserve(slab, rows)

    monkeypatch.setattr(KVSlab, "reserve", without_memory)
    for sequence in (good, bad):
        engine.append(sequence, PROMPT)
    streams = [engine.generate(sequence, 6, GREEDY) for sequence in (good, bad)]
    assert tokens_of(streams[0]) == oracle.greedy(PROMPT, 6, 2, 8)
    with pytest.raises(StepFailed, match="no room to save"):
        tokens_of(streams[1])
