"""What the engine tells while it works, and that a bad listener harms nobody."""

from collections.abc import Callable

import pytest

from kakeya.engine.engine import Engine
from kakeya.engine.request import Request, RequestListener
from kakeya.models.decoder import Decoder
from kakeya.types import DoneEvent, StopReason
from support import tiny
from support.turns import GREEDY, say, tokens_of

PROMPT = [5, 9, 22, 13, 7]


class Diary(RequestListener):
    """Writes down when it is called, with what the reader had taken by then."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, int]] = []

    def answered(self, request: Request) -> None:
        self.entries.append(("answered", request.stream.taken))

    def ended(self, request: Request) -> None:
        assert isinstance(request.terminal, DoneEvent)
        self.entries.append((request.terminal.stop_reason, request.stream.taken))


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


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


def test_a_sequence_is_closed_only_if_it_is_unwanted(decoder: Decoder, engine: Engine) -> None:
    sequence = engine.open("someone", [])
    assert not engine.close_if(sequence, lambda s: False)
    assert engine.append(sequence, PROMPT) == len(PROMPT)
    assert engine.close_if(sequence, lambda s: s.committed == len(PROMPT))
    assert [engine.open("someone", []) for _ in range(tiny.engine_config().capacity)]
