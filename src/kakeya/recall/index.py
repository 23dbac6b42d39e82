"""What a session said, page by page, and which pages a question is about.

A page is at most PAGE tokens and ends where a reader would turn it: at a message's border, else after a
sentence, else between words, the last such place in its second half. So facts and words are seldom cut. Pages
are found by the words that they share with a question, and a rare word counts for more.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from zlib import crc32

import numpy as np

from kakeya.errors import InvalidArgument
from kakeya.recall.choosing import QUERY_TOKENS, Page, best_pages, fill, weigh
from kakeya.recall.postings import Postings
from kakeya.recall.restating import READ, up_to_date
from kakeya.recall.words import MESSAGE, WITHIN_CHARACTER, Ids, Levels, Vocabulary, terms_of
from kakeya.types import TokenRange

__all__ = ["HEADER", "PAGE", "RecallIndex", "Vocabulary"]

PAGE = 64
# A message's header, such as <|im_start|>user and a line's end, is not longer: no page ends within it.
HEADER = 8
# Terms of a whole page: with them a token takes 12 bytes at most, whatever the text.
MOST_TERMS = 88
# How much is indexed at once: a long history takes little more memory meanwhile.
_CHUNK = 16_384


class RecallIndex:
    """A session's pages, found by their words. One thread uses it at a time.

    What it chooses follows from the ids and the marked messages alone, however they came in pieces.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._postings = Postings()
        self._starts = array("I")
        self._digests = array("I")
        self._messages = array("I")
        self._open: Ids = np.empty(0, dtype=np.int32)
        self._length = 0

    @property
    def length(self) -> int:
        """How many tokens it has been told of."""
        return self._length

    @property
    def messages(self) -> tuple[int, ...]:
        """Where messages were marked: with the ids all that it takes to build it again."""
        return tuple(self._messages)

    @property
    def nbytes(self) -> int:
        arrays = (self._starts, self._digests, self._messages)
        small = sum(each.itemsize * len(each) for each in arrays) + self._open.nbytes
        return small + self._postings.nbytes

    def fork(self) -> "RecallIndex":
        """The same history, to go on by itself. Shares what takes the most memory."""
        other = RecallIndex(self._vocabulary)
        other._postings = self._postings.fork()
        other._starts, other._digests = self._starts[:], self._digests[:]
        other._messages = self._messages[:]
        other._open, other._length = self._open, self._length
        return other

    def mark_message(self, position: int) -> None:
        """A message's header begins at `position`. Marks come in order, each before the token it is at.

        Raises InvalidArgument for one that comes too late.
        """
        after = self._messages[-1] + 1 if self._messages else 0
        if position < max(self._length, after):
            raise InvalidArgument(
                f"a message at {position} must be marked before what follows it: the history has "
                f"{self._length} tokens, and the last mark may be no later than {after - 1}"
            )
        self._messages.append(position)

    def extend(self, token_ids: Sequence[int]) -> None:
        """More history; a token takes about a microsecond."""
        ids = np.asarray(token_ids, dtype=np.int32)
        for start in range(0, len(ids), _CHUNK):
            self._extend(ids[start : start + _CHUNK])

    def _extend(self, ids: Ids) -> None:
        self._length += len(ids)
        unread = np.concatenate((self._open, ids))
        # A page is cut when its next token is there: only then is known how well it would end.
        if len(unread) > PAGE:
            first, pages = len(self._starts), self._cut(unread)
            self._postings.add(first, [self._terms(page) for page in pages])
            unread = unread[sum(map(len, pages)) :]
        self._open = unread.copy()

    def _terms(self, page: Ids) -> list[int]:
        """Each once; where they are many, words go before pairs."""
        terms = terms_of(self._vocabulary.text(page))
        words = dict.fromkeys(word for word, _ in terms)
        pairs = dict.fromkeys(pair for _, pair in terms if pair is not None)
        return list(words | pairs)[: len(page) * MOST_TERMS // PAGE]

    def _cut(self, ids: Ids) -> list[Ids]:
        """Whole pages of these tokens, which follow the last page."""
        position = self._length - len(ids)
        levels = self._levels(ids, position)
        pages, start = [], 0
        while len(ids) - start > PAGE:
            latest_first = levels[start + PAGE : start + PAGE // 2 - 1 : -1]
            end = start + PAGE - int(latest_first.argmax())
            page = ids[start:end]
            self._starts.append(position + start)
            self._digests.append(crc32(page.tobytes()))
            pages.append(page)
            start = end
        return pages

    def _levels(self, ids: Ids, position: int) -> Levels:
        """How good a page would end before each token."""
        levels = np.concatenate((np.zeros(1, dtype=np.int8), self._vocabulary.levels(ids)))
        first = bisect_left(self._messages, position - HEADER + 1)
        for message in self._messages[first : bisect_left(self._messages, self._length)]:
            place = message - position
            levels[max(0, place + 1) : place + HEADER] = WITHIN_CHARACTER
            if place >= 0:
                levels[place] = MESSAGE
        return levels

    def choose(
        self,
        history: Sequence[int],
        length: int,
        *,
        pinned: int,
        window: int,
        recall: int,
        query_from: int,
        remembered: Sequence[TokenRange] = (),
    ) -> tuple[TokenRange, ...]:
        """The ranges, `recall` tokens at most, that the tokens from `query_from` to the end ask for.

        `history` is what the index was told; it may have grown since. The ranges lie between what is pinned
        and what the token at `length` sees, in order of time, and do not overlap. `remembered` ones come
        first. Nothing while nothing is out of sight, and where no page shares enough with the question: what
        is there may then stay.
        """
        if length <= pinned + recall + window:
            return ()
        hidden = TokenRange(pinned, length - window + 1)
        asked = history[max(0, query_from, self._length - QUERY_TOKENS) : self._length]
        weights = weigh(terms_of(self._text(asked)), self._postings, len(self._starts))
        first = max(0, bisect_right(self._starts, hidden.start) - 1)
        last = min(bisect_left(self._starts, hidden.end), len(self._starts))
        best = best_pages(weights, self._postings, range(first, last))
        read = [(page, self._text(self._of_page(history, page))) for page in best[:READ]]
        best[:READ] = up_to_date(read, weights)
        pages = [Page(self._range(page), self._digests[page]) for page in best]
        return fill(hidden, recall, remembered, pages)

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._vocabulary.text(np.asarray(token_ids, dtype=np.int32))

    def _of_page(self, history: Sequence[int], page: int) -> Sequence[int]:
        place = self._range(page)
        return history[place.start : place.end]

    def _range(self, page: int) -> TokenRange:
        following = self._starts[page + 1 : page + 2]
        return TokenRange(self._starts[page], following[0] if following else self._length - len(self._open))
