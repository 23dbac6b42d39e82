"""Facts are asked for in every memory, with the same histories."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from kakeya.bench.recall import material
from kakeya.bench.recall.material import Filler, Trial, make_trial
from kakeya.bench.recall.reading import (
    TAIL,
    Looked,
    answer,
    holds,
    look,
    random_pages,
    right_pages,
    shorten,
)
from kakeya.bench.recall.rows import Asked
from kakeya.recall.index import Vocabulary
from kakeya.types import TokenRange

if TYPE_CHECKING:
    from kakeya.bench.recall.benchmark import RecallBench
    from kakeya.runtime import Runtime

FULL, BOUNDED, RANDOM, RECALL, WHOLE, RIGHT, PINNED = (
    "full attention",
    "bounded",
    "random pages",
    "recall",
    "recall with all computed",
    "right pages",
    "pinned",
)
MEMORIES = (FULL, WHOLE, BOUNDED, RANDOM, RECALL, RIGHT, PINNED)


def near_kind(kind: str) -> str:
    return f"{kind}, within the window"


@dataclass(frozen=True)
class Answered:
    """One trial: its lookup, and for each memory the answer and how many tokens no model read."""

    looked: Looked
    by_memory: dict[str, tuple[Asked, int]]


class Asker:
    """One bench, its two runtimes (bounded and not) and its text."""

    def __init__(self, bench: "RecallBench", runtime: "Runtime", unbounded: "Runtime", text: str) -> None:
        self._bench, self._runtime, self._unbounded = bench, runtime, unbounded
        tokenizer = runtime.tokenizer
        self._encode = partial(tokenizer.encode, special=False)
        self._start = tokenizer.encode("", bos=True)
        self._vocabulary = Vocabulary([tokenizer.text_bytes(each) for each in range(tokenizer.vocab_size)])
        self._filler = Filler(self._encode, text)

    def ask(self, kind: str, distance: int, number: int) -> Answered:
        """Put one trial to each memory that can be asked at this distance."""
        trial = self._trial(kind, distance, number)
        looked = look(self._vocabulary, trial, self._bench.memory)
        return Answered(looked, dict(self._answers(trial, looked, f"{kind} {number}", distance)))

    def ask_within(self, number: int) -> dict[str, Asked]:
        """A fact that the window still holds, with a history that has outgrown it."""
        trial = self._trial(material.EIGHT, self._bench.near, number, lead=self._bench.cache.capacity)
        asked = {}
        for memory, recall in ((BOUNDED, 0), (WHOLE, self._bench.recall)):
            if memory in self._bench.memories_asked:
                said = answer(self._runtime, trial.history, trial.question, recall=recall)
                asked[memory] = Asked(None, trial.telling.is_right(said.text), said.text)
        return asked

    def _trial(self, kind: str, distance: int, number: int, lead: int | None = None) -> Trial:
        memory, seed = self._bench.memory, f"{self._bench.seed} {number}"
        lead = memory.pinned + memory.recall if lead is None else lead
        trial = make_trial(kind, distance, seed, self._encode, self._filler, lead)
        shift = len(self._start)
        sought = tuple(TokenRange(each.start + shift, each.end + shift) for each in trial.sought)
        return replace(trial, history=[*self._start, *trial.history], sought=sought)

    def _answers(
        self, trial: Trial, looked: Looked, seed: str, distance: int
    ) -> Iterator[tuple[str, tuple[Asked, int]]]:
        """What each memory that was asked for says, of those that this trial can be put to."""
        memory = self._bench.memory
        ways: dict[str, Callable[[], tuple[Asked, int]]] = {
            FULL: lambda: self._read(trial, (), runtime=self._unbounded),
            WHOLE: lambda: self._whole(trial),
            BOUNDED: lambda: self._read(trial, ()),
            RANDOM: lambda: self._read(trial, random_pages(trial, memory, seed)),
            RECALL: lambda: self._read(trial, looked.ranges),
            RIGHT: lambda: self._read(trial, right_pages(trial, memory)),
            PINNED: lambda: self._pin(trial),
        }
        impossible = set[str]() if trial.sought else {RIGHT, PINNED}
        if distance > self._bench.full_tokens:
            impossible.add(FULL)
        if distance > self._bench.whole_tokens:
            impossible.add(WHOLE)
        for name in self._bench.memories_asked:
            if name not in impossible:
                yield name, ways[name]()

    def _read(
        self, trial: Trial, ranges: Sequence[TokenRange], runtime: "Runtime | None" = None
    ) -> tuple[Asked, int]:
        if runtime is not None:
            return self._asked(trial, answer(runtime, trial.history, trial.question).text), 0
        short = shorten(trial, ranges, self._bench.memory)
        recall = self._bench.recall if ranges else 0
        said = answer(self._runtime, short.history, trial.question, recall=recall, ranges=short.ranges)
        found = holds(ranges, trial.sought) if ranges and trial.sought else None
        return self._asked(trial, said.text, found), short.left_out

    def _whole(self, trial: Trial) -> tuple[Asked, int]:
        """The session searches for itself, and everything is computed."""
        said = answer(self._runtime, trial.history, trial.question, recall=self._bench.recall)
        found = holds(said.done.recalled, trial.sought) if trial.sought else None
        return self._asked(trial, said.text, found), 0

    def _pin(self, trial: Trial) -> tuple[Asked, int]:
        """The facts come first and are never evicted."""
        first = [token for each in trial.sought for token in trial.history[each.start : each.end]]
        head = [*self._start, *first]
        tail = trial.history[-2 * self._bench.cache.capacity - TAIL :]
        said = answer(
            self._runtime, [*head, *tail], trial.question, pinned=max(len(head), self._bench.cache.sink)
        )
        return self._asked(trial, said.text), len(trial.history) - len(head) - len(tail)

    def _asked(self, trial: Trial, text: str, found: bool | None = None) -> Asked:
        return Asked(found, trial.telling.is_right(text), text)
