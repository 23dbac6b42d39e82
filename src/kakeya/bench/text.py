"""The ordinary text that benchmarks read, and what simulated users say. Its source is in data/README.md."""

import random
from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import cycle, islice


def prose() -> str:
    """Some 13,000 characters of English prose."""
    return files("kakeya.bench").joinpath("data", "galapagos.txt").read_text(encoding="utf-8")


def stretch(token_ids: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens of the text from place `start`, beginning again when it ends."""
    return list(islice(cycle(token_ids), start % len(token_ids), start % len(token_ids) + count))


class Messages:
    """User messages of exactly `tokens` tokens, each tokenized by itself when it is asked for."""

    def __init__(self, encode: Callable[[str], Sequence[int]], tokens: int, seed: int) -> None:
        self._encode = encode
        self._tokens = tokens
        self._dice = random.Random(seed)
        self._words = prose().split()
        # Room to spare, so that one stretch of text is nearly always long enough.
        self._words_per_token = 1.2 * len(self._words) / max(1, len(encode(prose())))

    def next_text(self) -> str:
        """The text of another message, which begins at some word of the prose."""
        count = max(1, round(self._tokens * self._words_per_token) + 4)
        start = self._dice.randrange(len(self._words))
        return " ".join(self._words[(start + place) % len(self._words)] for place in range(count))

    def encoded(self, text: str) -> list[int]:
        """The message's tokens. A text that came out short is said again."""
        token_ids = list(self._encode(text))
        while len(token_ids) < self._tokens:
            token_ids += self._encode(" " + text)
        return token_ids[: self._tokens]
