import itertools
import random
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings, strategies as st

from kakeya.errors import InvalidArgument
from kakeya.recall.choosing import FOLLOWING, HALF_AT, QUERY_TERMS, QUERY_TOKENS, rarity
from kakeya.recall.index import HEADER, MOST_TERMS, PAGE, RecallIndex, Vocabulary
from kakeya.recall.restating import READ
from kakeya.recall.words import terms_of, words_of
from kakeya.types import TokenRange

WORDS = ["code", "name", "alice", "bruno", "of", "is", "the", "élan", "日本"]
PIECES = [f" {word}".encode() for word in WORDS] + [b".", b"\n", b"s", b"7", "é".encode()[:1], b""]
VOCABULARY = Vocabulary(PIECES)
STOP, SEVEN, SPECIAL = len(WORDS), len(WORDS) + 3, len(PIECES) - 1


def told(ids: Sequence[int], messages: Sequence[int] = ()) -> RecallIndex:
    index = RecallIndex(VOCABULARY)
    for position in messages:
        index.mark_message(position)
    index.extend(ids)
    return index


def choose(ids: Sequence[int], messages: Sequence[int] = (), **changes: object) -> tuple[TokenRange, ...]:
    return chosen_by(told(ids, messages), ids, **changes)


def chosen_by(index: RecallIndex, ids: Sequence[int], **changes: object) -> tuple[TokenRange, ...]:
    asked = {"length": len(ids), "pinned": 4, "window": 100, "recall": 128, "query_from": len(ids) - 20}
    return index.choose(ids, **asked | changes)  # type: ignore[arg-type]


class Naive:
    """The same answers from dictionaries and lists, one token after another."""

    def __init__(self, ids: Sequence[int], messages: Sequence[int]) -> None:
        self.ids, self.messages = ids, set(messages)
        self.pages: list[range] = []
        start = 0
        while len(ids) - start > PAGE:
            end = max(range(start + PAGE // 2, start + PAGE + 1), key=lambda at: (self.level(at), at))
            self.pages.append(range(start, end))
            start = end

    def level(self, at: int) -> int:
        """How good a page would end before the token there."""
        if at in self.messages:
            return 9
        if any(at - distance in self.messages for distance in range(1, HEADER)):
            return 0
        before, after = ((PIECES[self.ids[place]] or b"\n").decode(errors="ignore") for place in (at - 1, at))
        before, after = before or "é", after or "é"
        if before.endswith("\n") or (before == "." and not after[0].isalnum()):
            return 3
        return 1 if before[-1].isalnum() and after[0].isalnum() else 2

    def terms(self, places: range) -> list[tuple[int, int | None]]:
        data = b"".join(PIECES[self.ids[place]] or b"\n" for place in places)
        return terms_of(data.decode(errors="replace"))

    def of_page(self, page: range) -> set[int]:
        found = list(dict.fromkeys(word for word, _ in self.terms(page)))
        found += (pair for _, pair in self.terms(page) if pair is not None)
        return set(list(dict.fromkeys(found))[: len(page) * MOST_TERMS // PAGE])

    def choose(self, length: int, pinned: int, window: int, recall: int, query_from: int) -> list[int]:
        """Positions that should be seen again."""
        if length <= pinned + window + recall:
            return []
        hidden = set(range(pinned, length - window + 1))
        held = [self.of_page(page) for page in self.pages]
        count = Counter(term for terms in held for term in terms)
        weights: dict[int, int] = {}
        asked = self.terms(range(max(query_from, len(self.ids) - QUERY_TOKENS, 0), len(self.ids)))
        for distance, pair in enumerate(reversed(asked)):
            for term in pair:
                if term is not None and term not in weights and count[term]:
                    weights[term] = rarity(count[term], len(held)) * HALF_AT // (HALF_AT + distance)
        best = dict(sorted(weights.items(), key=lambda each: -each[1])[:QUERY_TERMS])
        scores = [sum(best.get(term, 0) for term in terms) for terms in held]
        top = 0
        known, worthy, alike = set[int](), list[int](), list[int]()
        for page in sorted(range(len(held)), key=lambda page: (-scores[page], -page)):
            if not scores[page] or not hidden & set(self.pages[page]):
                continue
            top = top or scores[page]
            added = sum(best.get(term, 0) for term in held[page] - known)
            heavy = sum(list(best.values())[:2])
            beside = {page - 1, page + 1} & set(worthy)
            if 4 * added >= top or added >= heavy or (beside and scores[page] >= min(heavy, 4 * top / 5)):
                worthy.append(page)
            elif 5 * scores[page] >= 4 * top:
                alike.append(page)
            else:
                continue
            known |= held[page]
        worthy = worthy + alike if 5 * top >= sum(best.values()) else []
        texts, chosen, ends = set(), set[int](), list[int]()
        for page in worthy:
            if page in worthy[:READ] and self.is_told_anew(page, worthy[:READ], best):
                continue
            places, text = (
                hidden & set(self.pages[page]),
                tuple(self.ids[place] for place in self.pages[page]),
            )
            if text not in texts and not places <= chosen and len(chosen | places) <= recall:
                chosen |= places
                ends.append(self.pages[page].stop)
            texts.add(text)
        room = recall // 2 if 2 * len(chosen) <= recall else recall
        return sorted(self.continued(chosen, sorted(ends, reverse=True), hidden, room))

    def is_told_anew(self, page: int, pages: list[int], weights: dict[int, int]) -> bool:
        """Whether newer pages have, word by word, what this one says to the question."""
        said = {each: list(self.sentences(self.pages[each], weights)) for each in pages}
        best = max(worth for each in pages for _, _, worth in said[each])
        answers = [each for each in said[page] if 4 * each[2] >= best]
        newer = [each for other in pages if other > page + 1 for each in said[other]]
        return bool(answers) and all(
            any(set(words) <= set(others) and (not has or figures) for others, figures, _ in newer)
            for words, has, _ in answers
        )

    def sentences(self, page: range, weights: dict[int, int]) -> Iterator[tuple[list[str], bool, int]]:
        """Words, whether there are figures that were not asked for, and the worth of each sentence."""
        sentences = [""]
        for letter in b"".join(PIECES[self.ids[place]] or b"\n" for place in page).decode(errors="replace"):
            if letter == "\n" or (letter == " " and sentences[-1].endswith(".")):
                sentences.append("")
            else:
                sentences[-1] += letter
        for text in filter(str.strip, sentences):
            terms = {term for pair in terms_of(text) for term in pair}
            words = words_of(text)
            figures = [word for word in words if "7" in word and zlib.crc32(word.encode()) not in weights]
            worth = sum(weights.get(term, 0) for term in terms if term is not None)
            yield [word for word in words if word not in figures], bool(figures), worth

    def continued(self, chosen: set[int], ends: list[int], hidden: set[int], recall: int) -> set[int]:
        """One token after another of what followed the pages, 64 of each in turn."""
        for step in range(0, 2000 if ends else 0, FOLLOWING):
            for end in ends:
                room = recall - len(chosen)
                chosen |= hidden & set(range(end + step, end + step + min(room, FOLLOWING)))
        return chosen


def positions(ranges: Sequence[TokenRange]) -> list[int]:
    return [place for each in ranges for place in range(each.start, each.end)]


HISTORIES = st.integers(0, 2**32).map(
    lambda seed: random.Random(seed).choices(
        range(len(PIECES)),
        weights=random.Random(seed + 1).choices([1, 3, 30], k=len(PIECES)),
        k=random.Random(seed + 2).randint(1, 1500),
    )
)


@settings(max_examples=60, deadline=None)
@given(
    ids=HISTORIES,
    pinned=st.integers(0, 90),
    window=st.integers(1, 300),
    recall=st.integers(1, 300),
    asked=st.integers(1, 300),
    messages=st.sets(st.integers(0, 1500), max_size=40),
    cuts=st.lists(st.integers(0, 1500), max_size=5),
)
def test_it_chooses_what_the_slow_way_chooses_however_it_was_told(
    ids: list[int], pinned: int, window: int, recall: int, asked: int, messages: set[int], cuts: list[int]
) -> None:
    marks = sorted(each for each in messages if each < len(ids))
    index = RecallIndex(VOCABULARY)
    borders = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    for start, end in itertools.pairwise(borders):
        for mark in (each for each in marks if start <= each < end):
            index.mark_message(mark)
        index.extend(ids[start:end])
    length = max(0, len(ids) - asked // 2)
    settings = {"pinned": pinned, "window": window, "recall": recall, "query_from": len(ids) - asked}
    chosen = index.choose(ids, length, **settings)
    assert positions(chosen) == Naive(ids, marks).choose(length, **settings)
    assert chosen == tuple(sorted(chosen))
    assert all(a.end < b.start for a, b in itertools.pairwise(chosen))
    assert sum(each.length for each in chosen) <= recall
    assert all(pinned <= each.start < each.end <= length - window + 1 for each in chosen)


def said(text: str) -> list[int]:
    """A "7s" is two tokens and one figure."""
    names = {**{word: [place] for place, word in enumerate(WORDS)}, "7": [SEVEN], "7s": [SEVEN, SEVEN - 1]}
    return [token for word in text.split() for token in names.get(word, [STOP])]


FILLER = said("the name of the . ") * 40
FACT = said(". the code of alice is bruno .")


def test_a_fact_is_found() -> None:
    ids = FILLER + FACT + FILLER * 10 + said("code of alice is")
    chosen = choose(ids, recall=64)
    assert set(range(len(FILLER), len(FILLER) + len(FACT))) <= set(positions(chosen))


def test_of_a_fact_told_anew_the_newest_is_seen() -> None:
    old, new = said(". the code of alice is 7 ."), said(". the code of alice is 7s .")
    ids = FILLER + old + FILLER * 4 + new + FILLER * 4 + said("the code of alice is")
    places = positions(choose(ids, recall=256, query_from=len(ids) - 5))
    assert len(FILLER) + 6 not in places
    assert 5 * len(FILLER) + len(old) + 6 in places


def test_nothing_is_brought_back_while_everything_is_in_sight() -> None:
    ids = FACT + FILLER + said("code of alice is")
    assert choose(ids, length=4 + 100 + 128) == ()
    assert choose(ids, length=0) == ()


def test_a_question_about_nothing_that_was_said_brings_nothing_back() -> None:
    ids = [*FILLER * 4, STOP, STOP]
    assert choose(ids, query_from=len(ids) - 2) == ()


def test_what_is_to_be_remembered_comes_whatever_is_asked() -> None:
    ids = [*FILLER * 4, STOP, STOP]
    kept = (TokenRange(10, 30),)
    assert choose(ids, query_from=len(ids) - 2, remembered=kept) == kept


def test_a_page_begins_with_its_messages_header() -> None:
    message = [SPECIAL, *said("name . code of alice is bruno .")]
    ids = FILLER[:90] + message + FILLER * 10 + said("code of alice is")
    for shift in range(64):
        chosen = choose(ids[shift:], [90 - shift], recall=64)
        assert set(range(90 - shift, 90 - shift + len(message))) <= set(positions(chosen)), shift


def test_a_message_cannot_be_marked_too_late() -> None:
    index = told(FILLER, [10])
    with pytest.raises(InvalidArgument, match="200 tokens"):
        index.mark_message(len(FILLER) - 1)
    index.mark_message(len(FILLER) + 5)
    with pytest.raises(InvalidArgument, match="205"):
        index.mark_message(len(FILLER) + 5)
    assert index.messages == (10, len(FILLER) + 5)


def test_a_fork_goes_its_own_way() -> None:
    index = told(FILLER)
    fork = index.fork()
    ids = FILLER + FACT + FILLER * 10 + said("code of alice is")
    fork.extend(ids[len(FILLER) :])
    index.extend(FILLER * 11 + said("code of alice is"))
    assert (index.length, fork.length) == (len(FILLER) * 12 + 4, len(FILLER) * 11 + len(FACT) + 4)
    assert len(FILLER) + 2 in positions(chosen_by(fork, ids, recall=64))
    assert chosen_by(fork, ids) == choose(ids)
    assert fork.nbytes == told(ids).nbytes


@pytest.mark.parametrize("words_a_token", [0, 1, 3])
def test_a_token_takes_twelve_bytes_at_most(words_a_token: int) -> None:
    """Whatever is said: every token another word of four letters is the worst that can be."""
    pieces = [
        "".join(f" w{number}x{word}" for word in range(words_a_token)).encode() for number in range(5000)
    ]
    index = RecallIndex(Vocabulary(pieces))
    for start in range(0, 50_000, 500):
        index.mark_message(start)
    index.extend([(number * 7) % 5000 for number in range(50_000)])
    assert index.nbytes <= 12 * 50_000


def test_a_long_history_is_searched_in_milliseconds() -> None:
    """Far below what may be asked of a quiet machine; this one may be busy."""
    chance = random.Random(0)
    pieces = [f" word{number}".encode() for number in range(20_000)]
    index = RecallIndex(Vocabulary(pieces))
    ids = [int(20_000 ** chance.random()) - 1 for _ in range(200_000)]
    index.extend(ids)
    began = time.process_time()
    for _ in range(10):
        chosen_by(index, ids, query_from=199_744)
    assert time.process_time() - began < 0.5
    assert chosen_by(index, ids, query_from=199_996)
