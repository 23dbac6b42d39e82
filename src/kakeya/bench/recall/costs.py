"""What recall costs: ordinary text that it might disturb, and the time of a turn."""

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kakeya.bench.recall.reading import TAIL, Memory
from kakeya.bench.recall.rows import Harm, StreamCost, TurnCost
from kakeya.bench.stats import Samples
from kakeya.bench.streams import arrivals, gaps, session
from kakeya.recall.index import PAGE
from kakeya.types import DoneEvent, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

SCORED = 64
MESSAGE = 32
# The first turn computes the history, the second is like it.
WARM_UP = 2
STREAMS, AGENTS = 4, 16
STREAMED = 128


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
    with session(runtime, text[:-SCORED], recall=recall) as session_id:
        forced = Spelled(text[-SCORED:])
        params = SamplingParams(logprobs=True)
        for event in runtime.generate(session_id, SCORED, params, constraint=forced):
            if isinstance(event, TokenEvent):
                assert event.logprob is not None
                yield -event.logprob


def measure_turns(
    runtime: "Runtime", text: Sequence[int], memory: Memory, history: int, repeats: int, *, plain: bool
) -> TurnCost:
    """Short messages behind a history, each answered by one token; with `plain` also without recall."""
    text = [*text] * (2 + (history + (repeats + 2) * MESSAGE) // len(text))
    told, messages = text[:history], _messages(text[history:], repeats)
    without = _without_recall(runtime, told, messages) if plain else []
    with session(runtime, told, recall=memory.recall) as session_id:
        turns = [_turn(runtime, session_id, message) for message in messages]
        device_bytes = runtime.info(session_id).kv_capacity_bytes
    unchanged, changed = _by_what_was_recalled(turns)
    return TurnCost(history, Samples.of(without), Samples.of(unchanged), Samples.of(changed), device_bytes)


def _messages(text: Sequence[int], repeats: int) -> list[Sequence[int]]:
    """Each comes twice: for the same words the same pages are found again, for others, others."""
    first = [text[number * MESSAGE : (number + 1) * MESSAGE] for number in range(repeats + 2)]
    return [message for message in first for _ in range(2)]


def _without_recall(
    runtime: "Runtime", told: Sequence[int], messages: Sequence[Sequence[int]]
) -> list[float]:
    with session(runtime, told) as session_id:
        return [_turn(runtime, session_id, message)[0] for message in messages][WARM_UP:]


def _by_what_was_recalled(turns: Sequence[tuple[float, DoneEvent]]) -> tuple[list[float], list[float]]:
    """Seconds of the turns that saw the pages of the turn before, and of those that saw others."""
    unchanged: list[float] = []
    changed: list[float] = []
    for (_, before), (seconds, done) in itertools.pairwise(turns[WARM_UP - 1 :]):
        (unchanged if done.recalled == before.recalled else changed).append(seconds)
    return unchanged, changed


def measure_streams(
    runtime: "Runtime", text: Sequence[int], memory: Memory, repeats: int
) -> tuple[StreamCost, ...]:
    """How long streams wait between tokens: alone, beside turns of others, and where these recall."""
    cases = {"alone": None, "turns without recall": 0, "turns that recall": memory.recall}
    waited: dict[str, list[float]] = {case: [] for case in cases}
    turns = dict.fromkeys(cases, 0)
    with ExitStack() as stack:
        agents = {
            case: [_agent(runtime, stack, text, memory, recall, number) for number in range(AGENTS)]
            for case, recall in cases.items()
            if recall is not None
        }
        for _ in range(repeats):
            for case in cases:
                seen, taken = _streams_beside(runtime, text, agents.get(case, []))
                waited[case] += seen
                turns[case] += taken
    return tuple(StreamCost(case, Samples.of(waited[case]), turns[case]) for case in cases)


def _agent(
    runtime: "Runtime", stack: ExitStack, text: Sequence[int], memory: Memory, recall: int, number: int
) -> "Iterator[None]":
    """A session that has outgrown its memory; each `next` is a turn."""
    begins = number * PAGE % max(1, len(text) - 2 * memory.capacity)
    told = text[begins : begins + 2 * memory.capacity]
    session_id = stack.enter_context(session(runtime, told, recall=recall))
    turns = _endless_turns(runtime, session_id, text)
    next(turns)
    return turns


def _endless_turns(runtime: "Runtime", session_id: str, text: Sequence[int]) -> Iterator[None]:
    for number in itertools.count():
        begins = 7 * number * MESSAGE % (len(text) - MESSAGE)
        _turn(runtime, session_id, text[begins : begins + MESSAGE])
        yield


def _streams_beside(
    runtime: "Runtime", text: Sequence[int], agents: "Sequence[Iterator[None]]"
) -> tuple[list[float], int]:
    """The gaps of a few streams, and how many turns the agents took meanwhile, all at once."""
    with ThreadPoolExecutor(STREAMS + AGENTS) as pool:
        streams = [pool.submit(_gaps, runtime, text[number * PAGE :]) for number in range(STREAMS)]
        ended = threading.Event()
        busy = [pool.submit(_take_turns, agent, ended) for agent in agents]
        seen = [gap for stream in streams for gap in stream.result()]
        ended.set()
        return seen, sum(each.result() for each in busy)


def _take_turns(agent: "Iterator[None]", ended: threading.Event) -> int:
    turns = 0
    while not ended.is_set():
        next(agent)
        turns += 1
    return turns


def _gaps(runtime: "Runtime", text: Sequence[int]) -> list[float]:
    """Seconds between the tokens of one stream."""
    with session(runtime, text[:MESSAGE]) as session_id:
        return gaps(arrivals(runtime.generate(session_id, STREAMED)))


def _turn(runtime: "Runtime", session_id: str, message: Sequence[int]) -> tuple[float, DoneEvent]:
    """A message and the first token of its answer: how long that took, and how it ended."""
    began = time.perf_counter()
    runtime.append(session_id, message)
    *_, done = runtime.generate(session_id, 1)
    seconds = time.perf_counter() - began
    assert isinstance(done, DoneEvent)
    return seconds, done
