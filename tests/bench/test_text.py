"""What simulated users say."""

import pytest

from kakeya.bench.text import Messages


def words(text: str) -> list[int]:
    """A tokenizer that has a token for each word."""
    return [len(word) for word in text.split()]


@pytest.mark.parametrize("tokens", [1, 7, 5000])
def test_messages_have_their_length_and_their_seed(tokens: int) -> None:
    first, again, other = (Messages(words, tokens, seed) for seed in (3, 3, 4))
    texts = [first.next_text() for _ in range(5)]
    assert texts == [again.next_text() for _ in range(5)]
    assert texts != [other.next_text() for _ in range(5)]
    assert len(set(texts)) > 1
    assert all(len(first.encoded(text)) == tokens for text in texts)


def test_a_message_that_comes_out_short_is_said_again() -> None:
    assert Messages(words, 10, 0).encoded("a bb ccc dddd") == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
