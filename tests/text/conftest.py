from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import AddedToken

from kakeya.text import Tokenizer
from kakeya.text.grammar import GrammarCompiler
from kakeya.types import TokenizerFiles
from support.grammars import EOS
from support.tiny import byte_level_files, sentencepiece_files

PADDING = 13


def with_tags(files: TokenizerFiles, *, special: bool) -> TokenizerFiles:
    encoder = tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
    tags = [AddedToken(tag, special=special, normalized=False) for tag in ("<tool_call>", "</tool_call>")]
    (encoder.add_special_tokens if special else encoder.add_tokens)(tags)
    return TokenizerFiles(encoder.to_str().encode(), eos_token=files.eos_token)


VOCABULARIES: dict[str, Callable[[], TokenizerFiles]] = {
    "byte-level": byte_level_files,
    "sentencepiece": sentencepiece_files,
    "tags added": lambda: with_tags(byte_level_files(), special=False),
    "tags special": lambda: with_tags(sentencepiece_files(), special=True),
}


@pytest.fixture(scope="module", params=list(VOCABULARIES))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Small ones of both kinds, with and without tokens for the tags of tool calls."""
    return Tokenizer(VOCABULARIES[request.param]())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    """Of grammars over each of them, for a model whose vocabulary is padded."""
    return GrammarCompiler(tokenizer, [EOS], tokenizer.vocab_size + PADDING)


@pytest.fixture(scope="module")
def plain() -> GrammarCompiler:
    """Of grammars over the byte-level tokenizer alone."""
    tokenizer = Tokenizer(byte_level_files())
    return GrammarCompiler(tokenizer, [EOS], tokenizer.vocab_size)
