"""What was said again since: of a fact that was told anew, only the newest should be seen.

Two pages that tell the same thing with different figures are a trap for a small model, even in order of time.
So a page is out of date when all that it has to say to the question is said again in a newer one. A sentence
is said again where one sentence of the other has all its words, whatever the figures. Figures that are asked
for are words: room 12 is not room 14. And a sentence without figures does not say one with figures again, so
a question that was asked before does not hide its answer. What the next page says is not said again: it is
the same telling.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kakeya.recall.choosing import MORE_THAN_THE_BEST, is_share
from kakeya.recall.words import numbered, term_of, words_of

# So many of the best pages are read: more seldom fit, and reading one takes 0.1 ms.
READ = 8
_SENTENCES = re.compile(r"(?<=[.!?:;])\s+|[\n\u3002\uff01\uff1f]+")


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence, whether it has figures beside them, and what all is worth to a question."""

    words: frozenset[str]
    has_figures: bool
    worth: int

    def is_said_by(self, other: "Sentence") -> bool:
        return self.words <= other.words and self.has_figures <= other.has_figures


def up_to_date(pages: Sequence[tuple[int, str]], weights: Mapping[int, int]) -> list[int]:
    """Without those of the pages, the best first and each with its text, that a newer one says again."""
    told = [(page, _sentences(text, weights)) for page, text in pages]
    best = max((each.worth for _, sentences in told for each in sentences), default=0)
    kept = []
    for page, sentences in told:
        answers = [each for each in sentences if best and is_share(each.worth, MORE_THAN_THE_BEST, best)]
        newer = [other for number, others in told if number > page + 1 for other in others]
        if not answers or not all(any(each.is_said_by(other) for other in newer) for each in answers):
            kept.append(page)
    return kept


def _sentences(text: str, weights: Mapping[int, int]) -> list[Sentence]:
    return [_sentence(each, weights) for each in _SENTENCES.split(text) if each.strip()]


def _sentence(text: str, weights: Mapping[int, int]) -> Sentence:
    said = words_of(text)
    words = frozenset(said)
    figures = {word for word in words if any(map(str.isdigit, word)) and term_of(word) not in weights}
    terms = {term for pair in numbered(said) for term in pair if term in weights}
    return Sentence(words - figures, bool(figures), sum(weights[term] for term in terms if term is not None))
