"""An engine whose device fails for good dies at once: everybody is told, and nobody waits."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from kakeya.engine import scoring
from kakeya.engine.engine import Engine
from kakeya.engine.request import RequestListener, State
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.slab import KVSlab
from kakeya.engine.stream import EventStream
from kakeya.errors import InvariantViolation, KakeyaError, StepFailed, Unavailable
from kakeya.observer import UNOBSERVED, EngineObserver
from kakeya.types import FailedEvent, TokenEvent
from support import tiny
from support.engines import FAULT, GREEDY, REASON, Breakable, done_of, fault, say, tokens_of

PROMPT = [5, 9, 22, 13, 7]
ENDLESS = 100_000
WAIT_S = 20.0
MakeBreakable = Callable[..., tuple[Engine, Breakable]]


@pytest.fixture
def make(decoder: tiny.Model) -> Iterator[MakeBreakable]:
    engines: list[Engine] = []

    def make(observer: EngineObserver = UNOBSERVED, **changes: object) -> tuple[Engine, Breakable]:
        config = tiny.engine_config(**changes)
        breakable = Breakable(tiny.make_backend(decoder, config))
        engines.append(Engine(breakable, config, observer=observer).start())
        return engines[-1], breakable

    yield make
    for engine in engines:
        engine.shutdown()


def started(engine: Engine, count: int = ENDLESS) -> tuple[TokenSequence, EventStream]:
    """A generate whose first tokens have been read."""
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    stream = engine.generate(sequence, count, GREEDY)
    for _ in range(4):
        assert isinstance(stream.next_event(WAIT_S), TokenEvent)
    return sequence, stream


def ending(stream: EventStream) -> str:
    """What a stream's reader is told in the end, if it was Unavailable."""
    while True:
        event = stream.next_event(WAIT_S)
        if isinstance(event, FailedEvent):
            assert isinstance(event.error, Unavailable)
            return str(event.error)


@pytest.mark.parametrize("work", ["launch", "follow", "result"])
def test_a_lost_device_ends_every_request_and_refuses_every_call(make: MakeBreakable, work: str) -> None:
    engine, broken = make(spare=300)  # nobody waits for a reader, so steps follow each other
    resting = engine.open("someone", [])
    running = [started(engine) for _ in range(3)]
    broken.breaks_at = work
    assert [ending(stream) for _, stream in running] == [REASON] * 3
    assert engine.ended.result(WAIT_S) == REASON
    for call in (
        lambda: engine.open("someone", []),
        lambda: engine.append(resting, [3]),
        lambda: engine.generate(running[0][0], 1, GREEDY),
        lambda: engine.read(resting, lambda sequence: sequence.committed),
        lambda: engine.fork(resting),
        lambda: engine.close(resting),
    ):
        with pytest.raises(Unavailable, match=FAULT):
            call()
    assert engine.drain(WAIT_S)
    assert broken.works_when_broken <= 1, "a step already launched is read at most; nothing is tried again"


@pytest.mark.parametrize(
    ("patched", "call"),
    [
        ((KVSlab, "copy_from"), lambda engine, sequence: engine.fork(sequence)),
        ((KVSlab, "slot_positions"), lambda engine, sequence: engine.export_state(sequence)),
        ((KVSlab, "reserve"), lambda engine, sequence: engine.score([3, 4])),
    ],
)
def test_a_call_that_loses_the_device_ends_what_runs(
    make: MakeBreakable,
    monkeypatch: pytest.MonkeyPatch,
    patched: tuple[type, str],
    call: Callable[[Engine, TokenSequence], object],
) -> None:
    engine, broken = make()
    resting = engine.open("someone", [])
    engine.append(resting, PROMPT)
    # Nothing but the call itself meets the device: this one waits for its reader.
    _, stream = started(engine)
    while stream.unread < tiny.engine_config().cache.spare:
        engine.read(resting, lambda sequence: None)
    broken.breaks_at = "copy"
    monkeypatch.setattr(*patched, lambda *_: broken.work("copy"))
    with pytest.raises(Unavailable, match=FAULT):
        call(engine, resting)
    assert ending(stream) == REASON


def test_scoring_that_loses_the_device(make: MakeBreakable) -> None:
    engine, broken = make()
    broken.breaks_at = "score"
    with pytest.raises(Unavailable, match=FAULT):
        engine.score([3, 4])
    assert engine.ended.result(WAIT_S) == REASON


def test_fetching_scores_that_finds_the_device_lost(
    make: MakeBreakable, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, broken = make()
    broken.breaks_at = "fetch"
    monkeypatch.setattr(scoring, "fetch", lambda *_: broken.work("fetch"))
    with pytest.raises(Unavailable, match=FAULT):
        list(scoring.score_tokens(engine, [3, 4], 1))
    assert engine.ended.result(WAIT_S) == REASON


def test_work_of_other_threads_that_loses_the_device_is_known_to_an_idle_engine(make: MakeBreakable) -> None:
    engine, broken = make()
    with pytest.raises(KakeyaError, match="ours"), engine.using_device():
        raise KakeyaError("ours")
    with pytest.raises(RuntimeError, match="odd"), engine.using_device():
        raise RuntimeError("odd, and the device is fine")
    assert not engine.ended.done()
    broken.broken = True
    with pytest.raises(Unavailable, match=FAULT), engine.using_device():
        raise fault()
    assert engine.ended.result(WAIT_S) == REASON


@pytest.mark.parametrize("error", [fault(), torch.OutOfMemoryError("CUDA out of memory"), ValueError("odd")])
def test_an_error_that_the_device_survives_fails_its_own_request(
    make: MakeBreakable, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine, broken = make()
    good, bad = engine.open("good", []), engine.open("bad", [])
    run = broken._source.run

    def failing(segments: list[object], *rest: object) -> object:
        if any(segment.sequence is bad for segment in segments):  # type: ignore[attr-defined]
            raise error
        return run(segments, *rest)

    monkeypatch.setattr(broken._source, "run", failing)
    for sequence in (good, bad):
        engine.append(sequence, PROMPT)
    streams = [engine.generate(sequence, 6, GREEDY) for sequence in (good, bad)]
    assert len(tokens_of(streams[0])) == 6
    with pytest.raises(StepFailed):
        tokens_of(streams[1])
    assert not engine.ended.done()
    assert len(say(engine, good, [3], 2)) == 2


def test_a_cancel_that_finds_an_invariant_broken_fails_its_own_session(make: MakeBreakable) -> None:
    engine, _ = make()
    (bad, cancelled), (_, other) = started(engine), started(engine)

    def spoil(sequence: TokenSequence) -> None:
        sequence.slab.committed = 99
        cancelled.cancel()

    engine.read(bad, spoil)
    assert isinstance(other.next_event(WAIT_S), TokenEvent)
    assert engine.read(bad, lambda sequence: sequence.inv2_violations) == 1
    with pytest.raises(InvariantViolation):
        engine.append(bad, [3])
    assert len([other.next_event(WAIT_S) for _ in range(20)]) == 20


def test_who_waits_behind_the_call_that_kills_is_told_too(make: MakeBreakable) -> None:
    engine, broken = make()
    begun, proceed, told = threading.Event(), threading.Event(), []

    def last_call(sequence: TokenSequence) -> None:
        begun.set()
        proceed.wait(WAIT_S)
        broken.breaks_at = "look"
        broken.work("look")

    def ask(view: Callable[[TokenSequence], object]) -> None:
        try:
            engine.read(sequence, view)
        except Unavailable as error:
            told.append(str(error))

    sequence = engine.open("someone", [])
    threads = [threading.Thread(target=ask, args=(view,)) for view in (last_call, *[len] * 5)]
    threads[0].start()
    assert begun.wait(WAIT_S)
    for thread in threads[1:]:
        thread.start()
    while engine._inbox._queue.qsize() < 5:
        time.sleep(0.001)
    proceed.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert told == [REASON] * 6


def test_no_caller_who_races_with_the_death_waits_for_ever(make: MakeBreakable) -> None:
    engine, broken = make(capacity=16)
    turns, endings = threading.Semaphore(0), []

    def live() -> None:
        try:
            while True:
                sequence = engine.open("someone", [])
                say(engine, sequence, PROMPT, 3)
                engine.close(sequence)
                turns.release()
        except Unavailable as error:
            endings.append(str(error))

    threads = [threading.Thread(target=live) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        assert turns.acquire(timeout=WAIT_S)
    broken.breaks_at = "result"
    for thread in threads:
        thread.join(WAIT_S)
    assert endings == [REASON] * 8


def test_an_answer_that_is_whole_can_still_be_read(make: MakeBreakable) -> None:
    engine, broken = make(spare=16)
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    whole = engine.generate(sequence, 5, GREEDY)
    while engine.read(sequence, lambda s: s.request is None or s.request.state is not State.FINISHED):
        time.sleep(0.001)
    _, running = started(engine)
    broken.breaks_at = "launch"
    assert ending(running) == REASON
    assert done_of(whole).generated_token_count == 5


class Listening(RequestListener):
    """Counts what it hears."""

    def __init__(self) -> None:
        self.answers = self.ends = 0

    def answered(self, request: object) -> None:
        self.answers += 1

    def ended(self, request: object) -> None:
        self.ends += 1


class Broken(EngineObserver):
    """An observer with a bug of its own."""

    def request_ended(self, seconds: float, *, started: bool) -> None:
        raise ValueError("a bug in the metrics")


def test_everybody_is_told_whatever_else_breaks(make: MakeBreakable) -> None:
    """The first request's end kills the engine, and would stop the burial of the others."""
    engine, _ = make(Broken())
    listeners = [Listening() for _ in range(3)]
    streams = []
    for listener in listeners:
        sequence = engine.open("someone", [])
        engine.append(sequence, PROMPT)
        streams.append(engine.generate(sequence, ENDLESS, GREEDY, listener))
    streams[0].cancel()
    assert [ending(stream) for stream in streams[1:]] == ["the engine died; its log says why"] * 2
    assert engine.ended.result(WAIT_S) == "the engine died; its log says why"
    assert [listener.answers for listener in listeners] == [1, 1, 1]


def test_an_engine_that_was_shut_down_did_not_die(make: MakeBreakable) -> None:
    engine, _ = make()
    engine.shutdown()
    assert engine.ended.result(WAIT_S) is None
