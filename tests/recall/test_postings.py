import random

from kakeya.recall.postings import Postings


def test_it_finds_what_a_dictionary_finds() -> None:
    chance, postings, expected = random.Random(0), Postings(), dict[int, list[int]]()
    page = 0
    for _ in range(60):
        batch = [
            chance.sample(range(2**32 - 40, 2**32), chance.randint(0, 9)) for _ in range(chance.randint(1, 9))
        ]
        postings.add(page, batch)
        for terms in batch:
            for term in terms:
                expected.setdefault(term, []).append(page)
            page += 1
    asked = [*expected, 1]
    found = postings.find(asked)
    assert found.counts() == [len(expected.get(term, ())) for term in asked]
    for place, term in enumerate(expected):
        assert sorted(found.pages(place, 5).tolist()) == expected[term][-5:]
        assert sorted(found.pages(place, 10**6).tolist()) == expected[term]
    assert postings.nbytes == 8 * sum(map(len, expected.values()))
    assert len(postings._runs) < 12


def test_nothing_is_in_no_pages() -> None:
    assert Postings().find([1, 2]).counts() == [0, 0]


def test_forks_go_their_own_ways() -> None:
    postings = Postings()
    postings.add(0, [[1]])
    fork = postings.fork()
    fork.add(1, [[1]])
    assert (postings.find([1]).counts(), fork.find([1]).counts()) == ([1], [2])
