import math

import pytest

from kakeya.recall.choosing import SHORTLIST, Page, best_pages, fill, rarity
from kakeya.recall.postings import Postings
from kakeya.types import TokenRange

HIDDEN = TokenRange(4, 1000)


def page(start: int, end: int, digest: int | None = None) -> Page:
    return Page(TokenRange(start, end), start if digest is None else digest)


@pytest.mark.parametrize(("pages", "all_pages"), [(1, 10), (3, 16_000), (16_000, 16_000), (7, 10**8)])
def test_rarity_is_a_logarithm(pages: int, all_pages: int) -> None:
    assert rarity(pages, all_pages) == pytest.approx(
        64 * math.log2((2 * all_pages + 2) / (2 * pages + 1)), abs=1.5
    )
    assert rarity(pages, all_pages) >= 0


def test_a_rare_word_counts_more_and_ties_go_to_the_newer_page() -> None:
    postings = Postings()
    postings.add(0, [[1], [2], [1], [2, 3], [9]])
    assert best_pages([(1, None), (3, None)], postings, 5, range(5)) == [3, 2, 0]
    assert best_pages([(1, None), (3, None)], postings, 5, range(1, 3)) == [2]
    assert best_pages([(7, None)], postings, 5, range(5)) == []
    assert best_pages([(1, None)], postings, 5, range(4, 5)) == []


def test_what_is_asked_last_counts_most() -> None:
    postings = Postings()
    postings.add(0, [[1], [2]])
    before = [(2, None), *((100 + place, None) for place in range(60))]
    assert best_pages([*before, (1, None)], postings, 2, range(2)) == [0, 1]


def test_a_shortlist_has_the_best() -> None:
    postings = Postings()
    postings.add(0, [[1, 2] if number % 2 else [1] for number in range(4 * SHORTLIST)])
    best = best_pages([(1, None), (2, None)], postings, 4 * SHORTLIST, range(4 * SHORTLIST))
    assert best == list(range(4 * SHORTLIST - 1, 2 * SHORTLIST - 1, -2))


def test_copies_come_once() -> None:
    pages = [page(100, 164, 7), page(500, 564, 7), page(300, 364)]
    assert fill(HIDDEN, 256, (), pages) == (TokenRange(100, 164), TokenRange(300, 364))


def test_what_does_not_fit_is_left_out_and_what_touches_is_one() -> None:
    pages = [page(100, 160), page(400, 464), page(160, 200)]
    assert fill(HIDDEN, 100, (), pages) == (TokenRange(100, 200),)


def test_what_can_be_seen_is_not_brought_back() -> None:
    assert fill(HIDDEN, 256, (), [page(0, 60), page(980, 1040), page(1040, 1100)]) == (
        TokenRange(4, 60),
        TokenRange(980, 1000),
    )


def test_what_must_be_remembered_comes_first_the_newest_of_it() -> None:
    remembered = (TokenRange(40, 140), TokenRange(500, 600))
    assert fill(HIDDEN, 160, remembered, [page(700, 764), page(590, 640)]) == (TokenRange(500, 640),)
