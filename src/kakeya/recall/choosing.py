"""From a question's words to the pages that are worth their place. Integers only, so every machine agrees."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kakeya.recall.postings import Postings
from kakeya.types import TokenRange

# The last tokens of a prompt are its question, and so many of their terms are looked up.
QUERY_TOKENS = 256
QUERY_TERMS = 24
# A word this far from the end counts half: before the question there may be a page of something else.
HALF_AT = 32
# Of a term in more pages the newest count, so that a lookup costs the same at any length.
NEWEST_PAGES = 2048
# So many of the best pages are looked at; some may be copies of others.
SHORTLIST = 64
_PAGE_BITS = 32
_PAGE = (1 << _PAGE_BITS) - 1


@dataclass(frozen=True)
class Page:
    """Where a page lies. Pages with the same text have the same digest."""

    range: TokenRange
    digest: int


def rarity(pages: int, all_pages: int) -> int:
    """What a term counts that is in so many of all pages: 64 times the binary logarithm of how rare it is.

    This is BM25 for pages of about one length in which a second mention adds nothing.
    """
    return _log2(2 * all_pages + 2) - _log2(2 * pages + 1)


def _log2(value: int) -> int:
    """64 log2(value), rounded down, without a floating point number that machines might round differently."""
    return int((value**64).bit_length()) - 1


def best_pages(
    terms: Sequence[tuple[int, int | None]], postings: Postings, all_pages: int, candidates: range
) -> list[int]:
    """The candidates that share the most with a question, the best first, the newer first among equals."""
    distances = _distances(terms)
    found = postings.find(list(distances))
    weighed = [
        (rarity(count, all_pages) * HALF_AT // (HALF_AT + distance), -place)
        for place, (count, distance) in enumerate(zip(found.counts(), distances.values(), strict=True))
        if count
    ]
    asked = sorted(weighed, reverse=True)[:QUERY_TERMS]
    # Page before weight in one number: a sort brings the weights of a page together.
    parts = [found.pages(-place, NEWEST_PAGES) << _PAGE_BITS | weight for weight, place in asked]
    return _summed(np.concatenate(parts), candidates) if parts else []


def _distances(terms: Sequence[tuple[int, int | None]]) -> dict[int, int]:
    """How many words lie behind each term, where it comes last."""
    distances: dict[int, int] = {}
    for distance, (word, pair) in enumerate(reversed(terms)):
        distances.setdefault(word, distance)
        if pair is not None:
            distances.setdefault(pair, distance)
    return distances


def _summed(pairs: NDArray[np.int64], candidates: range) -> list[int]:
    """The candidates with the largest sums of weights."""
    low, high = candidates.start << _PAGE_BITS, candidates.stop << _PAGE_BITS
    pairs = np.sort(pairs[(pairs >= low) & (pairs < high)])
    pages = pairs >> _PAGE_BITS
    first = np.flatnonzero(np.diff(pages, prepend=-1))
    if not len(first):
        return []
    scores = np.add.reduceat(pairs & _PAGE, first)
    keys = scores[scores > 0] << _PAGE_BITS | pages[first][scores > 0]
    if len(keys) > SHORTLIST:
        keys = np.partition(keys, -SHORTLIST)[-SHORTLIST:]
    return [key & _PAGE for key in sorted(keys.tolist(), reverse=True)]


def fill(
    hidden: TokenRange, room: int, remembered: Sequence[TokenRange], pages: Iterable[Page]
) -> tuple[TokenRange, ...]:
    """As much as there is room for: what to remember, the newest first, then the pages as they come."""
    chosen: tuple[TokenRange, ...] = ()
    for each in sorted(remembered, reverse=True):
        chosen = _with(chosen, each, hidden, room)
    seen: set[int] = set()
    for page in pages:
        if page.digest not in seen:
            seen.add(page.digest)
            chosen = _with(chosen, page.range, hidden, room)
    return chosen


def _with(
    chosen: tuple[TokenRange, ...], more: TokenRange, hidden: TokenRange, room: int
) -> tuple[TokenRange, ...]:
    """The hidden part of it added, if there is room for all of that."""
    part = TokenRange(max(more.start, hidden.start), min(more.end, hidden.end))
    if part.length <= 0:
        return chosen
    joined = _joined((*chosen, part))
    return joined if sum(each.length for each in joined) <= room else chosen


def _joined(ranges: Iterable[TokenRange]) -> tuple[TokenRange, ...]:
    """In order of time, with those that touch as one."""
    joined: list[TokenRange] = []
    for each in sorted(ranges):
        if joined and each.start <= joined[-1].end:
            joined[-1] = TokenRange(joined[-1].start, max(joined[-1].end, each.end))
        else:
            joined.append(each)
    return tuple(joined)
