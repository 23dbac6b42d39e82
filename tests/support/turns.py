"""Short ways to talk to an engine in tests."""

from collections.abc import Sequence

from kakeya.engine.engine import Engine
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.stream import EventStream
from kakeya.types import DoneEvent, SamplingParams, TokenEvent

GREEDY = SamplingParams()


def tokens_of(stream: EventStream) -> list[int]:
    return [event.token_id for event in stream if isinstance(event, TokenEvent)]


def say(
    engine: Engine,
    sequence: TokenSequence,
    tokens: Sequence[int],
    count: int,
    sampling: SamplingParams = GREEDY,
) -> list[int]:
    """One turn: append, generate, read to the end."""
    engine.append(sequence, list(tokens))
    return tokens_of(engine.generate(sequence, count, sampling))


def done_of(stream: EventStream) -> DoneEvent:
    last = list(stream)[-1]
    assert isinstance(last, DoneEvent)
    return last
