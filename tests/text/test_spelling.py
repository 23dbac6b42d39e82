"""How tokens are spelt: in an alphabet of bytes, with marks for spaces, or as they are."""

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kakeya.errors import UnsupportedModel
from kakeya.text import Tokenizer
from kakeya.types import TokenizerFiles
from support.tiny import byte_level_files

BYTE_LEVEL = Tokenizer(byte_level_files())


def test_an_added_token_is_not_written_in_the_byte_alphabet() -> None:
    [token_id] = BYTE_LEVEL.encode("ïĠ")
    assert BYTE_LEVEL.token_bytes(token_id) == "ïĠ".encode()
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("a ïĠ b")) == "a ïĠ b"


def test_a_token_outside_the_byte_alphabet_stands_for_itself() -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "日 ": 1}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert Tokenizer(TokenizerFiles(tokenizer.to_str().encode())).decode([0, 1]) == "a日 "


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_metaspace_decoder_drops_the_space_it_added(scheme: Any) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "▁a": 2}, merges=[("▁", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    built = Tokenizer(TokenizerFiles(tokenizer.to_str().encode()))
    assert built.encode("a a") == ([1, 2] if scheme == "never" else [2, 2])
    assert built.decode(built.encode("a a")) == tokenizer.decode(built.encode("a a")) == "a a"


@pytest.mark.parametrize(
    ("decoder", "named"), [(None, "no decoder"), (decoders.WordPiece(), "WordPiece"), (decoders.CTC(), "CTC")]
)
def test_a_decoder_that_is_not_understood_is_refused_by_name(decoder: Any, named: str) -> None:
    content = json.loads(BYTE_LEVEL.files.tokenizer_json)
    content["decoder"] = decoder and json.loads(decoder.__getstate__())
    with pytest.raises(UnsupportedModel, match=named):
        Tokenizer(TokenizerFiles(json.dumps(content).encode()))
