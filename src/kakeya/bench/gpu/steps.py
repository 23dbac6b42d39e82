"""Bare steps of the CUDA backend: its own captured graphs, replayed without the engine around them.

A step is prepared as a launch prepares it (rows arranged, tables sent) and then replayed, over and over on
the same tables; nothing is committed, and the slabs are given back.
"""

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kakeya.bench.gpu.device import timed
from kakeya.engine.batch import Segment
from kakeya.engine.cuda.backend import CudaBackend
from kakeya.engine.sampler import SampleRequest
from kakeya.engine.sequence import TokenSequence
from kakeya.types import SamplingParams

Replay = Callable[[], None]

# Of one kind, before it is another's turn.
_IN_A_ROW = 5


class BareSteps:
    """The steps of one backend whose engine rests. Use it as made by `bare_steps`."""

    def __init__(self, backend: CudaBackend, sequences: Sequence[TokenSequence]) -> None:
        self._backend, self._sequences = backend, sequences
        self._random = random.Random(0)

    def decode(self, rows: int, position: int) -> Replay:
        """Prepare a step in which `rows` sessions choose their next token after `position` others."""
        return self._prepared([(each, 1) for each in self._sequences[:rows]], position)

    def prompt(self, rows: int, position: int) -> Replay:
        """Prepare a step in which one session reads so many tokens, and chooses one."""
        return self._prepared([(self._sequences[0], rows)], position)

    def _prepared(self, read: Sequence[tuple[TokenSequence, int]], position: int) -> Replay:
        vocabulary = range(self._backend.vocab_size)
        segments = [
            Segment(sequence, position, self._random.choices(vocabulary, k=count), 0, 1)
            for sequence, count in read
        ]
        requests = [SampleRequest(SamplingParams(), segment.end) for segment in segments]
        return self._backend.prepared(segments, requests)


@contextmanager
def bare_steps(backend: CudaBackend, sessions: int) -> Iterator[BareSteps]:
    """Takes so many free slabs, filled with noise: zeros would be cheaper to compute with."""
    slabs = [backend.pool.allocate() for _ in range(sessions)]
    for slab in slabs:
        slab.storage.normal_()
    try:
        yield BareSteps(backend, [TokenSequence(slab, "bench", (), None) for slab in slabs])
    finally:
        for slab in slabs:
            backend.pool.release(slab)


def step_seconds(backend: CudaBackend, rows: int, position: int, repeats: int) -> list[float]:
    """Of single-token steps of `rows` sessions, one after the other."""
    with bare_steps(backend, rows) as steps:
        return timed(backend.pool.device, steps.decode(rows, position), repeats)


def history_seconds(
    backend: CudaBackend, rows: int, positions: Sequence[int], repeats: int
) -> dict[int, list[float]]:
    """Steps at each of several positions, in turns: one median of a few for each repetition."""
    taken: dict[int, list[float]] = {position: [] for position in positions}
    with bare_steps(backend, rows) as steps:
        for repetition in range(repeats):
            for position in positions if repetition % 2 else reversed(positions):
                some = timed(backend.pool.device, steps.decode(rows, position), _IN_A_ROW)
                taken[position].append(statistics.median(some))
    return taken


def prompt_seconds(backend: CudaBackend, rows: int, position: int, repeats: int) -> list[float]:
    """Of a step in which one session reads `rows` tokens."""
    with bare_steps(backend, 1) as steps:
        return timed(backend.pool.device, steps.prompt(rows, position), repeats)


def seconds_of_both(
    one: CudaBackend, other: CudaBackend, rows: int, position: int, repeats: int
) -> tuple[list[float], list[float]]:
    """The same step on two backends, in turns."""
    taken: tuple[list[float], list[float]] = ([], [])
    with bare_steps(one, rows) as first, bare_steps(other, rows) as second:
        replays = [steps.decode(rows, position) for steps in (first, second)]
        for _ in range(repeats):
            for place, replay in enumerate(replays):
                taken[place].append(statistics.median(timed(one.pool.device, replay, _IN_A_ROW)))
    return taken
