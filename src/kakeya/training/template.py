"""What a chat template writes around the words of both sides, as ids."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from kakeya.errors import ConfigError
from kakeya.text import Tokenizer
from kakeya.text.turns import Turns

_WORDS = ({"role": "user", "content": "Hello"}, {"role": "user", "content": "1"})


@dataclass(frozen=True)
class TemplatePieces:
    """The bare template: where a user's words begin and end, and how the next turn begins."""

    opening: Sequence[int]
    """Up to where the words of the first user begin."""
    to_answer: Sequence[int]
    """From the end of a user's words to where the answer begins."""
    to_question: Sequence[int]
    """From a closed answer to where the next user's words begin; empty where the template allows none."""
    ends: frozenset[int]
    """The ids that end words or an answer."""


def template_pieces(tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> TemplatePieces:
    """Raises ConfigError for a model without a chat template: it cannot be asked to write conversations."""
    if not tokenizer.has_chat_template:
        raise ConfigError("the model has no chat template, so it cannot write conversations with itself")
    turns = Turns(tokenizer, eos_token_ids)
    one, other = (turns.whole([words]) for words in _WORDS)
    opening = _common(one, other)
    rest = min(len(one), len(other)) - len(opening)
    to_answer = _common(one[::-1], other[::-1])[:rest][::-1]
    if not opening or not to_answer:
        raise ConfigError("the chat template does not say where a user's words begin and end")
    closing = [token for token in to_answer[:1] if tokenizer.is_special(token)]
    later = [turns.after_answer([_WORDS[0]], [words], closed=True) for words in _WORDS]
    to_question = _common(later[0] or [], later[1] or [])
    return TemplatePieces(opening, to_answer, to_question, turns.end_token_ids | frozenset(closing))


def _common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
