"""What recall costs: ordinary text that it might disturb, and the time of a turn."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kakeya.bench.recall.reading import TAIL, Memory
from kakeya.bench.recall.rows import Harm, TurnCost
from kakeya.bench.stats import Samples
from kakeya.recall.index import PAGE
from kakeya.types import SamplingParams, TokenEvent, TokenRange

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

SCORED = 64
MESSAGE = 32


@dataclass
class Spelled:
    """A constraint that lets one text come and nothing else: a generate scores it, and recall takes part."""

    token_ids: Sequence[int]
    at: int = field(default=0, init=False)

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        places = range(self.at, self.at + len(draft) + 1)
        return [_only(self.token_ids[place]) if place < len(self.token_ids) else b"" for place in places]

    def advance(self, token_ids: Sequence[int]) -> None:
        self.at += len(token_ids)

    @property
    def is_complete(self) -> bool:
        return self.at >= len(self.token_ids)


def _only(token_id: int) -> bytes:
    return bytes(token_id // 8) + bytes([1 << token_id % 8])


def measure_harm(runtime: "Runtime", text: Sequence[int], memory: Memory, passages: int) -> Harm:
    """The text goes on where something has left the window: with recall, and with a longer window."""
    told = memory.capacity + TAIL
    last = max(0, len(text) - told - SCORED)
    starts = [last * number // max(1, passages - 1) for number in range(passages)]
    surprises = {
        recall: [
            nats
            for start in starts
            for nats in _surprises(runtime, text[start : start + told + SCORED], recall)
        ]
        for recall in (memory.recall, 0)
    }
    tokens = len(surprises[0])
    return Harm(tokens, *(sum(surprises[recall]) / tokens for recall in (memory.recall, 0)))


def _surprises(runtime: "Runtime", text: Sequence[int], recall: int) -> Iterator[float]:
    session_id = runtime.create_session(recall_tokens=recall, eos_token_ids=())
    try:
        runtime.append(session_id, text[:-SCORED])
        forced = Spelled(text[-SCORED:])
        params = SamplingParams(logprobs=True)
        for event in runtime.generate(session_id, SCORED, params, constraint=forced):
            if isinstance(event, TokenEvent):
                assert event.logprob is not None
                yield -event.logprob
    finally:
        runtime.close_session(session_id)


def measure_turns(
    runtime: "Runtime", text: Sequence[int], memory: Memory, history: int, repeats: int
) -> TurnCost:
    """Short messages behind a history, each answered by one token."""
    text = [*text] * (1 + (history + 4 * repeats * MESSAGE) // len(text))
    one, other = (_pages(memory, first) for first in (0, 1))
    taken, device_bytes = {}, 0
    for name, recall, sets in (
        ("plain", 0, [()]),
        ("unchanged", memory.recall, [one, one]),
        ("changed", memory.recall, [one, other]),
    ):
        session_id = runtime.create_session(recall_tokens=recall, eos_token_ids=())
        try:
            runtime.append(session_id, text[:history])
            turns = list(_turns(runtime, session_id, text[history:], sets, repeats))
            taken[name] = Samples.of(turns)
            device_bytes = runtime.info(session_id).kv_capacity_bytes
        finally:
            runtime.close_session(session_id)
    return TurnCost(history, taken["plain"], taken["unchanged"], taken["changed"], device_bytes)


def _pages(memory: Memory, first: int) -> tuple[TokenRange, ...]:
    """Pages far apart, another set for each `first`."""
    count = memory.recall // PAGE
    starts = [memory.pinned + (2 * number + first) * PAGE for number in range(count)]
    return tuple(TokenRange(start, start + PAGE) for start in starts)


def _turns(
    runtime: "Runtime",
    session_id: str,
    text: Sequence[int],
    sets: Sequence[tuple[TokenRange, ...]],
    repeats: int,
) -> Iterator[float]:
    """The first turn computes the history and is not counted."""
    for number in range(repeats + 1):
        began = time.perf_counter()
        runtime.append(session_id, text[number * MESSAGE : (number + 1) * MESSAGE])
        if ranges := sets[number % len(sets)]:
            runtime.recall(session_id, ranges)
        list(runtime.generate(session_id, 1))
        if number:
            yield time.perf_counter() - began
