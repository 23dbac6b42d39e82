"""From a question's words to the pages that are worth their place. Integers only, so every machine agrees."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
# A page is worth its place if it scores so much of what the best does, as a fact does that was told anew,
LIKE_THE_BEST = (4, 5)
# or if terms that no better page holds are worth so much of that, as a second thing that is asked for, or as
# much as the two heaviest.
MORE_THAN_THE_BEST = (1, 4)
# The best page must hold so much of what all terms of the question are worth. Any text shares some words with
# its past: it is better continued behind what came first than behind a page that only resembles it.
ASKED_FOR = (1, 5)
# What followed a page is added by so many tokens at a time.
FOLLOWING = 64
_PAGE_BITS = 32
_LOW = (1 << _PAGE_BITS) - 1


class Match(NamedTuple):
    """A page, the terms of the question that it holds, a bit for each, and what they are worth together."""

    score: int
    page: int
    terms: int


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


def weigh(terms: Sequence[tuple[int, int | None]], postings: Postings, all_pages: int) -> dict[int, int]:
    """The terms of a question that count, and what each is worth: the heaviest first, of equals the last."""
    distances = _distances(terms)
    counts = postings.find(list(distances)).counts()
    weights = {
        term: rarity(count, all_pages) * HALF_AT // (HALF_AT + distance)
        for count, (term, distance) in zip(counts, distances.items(), strict=True)
        if count
    }
    return dict(sorted(weights.items(), key=lambda each: -each[1])[:QUERY_TERMS])


def best_pages(weights: Mapping[int, int], postings: Postings, candidates: range) -> list[int]:
    """The candidates that a question is about, the best first, the newer first among equals. None where the
    best one holds too little of it."""
    if not weights:
        return []
    found = postings.find(list(weights))
    # Page before term in one number: a sort brings the terms of a page together.
    held = [found.pages(term, NEWEST_PAGES) << _PAGE_BITS | term for term in range(len(weights))]
    worth = np.array(list(weights.values()), dtype=np.int64)
    matches = _matches(np.concatenate(held), worth, candidates)
    if not matches or not is_share(matches[0].score, ASKED_FOR, int(worth.sum())):
        return []
    return _worth_their_place(matches, worth)


def _distances(terms: Sequence[tuple[int, int | None]]) -> dict[int, int]:
    """How many words lie behind each term, where it comes last."""
    distances: dict[int, int] = {}
    for distance, (word, pair) in enumerate(reversed(terms)):
        distances.setdefault(word, distance)
        if pair is not None:
            distances.setdefault(pair, distance)
    return distances


def _matches(held: NDArray[np.int64], weights: NDArray[np.int64], candidates: range) -> list[Match]:
    """The candidates whose terms are worth the most, the best first."""
    low, high = candidates.start << _PAGE_BITS, candidates.stop << _PAGE_BITS
    held = np.sort(held[(held >= low) & (held < high)])
    first = np.flatnonzero(np.diff(held >> _PAGE_BITS, prepend=-1))
    if not len(first):
        return []
    pages, terms = held[first] >> _PAGE_BITS, held & _LOW
    scores = np.add.reduceat(weights[terms], first)
    bits = np.bitwise_or.reduceat(1 << terms, first)
    keys = scores << _PAGE_BITS | pages
    best = np.argpartition(keys, -SHORTLIST)[-SHORTLIST:] if len(keys) > SHORTLIST else np.arange(len(keys))
    best = best[np.argsort(-keys[best])]
    matches = zip(scores[best].tolist(), pages[best].tolist(), bits[best].tolist(), strict=True)
    return [Match(*each) for each in matches if each[0] > 0]


def _worth_their_place(matches: Sequence[Match], weights: NDArray[np.int64]) -> list[int]:
    """Without pages that share less with the question than better ones, and nothing else.

    Where facts are alike, the one that is asked for holds all the words of the question. The others hold
    some of the same, and would only be mistaken for it. Pages that hold something new come first, each with
    those beside it: a pasted text may have many that are like its end, and one with what is asked there.
    """
    kept: list[int] = []
    alike: list[int] = []
    known = 0
    heaviest = int(weights[:2].sum())
    for score, page, terms in matches:
        best, new = matches[0].score, terms & ~known
        added = sum(weight for term, weight in enumerate(weights.tolist()) if new >> term & 1)
        is_like, is_beside = is_share(score, LIKE_THE_BEST, best), page - 1 in kept or page + 1 in kept
        is_new = is_share(added, MORE_THAN_THE_BEST, best) or added >= heaviest
        if is_new or (is_beside and (is_like or score >= heaviest)):
            kept.append(page)
        elif is_like:
            alike.append(page)
        else:
            continue
        known |= terms
    return kept + alike


def is_share(part: int, share: tuple[int, int], whole: int) -> bool:
    """Whether a part is at least this share of the whole."""
    return part * share[1] >= whole * share[0]


def fill(
    hidden: TokenRange, room: int, remembered: Sequence[TokenRange], pages: Iterable[Page]
) -> tuple[TokenRange, ...]:
    """As much as there is room for: what to remember, the newest first, then the pages as they come.

    What followed these is added as long as all of it fits twice: what is chosen comes again where there is
    room, and a small model tells a fact that it sees twice from others that are like it.
    """
    chosen: tuple[TokenRange, ...] = ()
    for each in sorted(remembered, reverse=True):
        chosen = _with(chosen, each, hidden, room)
    seen: set[int] = set()
    ends: list[int] = []
    for page in pages:
        if page.digest not in seen:
            seen.add(page.digest)
            before, chosen = chosen, _with(chosen, page.range, hidden, room)
            if chosen != before:
                ends.append(page.range.end)
    fits_twice = 2 * _tokens(chosen) <= room
    return _continued(chosen, sorted(ends, reverse=True), hidden, room // 2 if fits_twice else room)


def _continued(
    chosen: tuple[TokenRange, ...], ends: Sequence[int], hidden: TokenRange, room: int
) -> tuple[TokenRange, ...]:
    """With what lies behind these ends, a piece of each in turn, as far as there is room."""
    while ends := [end for end in ends if end < hidden.end]:
        for end in ends:
            left = room - _tokens(chosen)
            if not left:
                return chosen
            chosen = _with(chosen, TokenRange(end, end + min(FOLLOWING, left)), hidden, room)
        ends = [end + FOLLOWING for end in ends]
    return chosen


def _with(
    chosen: tuple[TokenRange, ...], more: TokenRange, hidden: TokenRange, room: int
) -> tuple[TokenRange, ...]:
    """The hidden part of it added, if there is room for all of that."""
    part = TokenRange(max(more.start, hidden.start), min(more.end, hidden.end))
    if part.length <= 0:
        return chosen
    joined = _joined((*chosen, part))
    return joined if _tokens(joined) <= room else chosen


def _tokens(ranges: Iterable[TokenRange]) -> int:
    return sum(each.length for each in ranges)


def _joined(ranges: Iterable[TokenRange]) -> tuple[TokenRange, ...]:
    """In order of time, with those that touch as one."""
    joined: list[TokenRange] = []
    for each in sorted(ranges):
        if joined and each.start <= joined[-1].end:
            joined[-1] = TokenRange(joined[-1].start, max(joined[-1].end, each.end))
        else:
            joined.append(each)
    return tuple(joined)
