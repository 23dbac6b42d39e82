"""Our tokenizer as llguidance sees it: the bytes of each token, the special ones, and how text is cut.

Where a grammar allows only one continuation, llguidance asks for the usual tokens of that text and forces
them. They must spell exactly that text, or the mask would be wrong. This module makes sure that they do.
"""

import re
from collections.abc import Iterable

from llguidance import LLTokenizer, TokenizerWrapper

from kakeya.errors import InvalidArgument
from kakeya.text.tokenizer import Tokenizer
from kakeya.text.tool_calls import CLOSE_TAG, OPEN_TAG

# Encoded in front of a text and taken off again, where an encoder adds something of its own at the start.
_SENTINEL = "\x02"


def build_vocabulary(tokenizer: Tokenizer, eos_token_ids: Iterable[int], vocab_size: int) -> LLTokenizer:
    """The first `vocab_size` token ids, and one more that stands for the end where a model has no EOS.

    Ids that the tokenizer does not know are never allowed, and special tokens only as EOS.
    """
    eos = sorted(eos_token_ids)
    vocabulary = _Vocabulary(tokenizer, eos, vocab_size)
    return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=eos or [vocab_size])


class _Vocabulary:
    """What `TokenizerWrapper` asks for; the names are its own."""

    def __init__(self, tokenizer: Tokenizer, eos: list[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        ends = {tag: tokenizer.encode(tag)[-1] for tag in (OPEN_TAG, CLOSE_TAG)}
        self._tags = {tag: end for tag, end in ends.items() if tokenizer.token_bytes(end) == tag.encode()}
        self._starts = {start: tokenizer.encode(start, special=False) for start in ("", _SENTINEL)}
        self.tokens = [_bytes_of(tokenizer, token_id) for token_id in range(vocab_size)] + [b"</end>"]
        special = {token_id for token_id in range(vocab_size) if tokenizer.is_special(token_id)}
        self.special_token_ids = sorted({*special, *eos, vocab_size})
        self.bos_token_id = None
        self.eos_token_id = eos[0] if eos else vocab_size
        self._by_bytes = {
            data: token_id for token_id, data in enumerate(self.tokens) if token_id not in special and data
        }
        self._longest = max(map(len, self._by_bytes))

    def __call__(self, data: bytes) -> list[int]:
        """The usual tokens of a text; failing that, the longest that fit, from left to right."""
        for start in ("", _SENTINEL):
            usual = [
                token_id for part in self._parts(data.decode()) for token_id in self._encode(start, part)
            ]
            if b"".join(self.tokens[token_id] for token_id in usual if token_id < len(self.tokens)) == data:
                return usual
        return self._longest_fitting(data)

    def _parts(self, text: str) -> list[str]:
        """Tags that have a token of their own stand alone."""
        return (
            [part for part in re.split(f"({OPEN_TAG}|{CLOSE_TAG})", text) if part] if self._tags else [text]
        )

    def _encode(self, start: str, part: str) -> list[int]:
        if part in self._tags:
            return [self._tags[part]]
        ids = self._tokenizer.encode(start + part, special=False)
        return ids[len(self._starts[start]) :]

    def _longest_fitting(self, data: bytes) -> list[int]:
        ids: list[int] = []
        while data:
            length = next((n for n in range(self._longest, 0, -1) if data[:n] in self._by_bytes), 0)
            if not length:
                break  # llguidance will find that the grammar cannot continue
            ids.append(self._by_bytes[data[:length]])
            data = data[length:]
        return ids


def _bytes_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    try:
        return tokenizer.token_bytes(token_id)
    except InvalidArgument:
        return b""
