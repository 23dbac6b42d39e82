"""Which pages hold a term: sorted runs of numbers that are merged as they grow and never change."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int64]
_Run = NDArray[np.uint64]
_PAGE_BITS = np.uint64(32)
_PAGE = np.uint64(0xFFFF_FFFF)


class Postings:
    """Terms and the pages that hold them, 8 bytes for each pair of the two.

    A pair is one number, term before page. Pairs lie in sorted runs, oldest first, and each run is at least
    twice as long as the next: so there are few runs, and a pair is merged few times. Runs are immutable and
    forks share them.
    """

    def __init__(self, runs: tuple[_Run, ...] = ()) -> None:
        self._runs = runs

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self._runs)

    def fork(self) -> "Postings":
        return Postings(self._runs)

    def add(self, first_page: int, pages: Sequence[Iterable[int]]) -> None:
        """The terms of the next pages, each term of a page once."""
        pairs = [(term << 32) | page for page, terms in enumerate(pages, start=first_page) for term in terms]
        run = np.array(pairs, dtype=np.uint64)
        run.sort()
        runs = [*self._runs, run]
        while len(runs) > 1 and len(runs[-2]) < 2 * len(runs[-1]):
            merged = np.concatenate(runs[-2:])
            merged.sort()
            runs[-2:] = [merged]
        self._runs = tuple(runs)

    def find(self, terms: Sequence[int]) -> "Found":
        """Where these terms lie."""
        lows = np.array(terms, dtype=np.uint64) << _PAGE_BITS
        highs = lows | _PAGE
        places = [(run, run.searchsorted(lows), run.searchsorted(highs, "right")) for run in self._runs[::-1]]
        return Found(len(terms), places)


class Found:
    """Where some terms lie: in each run, from the newest to the oldest, from where to where."""

    def __init__(self, terms: int, places: Sequence[tuple[_Run, NDArray[np.intp], NDArray[np.intp]]]) -> None:
        self._terms, self._places = terms, places

    def counts(self) -> list[int]:
        """How many pages hold each term."""
        totals = np.zeros(self._terms, dtype=np.int64)
        for _, low, high in self._places:
            totals += high - low
        return [int(total) for total in totals]

    def pages(self, which: int, newest: int) -> Pages:
        """The newest so many pages that hold this term, in no order."""
        kept: list[_Run] = []
        for run, low, high in self._places:
            part = run[max(low[which], high[which] - newest) : high[which]]
            newest -= len(part)
            if len(part):
                kept.append(part)
        return (np.concatenate(kept) & _PAGE).astype(np.int64)
