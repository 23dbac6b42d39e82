"""The engine's behaviour: turns, cancel, stalls, fairness, shutdown."""

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from kakeya.engine.batch import Segment
from kakeya.engine.engine import Engine
from kakeya.engine.request import RequestListener
from kakeya.engine.stream import EventStream
from kakeya.errors import (
    HistoryMismatch,
    InvalidArgument,
    ResourceExhausted,
    SessionBusy,
    SessionNotFound,
    Unavailable,
)
from kakeya.types import DoneEvent, Event, FailedEvent, SamplingParams, StopReason, TokenEvent, TruncatedEvent
from support import tiny
from support.engines import GREEDY, Hooked, done_of, say, tokens_of
from support.reference import Oracle

MakeEngine = Callable[..., Engine]
PROMPT = [5, 9, 22, 13, 7]


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
    assert say(engine, lively, PROMPT, 60) == oracle.greedy(PROMPT, 60, 2, 8)
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


# Batching and fairness.


def test_a_long_prompt_does_not_stall_a_stream(hooked: Callable[..., tuple[Engine, Hooked]]) -> None:
    asked = threading.Event()

    def step_slowly(segments: object) -> None:
        asked.wait(0.05)  # until both have asked, or a busy machine might let the stream end before

    # Spare slots for the whole answer: a talker whose tokens nobody has read yet is left out otherwise.
    engine, backend = hooked(step_slowly, spare=100, prefill_block=8, max_batch_tokens=16)
    talker, reader = engine.open("talker", []), engine.open("reader", [])
    engine.append(talker, PROMPT)
    stream = engine.generate(talker, 100, GREEDY)
    stream.next_event(10)
    engine.append(reader, PROMPT * 40)
    long = engine.generate(reader, 1, GREEDY)
    asked.set()
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


def test_a_sequence_is_closed_only_if_it_is_unwanted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    assert not engine.close_if(sequence, lambda s: False)
    assert engine.append(sequence, PROMPT) == len(PROMPT)
    assert engine.close_if(sequence, lambda s: s.committed == len(PROMPT))
    assert [engine.open("someone", []) for _ in range(tiny.engine_config().capacity)]
