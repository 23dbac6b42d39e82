"""The vocabulary of grammars: what is forced is spelt in the tokenizer's own tokens."""

import json
from collections.abc import Callable

import pytest

from kakeya.text import Tokenizer
from kakeya.text.grammar_vocabulary import _Vocabulary
from kakeya.types import TokenizerFiles
from support.tiny import byte_level_files, sentencepiece_files

EOS = 0


def with_merges(files: TokenizerFiles) -> TokenizerFiles:
    """A vocabulary in which the longest tokens from left to right are not the usual ones."""
    data = json.loads(files.tokenizer_json)
    for left, right in (("x", "f"), ("q", "x")):  # the first is merged first
        data["model"]["vocab"][left + right] = max(data["model"]["vocab"].values()) + 1
        data["model"]["merges"].append([left, right])
    data["added_tokens"] = [token for token in data["added_tokens"] if token["special"]]
    return TokenizerFiles(json.dumps(data).encode(), eos_token=files.eos_token)


@pytest.mark.parametrize("files", [byte_level_files, sentencepiece_files])
def test_the_usual_tokens_are_the_tokenizers_own(files: Callable[[], TokenizerFiles]) -> None:
    tokenizer = Tokenizer(with_merges(files()))
    vocabulary = _Vocabulary(tokenizer, [EOS], tokenizer.vocab_size)
    assert [tokenizer.token_bytes(token_id) for token_id in vocabulary(b"qxf")] == [b"q", b"xf"]
    assert [tokenizer.token_bytes(i) for i in vocabulary._longest_fitting(b"qxf")] == [b"qx", b"f"]


def test_text_that_cannot_be_encoded_as_it_is_comes_in_the_longest_tokens_that_fit() -> None:
    tokenizer = Tokenizer(byte_level_files())
    small = _Vocabulary(tokenizer, [EOS], 259)
    assert [small.tokens[token_id] for token_id in small(b"hello")] == [b"h", b"e", b"l", b"l", b"o"]
    none = _Vocabulary(tokenizer, [EOS], 40)
    assert none(b"~hello") == []
