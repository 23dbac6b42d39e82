"""A trial is searched as it is, however long, and read by the model as far as the model could tell.

What a model computes depends on what its session sees: the pinned tokens, the pages that were brought back,
and the window. Older text reaches it only through the window's own keys. So of a long history the model reads
the beginning, the chosen pages, and two windows before the question. Reports say how much was left out.
"""

import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kakeya.bench.recall.material import Trial
from kakeya.bench.streams import tokens_of
from kakeya.recall.index import PAGE, RecallIndex, Vocabulary
from kakeya.types import DoneEvent, TokenRange

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

ANSWER_TOKENS = 24
# At most so many tokens at a prompt's end see what is recalled, whatever the blocks.
TAIL = 256


@dataclass(frozen=True)
class Memory:
    """What a session has: first tokens, a window, and slots to bring tokens back into."""

    pinned: int
    window: int
    recall: int

    @property
    def capacity(self) -> int:
        return self.pinned + self.window + self.recall


@dataclass(frozen=True)
class Looked:
    """What a search found, and what it took."""

    ranges: tuple[TokenRange, ...]
    seconds: float
    bytes_a_token: float


def sees_from(trial: Trial) -> int:
    """No later does a session begin to see what it recalls."""
    return len(trial.history) + len(trial.question) - TAIL


def look(vocabulary: Vocabulary, trial: Trial, memory: Memory) -> Looked:
    """Search the whole history for what the question is about."""
    index = RecallIndex(vocabulary)
    told = array("i", [*trial.history, *trial.question])
    index.extend(told)
    began = time.perf_counter()
    ranges = index.choose(
        told,
        sees_from(trial),
        pinned=memory.pinned,
        window=memory.window,
        recall=memory.recall,
        query_from=0 if trial.telling.pasted else len(trial.history),
    )
    return Looked(ranges, time.perf_counter() - began, 4 + index.nbytes / index.length)


def right_pages(trial: Trial, memory: Memory) -> tuple[TokenRange, ...]:
    """The facts that are sought, each with some of the text around it."""
    around = [max(0, PAGE - each.length) // 2 for each in trial.sought]
    return tuple(
        TokenRange(max(memory.pinned, each.start - more), each.end + more)
        for each, more in zip(trial.sought, around, strict=True)
    )


def random_pages(trial: Trial, memory: Memory, seed: str) -> tuple[TokenRange, ...]:
    """As many tokens as may be brought back, from anywhere but the sought facts."""
    chance, hidden = random.Random(seed), sees_from(trial) - memory.window - PAGE
    starts = range(memory.pinned, max(hidden, memory.pinned + PAGE), PAGE)
    free = [
        start for start in starts if not holds([TokenRange(start - PAGE, start + 2 * PAGE)], trial.sought[:1])
    ]
    chosen = chance.sample(free, min(len(free), memory.recall // PAGE))
    return tuple(TokenRange(start, start + PAGE) for start in sorted(chosen))


def holds(ranges: Sequence[TokenRange], sought: Sequence[TokenRange]) -> bool:
    """Whether every sought fact lies within one of the ranges, but for the line's ends around it."""
    return bool(sought) and all(
        any(each.start <= fact.start + 1 and each.end >= fact.end - 1 for each in ranges) for fact in sought
    )


@dataclass(frozen=True)
class Shortened:
    """A history without what the model could not tell, and where the ranges lie in it."""

    history: list[int]
    ranges: tuple[TokenRange, ...]
    left_out: int


def shorten(trial: Trial, ranges: Sequence[TokenRange], memory: Memory) -> Shortened:
    """The beginning, the ranges, and two windows. A history that is no longer than that stays whole."""
    head = trial.history[: memory.capacity - memory.window]
    tail = 2 * (memory.window + memory.recall) + TAIL
    if len(trial.history) <= len(head) + sum(each.length for each in ranges) + tail:
        return Shortened(trial.history, tuple(ranges), 0)
    history, placed = list(head), []
    for each in ranges:
        placed.append(TokenRange(len(history), len(history) + each.length))
        history += trial.history[each.start : each.end]
    history += trial.history[-tail:]
    return Shortened(history, _joined(placed), len(trial.history) - len(history))


def _joined(ranges: Sequence[TokenRange]) -> tuple[TokenRange, ...]:
    """One range where they follow each other without a gap, as these do."""
    return (TokenRange(ranges[0].start, ranges[-1].end),) if ranges else ()


@dataclass(frozen=True)
class Said:
    """What a session answered."""

    text: str
    done: DoneEvent


def answer(
    runtime: "Runtime",
    history: Sequence[int],
    question: Sequence[int],
    *,
    recall: int = 0,
    ranges: Sequence[TokenRange] | None = None,
    pinned: int | None = None,
) -> Said:
    """What a new session says. With `recall` it brings back what it finds itself, or these ranges."""
    session_id = runtime.create_session(pinned_prefix_tokens=pinned, recall_tokens=recall)
    try:
        runtime.append(session_id, [*history, *question])
        if ranges:
            runtime.recall(session_id, ranges)
        events = list(runtime.generate(session_id, ANSWER_TOKENS))
    finally:
        runtime.close_session(session_id)
    done = events[-1]
    assert isinstance(done, DoneEvent)
    return Said(runtime.tokenizer.decode(tokens_of(events)), done)
