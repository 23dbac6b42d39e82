"""A session's memory of what left its window: an index of its words, told of the history when it is asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kakeya.recall.index import RecallIndex, Vocabulary
from kakeya.types import RecallQuery, TokenRange


@dataclass(frozen=True)
class Language:
    """What an index must know of a model's tokens. `message_start`: the one that begins a message, if any."""

    vocabulary: Vocabulary
    message_start: int | None


class Remembering:
    """The engine's `Retriever` over a `RecallIndex`. It is used by one thread at a time.

    `language` is called when something is searched for, and takes a moment at first.
    """

    def __init__(self, language: Callable[[], Language], index: RecallIndex | None = None) -> None:
        self._language = language
        self._index = index

    def choose(self, history: Sequence[int], query: RecallQuery) -> Sequence[TokenRange]:
        if self._index is None:
            self._index = RecallIndex(self._language().vocabulary)
        self._tell(self._index, history[self._index.length : query.end])
        return self._index.choose(
            history,
            query.length,
            pinned=query.pinned,
            window=query.window,
            recall=query.recall,
            query_from=query.query_from,
            remembered=query.remembered,
        )

    @property
    def nbytes(self) -> int:
        return 0 if self._index is None else self._index.nbytes

    def fork(self) -> "Remembering":
        return Remembering(self._language, None if self._index is None else self._index.fork())

    def _tell(self, index: RecallIndex, token_ids: Sequence[int]) -> None:
        """More history, and where messages begin in it."""
        ids = np.asarray(token_ids, dtype=np.int32)
        start = self._language().message_start
        if start is not None:
            for place in np.flatnonzero(ids == start).tolist():
                index.mark_message(index.length + place)
        index.extend(token_ids)
