import numpy as np
import pytest

from kakeya.recall.words import (
    AFTER_SENTENCE,
    BETWEEN_WORDS,
    WITHIN_CHARACTER,
    WITHIN_WORD,
    Vocabulary,
    terms_of,
    words_of,
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, snake_case! It's 42.", ["hello", "snake", "case", "it", "s", "42"]),
        ("STRASSE Straße ÉCOLE", ["strasse", "strasse", "école"]),
        ("e\u0301cole ２４", ["école", "24"]),
        ("我的号码 is 7", ["我的", "的号", "号码", "is", "7"]),
        ("猫", ["猫"]),
        ("", []),
    ],
)
def test_words_are_casefolded_runs_of_letters_or_digits(text: str, words: list[str]) -> None:
    assert words_of(text) == words


def test_a_long_word_pairs_with_the_long_word_before_it() -> None:
    asked, said = terms_of("code of Alice"), terms_of("The code for Alice is 7")
    pairs = [pair for _, pair in asked if pair is not None]
    assert len(pairs) == 1
    assert pairs[0] in [pair for _, pair in said]
    assert pairs[0] not in [pair for _, pair in terms_of("Alice has a code")]
    assert next(word for word, _ in asked) == [word for word, _ in said][1]


def test_digits_pair_whatever_their_length() -> None:
    assert [pair is not None for _, pair in terms_of("room 7 is big")] == [False, True, False, False]


def vocabulary(*pieces: bytes) -> tuple[Vocabulary, np.ndarray]:
    return Vocabulary(pieces), np.arange(len(pieces), dtype=np.int32)


def test_tokens_make_one_text_before_words_are_cut() -> None:
    known, ids = vocabulary(b" re", b"call", "é".encode()[:1], "é".encode()[1:], b" x")
    assert known.text(ids) == " recallé x"


def test_a_token_without_text_parts_words_and_so_does_an_unknown_id() -> None:
    known, _ = vocabulary(b"one", b"", b"two")
    assert words_of(known.text(np.array([0, 1, 2, 99, 0], dtype=np.int32))) == ["one", "two", "one"]


def test_a_page_ends_best_after_a_sentence_then_between_words() -> None:
    cut = "é".encode()
    known, ids = vocabulary(
        b"pi", b" is", b" 3", b".", b"14", b".", b" An", b"d", cut[:1], cut[1:], b"\n", b"so"
    )
    assert known.levels(ids).tolist() == [
        BETWEEN_WORDS,
        BETWEEN_WORDS,
        BETWEEN_WORDS,
        BETWEEN_WORDS,
        BETWEEN_WORDS,
        AFTER_SENTENCE,
        WITHIN_WORD,
        WITHIN_WORD,
        WITHIN_CHARACTER,
        BETWEEN_WORDS,
        AFTER_SENTENCE,
    ]
