"""The inbox: what callers ask of the engine thread."""

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from kakeya.engine.batch import Segment
from kakeya.engine.engine import Engine
from kakeya.errors import ResourceExhausted
from support.engines import GREEDY, Hooked

PROMPT = [5, 9, 22, 13, 7]


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
