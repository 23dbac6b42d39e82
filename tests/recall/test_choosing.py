import math
from collections.abc import Sequence

import pytest

from kakeya.recall.choosing import SHORTLIST, Page, best_pages, fill, rarity, weigh
from kakeya.recall.postings import Postings
from kakeya.types import TokenRange

HIDDEN = TokenRange(4, 1000)


def best(terms: Sequence[tuple[int, int | None]], postings: Postings, candidates: range) -> list[int]:
    return best_pages(weigh(terms, postings, candidates.stop), postings, candidates)


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
    assert best([(1, None), (3, None)], postings, range(5)) == [3, 2]
    assert best([(1, None)], postings, range(5)) == [2, 0]
    assert best_pages(weigh([(1, None), (3, None)], postings, 5), postings, range(1, 3)) == [2]
    assert best([(7, None)], postings, range(5)) == []
    assert best([(1, None)], postings, range(4, 5)) == []


def test_what_is_asked_last_counts_most() -> None:
    postings = Postings()
    postings.add(0, [[1], [2]])
    before = [(2, None), *((100 + place, None) for place in range(60))]
    assert best([*before, (1, None)], postings, range(2)) == [0, 1]


def asked(*terms: int) -> list[tuple[int, int | None]]:
    return [(term, None) for term in terms]


def test_a_page_that_only_resembles_the_best_is_left_out() -> None:
    """Terms 1 and 2 are what alike facts share, 3 and 4 the name that is asked for."""
    postings = Postings()
    postings.add(0, [[1, 2, 5], [1, 2, 3, 4], [1, 2, 6], [1, 2, 3], *[[9]] * 60])
    assert best(asked(1, 2, 3, 4), postings, range(64)) == [1]


def test_a_fact_told_anew_is_there_twice() -> None:
    postings = Postings()
    postings.add(0, [[1, 2, 3, 7], [1, 2, 3, 8], [1, 2, 4], *[[9]] * 60])
    assert best(asked(1, 2, 3), postings, range(64)) == [1, 0]


def test_each_of_two_facts_that_are_asked_for_at_once_is_there() -> None:
    postings = Postings()
    postings.add(0, [[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 7, 8], *[[9]] * 60])
    assert sorted(best(asked(1, 2, 3, 4, 5, 6), postings, range(64))) == [0, 1]


def test_what_is_new_comes_before_more_of_the_same() -> None:
    """Pages that are like the end of a pasted text, and the one that its question is about."""
    postings = Postings()
    postings.add(0, [[8, 9], [7], *[[1, 2, 3, 4, 5], [7]] * 6, *[[7]] * 50])
    assert best(asked(1, 2, 3, 4, 5, 8, 9), postings, range(64)) == [12, 0, 10, 8, 6, 4, 2]


def test_a_telling_on_two_pages_stays_together() -> None:
    """The end of a pasted text is there again, and what is asked there was said over a page's end."""
    postings = Postings()
    end = [1, 2, 3, 4, 5, 6, 11, 12, 13, 14]
    pages = [end if number in (20, 30, 40) else [8, 9] if number in (9, 10) else [7] for number in range(64)]
    postings.add(0, pages)
    assert best(asked(*end, 8, 9), postings, range(64)) == [40, 10, 9, 30, 20]


def test_a_shortlist_has_the_best() -> None:
    postings = Postings()
    postings.add(0, [[1, 2] if number % 2 else [1] for number in range(4 * SHORTLIST)])
    found = best([(1, None), (2, None)], postings, range(4 * SHORTLIST))
    assert found == list(range(4 * SHORTLIST - 1, 2 * SHORTLIST - 1, -2))


def test_copies_come_once() -> None:
    pages = [page(100, 164, 7), page(500, 564, 7), page(300, 364)]
    assert fill(HIDDEN, 128, (), pages) == (TokenRange(100, 164), TokenRange(300, 364))


def test_room_that_is_left_goes_to_what_followed_the_newest_first() -> None:
    pages = [page(100, 164), page(500, 564)]
    assert fill(HIDDEN, 228, (), pages) == (TokenRange(100, 200), TokenRange(500, 628))
    assert fill(HIDDEN, 200, (), pages) == (TokenRange(100, 172), TokenRange(500, 628))


def test_what_followed_is_added_as_long_as_all_fits_twice() -> None:
    pages = [page(100, 164), page(500, 564)]
    assert fill(HIDDEN, 256, (), pages) == (TokenRange(100, 164), TokenRange(500, 564))
    assert fill(HIDDEN, 256, (), pages[:1]) == (TokenRange(100, 228),)
    assert fill(HIDDEN, 800, (), pages) == (TokenRange(100, 292), TokenRange(500, 708))


def test_a_page_with_too_few_of_the_words_is_not_what_is_asked_for() -> None:
    postings = Postings()
    postings.add(0, [[term] for term in range(1, 11)])
    assert best(asked(1, 2, 3, 4), postings, range(10)) == [3, 2, 1, 0]
    assert best(asked(*range(1, 9)), postings, range(10)) == []
    assert best(asked(11), postings, range(10)) == []


def test_what_followed_ends_where_sight_begins_and_the_rest_goes_to_others() -> None:
    pages = [page(900, 964), page(100, 164)]
    assert fill(HIDDEN, 512, (), pages) == (TokenRange(100, 256), TokenRange(900, 1000))
    assert fill(HIDDEN, 512, (), [page(900, 964)]) == (TokenRange(900, 1000),)


def test_what_does_not_fit_is_left_out_and_what_touches_is_one() -> None:
    pages = [page(100, 160), page(400, 464), page(160, 200)]
    assert fill(HIDDEN, 100, (), pages) == (TokenRange(100, 200),)


def test_what_can_be_seen_is_not_brought_back() -> None:
    assert fill(HIDDEN, 76, (), [page(0, 60), page(980, 1040), page(1040, 1100)]) == (
        TokenRange(4, 60),
        TokenRange(980, 1000),
    )


def test_what_must_be_remembered_comes_first_the_newest_of_it() -> None:
    remembered = (TokenRange(40, 140), TokenRange(500, 600))
    assert fill(HIDDEN, 160, remembered, [page(700, 764), page(590, 640)]) == (TokenRange(500, 660),)
