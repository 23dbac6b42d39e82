"""All trials of a run, asked here or spread over processes: their answers follow from the seed."""

import multiprocessing
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Protocol

from kakeya.bench.recall import material
from kakeya.bench.recall.asking import Answered, Asker, near_kind
from kakeya.bench.recall.reading import Looked
from kakeya.bench.recall.rows import Asked, RecallRow, SearchCost
from kakeya.bench.stats import Samples

if TYPE_CHECKING:
    from kakeya.bench.recall.benchmark import RecallBench


# Of each row the report keeps so many answers as text.
_ANSWERS_KEPT = 10


class Asks(Protocol):
    """Whoever asks trials by their numbers, and gives the answers in that order."""

    def ask(self, kind: str, distance: int, numbers: range) -> Iterator[Answered]: ...

    def ask_within(self, numbers: range) -> Iterator[dict[str, Asked]]: ...


class Trials:
    """Asks every cell of a run, and remembers what its lookups took."""

    def __init__(self, bench: "RecallBench", asks: Asks) -> None:
        self._numbers, self._near, self._asks = range(bench.trials), bench.near, asks
        self._looked: dict[int, list[Looked]] = defaultdict(list)

    def cell(self, kind: str, distance: int) -> list[RecallRow]:
        """A row for each memory that can be asked at this distance."""
        asked: dict[str, list[Asked]] = defaultdict(list)
        left_out: dict[str, int] = defaultdict(int)
        for answered in self._asks.ask(kind, distance, self._numbers):
            self._looked[distance].append(answered.looked)
            for memory, (each, left) in answered.by_memory.items():
                asked[memory].append(each)
                left_out[memory] += left
        return [RecallRow(each, kind, distance, _short(asked[each]), left_out[each]) for each in asked]

    def within(self) -> list[RecallRow]:
        """Facts that the window still holds."""
        rows: dict[str, list[Asked]] = defaultdict(list)
        for answered in self._asks.ask_within(self._numbers):
            for memory, asked in answered.items():
                rows[memory].append(asked)
        kind = near_kind(material.EIGHT)
        return [RecallRow(memory, kind, self._near, _short(asked)) for memory, asked in rows.items()]

    def searches(self) -> tuple[SearchCost, ...]:
        return tuple(
            SearchCost(
                distance,
                Samples.of(each.seconds for each in looked),
                max(each.bytes_a_token for each in looked),
            )
            for distance, looked in self._looked.items()
        )


def _short(asked: Sequence[Asked]) -> tuple[Asked, ...]:
    return (*asked[:_ANSWERS_KEPT], *(replace(each, answer="") for each in asked[_ANSWERS_KEPT:]))


@contextmanager
def trials_of(bench: "RecallBench", text: str) -> Iterator[Trials]:
    """The trials of a bench, asked in this process or in as many as it says."""
    with ExitStack() as stack:
        asks: Asks
        if bench.processes == 1:
            asks = _Here(_open(bench, text, stack))
        else:
            alone = replace(bench, processes=1, threads=bench.threads or 1)
            pool = ProcessPoolExecutor(
                bench.processes, multiprocessing.get_context("spawn"), _begin, (alone, text)
            )
            asks = _Elsewhere(stack.enter_context(pool))
        yield Trials(bench, asks)


class _Here:
    def __init__(self, asker: Asker) -> None:
        self._asker = asker

    def ask(self, kind: str, distance: int, numbers: range) -> Iterator[Answered]:
        return map(partial(self._asker.ask, kind, distance), numbers)

    def ask_within(self, numbers: range) -> Iterator[dict[str, Asked]]:
        return map(self._asker.ask_within, numbers)


class _Elsewhere:
    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def ask(self, kind: str, distance: int, numbers: range) -> Iterator[Answered]:
        return self._pool.map(partial(_ask, kind, distance), numbers)

    def ask_within(self, numbers: range) -> Iterator[dict[str, Asked]]:
        return self._pool.map(_ask_within, numbers)


def _open(bench: "RecallBench", text: str, stack: ExitStack) -> Asker:
    runtime = stack.enter_context(bench.open(bench.cache))
    return Asker(bench, runtime, stack.enter_context(bench.open(bench.unbounded)), text)


# What a process of the pool asks with. It is set once, before its first trial.
_asker: Asker


def _begin(bench: "RecallBench", text: str) -> None:
    global _asker
    stack = ExitStack()
    _asker = _open(bench, text, stack)
    Finalize(None, stack.close, exitpriority=0)


def _ask(kind: str, distance: int, number: int) -> Answered:
    return _asker.ask(kind, distance, number)


def _ask_within(number: int) -> dict[str, Asked]:
    return _asker.ask_within(number)
