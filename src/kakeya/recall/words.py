"""What counts as a word, and where a page may end. Both follow from the text alone."""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Levels = NDArray[np.int8]

# Scripts that put no space between words: Thai to Khmer, kana, Han. Two neighbours of these count as a word.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_RUN = re.compile(rf"[{_UNSPACED}]+|[^\W_{_UNSPACED}]+")
_STARTS_UNSPACED = re.compile(rf"[{_UNSPACED}]").match
# Shorter ones, such as "of" and "the", stand between the words that belong together.
_PAIRED_LETTERS = 4

# How good a place between two tokens is to end a page.
WITHIN_CHARACTER, WITHIN_WORD, BETWEEN_WORDS, AFTER_SENTENCE, MESSAGE = range(5)
_ENDS_SENTENCE = frozenset(".!?:;")
_ENDS_LINE = frozenset("\n\u3002\uff01\uff1f")


def words_of(text: str) -> list[str]:
    """Casefolded runs of letters or digits, in order; of scripts without spaces each two neighbours."""
    if text.isascii():
        return _RUN.findall(text.lower())
    runs = _RUN.findall(unicodedata.normalize("NFKC", text).casefold())
    return [word for run in runs for word in _cut(run)]


def _cut(run: str) -> list[str]:
    if len(run) > 1 and _STARTS_UNSPACED(run):
        return [run[place : place + 2] for place in range(len(run) - 1)]
    return [run]


def terms_of(text: str) -> list[tuple[int, int | None]]:
    """Each word as a number, and with the long word before it as another; None where there is none.

    "The code of Alice" has such a pair, of "code" and "alice". Processes and machines agree on the numbers.
    Two terms may share one: of any two, once in four billion times.
    """
    return list(numbered(words_of(text)))


def term_of(word: str) -> int:
    """The number of a word."""
    return crc32(word.encode())


def numbered(words: Sequence[str]) -> Iterator[tuple[int, int | None]]:
    """The same for words that are known already."""
    before: bytes | None = None
    for word in words:
        data = word.encode()
        number = crc32(data)
        if len(word) < _PAIRED_LETTERS and word.isalpha() and word.isascii():
            yield number, None
        else:
            yield number, None if before is None else crc32(before, number)
            before = data


class Vocabulary:
    """What each token id adds to a text, as bytes. Made once for a model; threads may share it.

    A token without text, such as one that starts a message, parts words. So does an id beyond the vocabulary.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = [piece or b"\n" for piece in pieces] + [b"\n"]
        edges = np.array([_edges(piece) for piece in self._pieces], dtype=np.bool_)
        self._continues, self._word_first, self._word_last, self._sentence, self._line = edges.T.copy()

    def text(self, ids: Ids) -> str:
        """What these tokens say; part of a character becomes U+FFFD."""
        known = self._known(ids).tolist()
        return b"".join(map(self._pieces.__getitem__, known)).decode("utf-8", errors="replace")

    def levels(self, ids: Ids) -> Levels:
        """For each token but the first: how good a page would end before it."""
        known = self._known(ids)
        last, first = known[:-1], known[1:]
        apart = ~(self._word_last[last] & self._word_first[first])
        levels = np.where(self._continues[first], WITHIN_CHARACTER, WITHIN_WORD)
        levels[apart] = BETWEEN_WORDS
        # A point that a letter follows ends no sentence: 3.14, kakeya.recall.
        levels[self._line[last] | (self._sentence[last] & ~self._word_first[first])] = AFTER_SENTENCE
        return levels.astype(np.int8)

    def _known(self, ids: Ids) -> Ids:
        return np.minimum(ids, len(self._pieces) - 1)


def _edges(piece: bytes) -> tuple[bool, bool, bool, bool, bool]:
    """Whether it begins within a character, begins or ends with part of a word, ends a sentence, a line."""
    text = piece.decode("utf-8", errors="surrogateescape")
    # A byte that is no whole character is part of a letter more often than of anything else.
    word_first, word_last = (each.isalnum() or "\udc80" <= each <= "\udcff" for each in (text[0], text[-1]))
    ending = text.rstrip(" \t)\"'")[-1:]
    return 0x80 <= piece[0] < 0xC0, word_first, word_last, ending in _ENDS_SENTENCE, ending in _ENDS_LINE
