"""The life of a request: its states, and which end it comes to when a cancel meets its last token."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from kakeya.engine.engine import Engine
from kakeya.engine.request import Request, RequestListener, State
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.stream import EventStream
from kakeya.errors import StepFailed
from kakeya.types import DoneEvent, FailedEvent, StopReason, TokenEvent
from support import tiny
from support.engines import GREEDY, Room, say, tokens_of

PROMPT = [5, 9, 22, 13, 7]
COUNT = 4


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    """The spare slots hold an answer, so that it is finished before anybody reads it."""
    return make_engine(tiny.engine_config(spare=COUNT))


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """The engine thread does nothing meanwhile."""
    reached, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert let_go.wait(10)

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(engine._inbox.ask, hold)
        assert reached.wait(10)
        try:
            yield
        finally:
            let_go.set()
            holding.result(10)


def finished(engine: Engine) -> tuple[TokenSequence, EventStream]:
    """A generate whose last token waits for its reader, and the done event behind it."""
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    stream = engine.generate(sequence, COUNT, GREEDY)
    while engine.read(sequence, lambda s: s.request is None or s.request.state is not State.FINISHED):
        pass
    return sequence, stream


def test_a_generate_whose_last_token_was_taken_has_ended_by_itself(engine: Engine) -> None:
    sequence, stream = finished(engine)
    with held(engine):
        tokens = [stream.next_event(10) for _ in range(COUNT)]
        stream.cancel()
    done = stream.next_event(10)
    assert all(isinstance(token, TokenEvent) for token in tokens)
    assert isinstance(done, DoneEvent)
    assert (done.stop_reason, done.generated_token_count) == (StopReason.MAX_TOKENS, COUNT)
    assert engine.read(sequence, lambda s: (s.committed, s.request)) == (len(PROMPT) + COUNT, None)


def test_a_generate_whose_last_token_was_not_taken_is_cancelled(engine: Engine) -> None:
    sequence, stream = finished(engine)
    with held(engine):
        for _ in range(COUNT - 1):
            stream.next_event(10)
        stream.cancel()
    engine.rest(sequence)
    done = stream.next_event(10)
    assert isinstance(done, DoneEvent)
    assert (done.stop_reason, done.generated_token_count) == (StopReason.CANCELLED, COUNT - 1)
    assert engine.read(sequence, lambda s: (s.committed, s.request)) == (len(PROMPT) + COUNT - 1, None)


def test_an_engine_that_stops_tells_the_same_end(engine: Engine) -> None:
    _, stream = finished(engine)
    with held(engine):
        for _ in range(COUNT):
            stream.next_event(10)
        engine._stopping = True
    engine.shutdown()
    done = stream.next_event(10)
    assert isinstance(done, DoneEvent)
    assert done.stop_reason is StopReason.MAX_TOKENS


def new_request() -> tuple[Room, Request]:
    room = Room(tiny.engine_config())
    return room, room.start("someone", len(PROMPT))


def finish(request: Request) -> None:
    request.start()
    request.sequence.slab.written = len(PROMPT) + 1
    for token_id in (11, 12):
        request.sequence.tokens.append(token_id)
        request.emit(TokenEvent(token_id))
    request.finish(StopReason.EOS)


def test_a_request_walks_from_the_queue_to_its_end() -> None:
    room, request = new_request()
    seen = [request.state]
    finish(request)
    seen.append(request.state)
    room.scheduler.settle()
    assert room.scheduler.active == [request]
    request.stream.poll_all()
    room.scheduler.settle()
    assert [*seen, request.state] == [State.QUEUED, State.FINISHED, State.OVER]
    assert request.sequence.request is None
    assert room.scheduler.active == []


def test_a_cancel_is_carried_out_by_whoever_looks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its reader has every token: the end that it was given may never reach the reader."""
    room, request = new_request()
    cuts: list[EventStream] = []
    monkeypatch.setattr(EventStream, "cut", lambda self, _: cuts.append(self))
    finish(request)
    request.stream.cancel()
    request.stream.next_event(0)
    request.stream.next_event(0)
    request.sequence.settle()
    assert cuts == [request.stream]
    assert request.state is State.OVER
    assert room.scheduler.active == []


@pytest.mark.parametrize("end", [Request.cancel, lambda request: request.fail(StepFailed("a bug"))])
@pytest.mark.parametrize("start", [lambda request: None, Request.start])
def test_every_state_leads_to_the_end(
    start: Callable[[Request], None], end: Callable[[Request], None]
) -> None:
    room, request = new_request()
    start(request)
    end(request)
    assert request.state is State.OVER
    assert isinstance(request.stream.next_event(0), DoneEvent | FailedEvent)
    assert room.scheduler.active == []


class Diary(RequestListener):
    """Writes down when it is called, with what the reader had taken by then."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, int]] = []

    def answered(self, request: Request) -> None:
        self.entries.append(("answered", request.stream.taken))

    def ended(self, request: Request) -> None:
        assert isinstance(request.terminal, DoneEvent)
        self.entries.append((request.terminal.stop_reason, request.stream.taken))


def test_a_listener_hears_the_answer_before_the_reader_does(engine: Engine) -> None:
    sequence, diary = engine.open("someone", []), Diary()
    engine.append(sequence, PROMPT)
    stream = engine.generate(sequence, 3, GREEDY, diary)
    events = [stream.next_event(10) for _ in range(4)]
    assert isinstance(events[-1], DoneEvent)
    assert diary.entries[0][0] == "answered"
    engine.read(sequence, lambda s: None)
    assert [name for name, _ in diary.entries] == ["answered", StopReason.MAX_TOKENS]
    assert diary.entries[-1] == (StopReason.MAX_TOKENS, 3)


def test_the_end_a_listener_hears_is_the_final_one(engine: Engine) -> None:
    sequence, diary = engine.open("someone", []), Diary()
    engine.append(sequence, PROMPT)
    stream = engine.generate(sequence, 3, GREEDY, diary)
    stream.next_event(10)
    while not diary.entries:
        engine.read(sequence, lambda s: None)
    engine.close(sequence)
    assert [name for name, _ in diary.entries] == ["answered", StopReason.CANCELLED]
    assert diary.entries[-1] == (StopReason.CANCELLED, 1)


class Clumsy(RequestListener):
    """Fails at everything it hears."""

    def answered(self, request: Request) -> None:
        raise ValueError("clumsy")

    ended = answered


def test_a_listener_that_fails_harms_nobody(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    assert len(tokens_of(engine.generate(sequence, 3, GREEDY, Clumsy()))) == 3
    assert len(say(engine, sequence, [4], 3)) == 3
    assert caplog.text.count("ValueError: clumsy") == 2
