"""The tokenizer's door: encoding, decoding, special tokens, and what it refuses."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, strategies as st

from kakeya.errors import CorruptCheckpoint, InvalidArgument
from kakeya.models.checkpoint import open_checkpoint
from kakeya.text import Tokenizer
from kakeya.types import TokenizerFiles
from support.tiny import byte_level_files, sentencepiece_files

BYTE_LEVEL = Tokenizer(byte_level_files())
SENTENCEPIECE = Tokenizer(sentencepiece_files())
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
MESSAGES = [{"role": "user", "content": "hello"}]


def library(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_buffer(tokenizer.files.tokenizer_json)


@BOTH
@given(text=st.text(max_size=40))
def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == library(tokenizer).encode(text, add_special_tokens=False).ids


@BOTH
@given(text=st.text(max_size=40), special=st.booleans())
def test_decoding_text_agrees_with_the_library(tokenizer: Tokenizer, text: str, special: bool) -> None:
    ids = [2, *tokenizer.encode(text), 0, *tokenizer.encode(text)]
    expected = library(tokenizer).decode(ids, skip_special_tokens=not special)
    assert tokenizer.decode(ids, special=special) == expected


@given(st.lists(st.integers(0, 299), max_size=30))
def test_decoding_any_byte_level_ids_agrees_with_the_library(ids: list[int]) -> None:
    assert BYTE_LEVEL.decode(ids) == library(BYTE_LEVEL).decode(ids)


def test_broken_bytes_are_replaced_and_spoil_nothing_around_them() -> None:
    sequence = [*SENTENCEPIECE.encode("é"), *(3 + byte for byte in b"\xe2\x82 a\xff")]
    assert SENTENCEPIECE.decode(sequence) == "é\ufffd a\ufffd"


def test_special_tokens_are_one_id_unless_taken_as_text() -> None:
    assert BYTE_LEVEL.encode("<|user|><|end|>") == [1, 0]
    as_text = BYTE_LEVEL.encode("<|user|><|end|>", special=False)
    assert not {0, 1} & set(as_text)
    assert BYTE_LEVEL.decode(as_text) == "<|user|><|end|>"
    assert BYTE_LEVEL.encode("<|end|>") == [0]


def test_special_tokens_show_only_when_asked_for() -> None:
    ids = BYTE_LEVEL.encode("<|user|>hello<|end|>")
    assert BYTE_LEVEL.decode(ids) == "hello"
    assert BYTE_LEVEL.decode(ids, special=True) == "<|user|>hello<|end|>"
    assert BYTE_LEVEL.is_special(0)
    assert not BYTE_LEVEL.is_special(ids[1])


def test_a_document_begins_as_the_model_expects() -> None:
    assert SENTENCEPIECE.encode("hello", bos=True) == [1, *SENTENCEPIECE.encode("hello")]
    assert BYTE_LEVEL.encode("hello", bos=True) == BYTE_LEVEL.encode("hello")


def test_the_named_ids() -> None:
    assert (SENTENCEPIECE.bos_id, SENTENCEPIECE.eos_id) == (1, 2)
    assert (BYTE_LEVEL.bos_id, BYTE_LEVEL.eos_id) == (None, 0)
    assert BYTE_LEVEL.vocab_size == 301


@BOTH
def test_one_token_as_bytes_and_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the 🙂")
    assert b"".join(tokenizer.token_bytes(each) for each in ids).lstrip() == "the 🙂".encode()
    assert tokenizer.token_text(ids[-1]) == "\ufffd"
    assert tokenizer.token_text(2) in ("<|assistant|>", "</s>")


@pytest.mark.parametrize("bad", [301, 10**6, -1, 2**40, "x", None, 1.5])
def test_an_unknown_id_is_refused(bad: Any) -> None:
    for call in (BYTE_LEVEL.token_text, BYTE_LEVEL.token_bytes, lambda each: BYTE_LEVEL.decode([0, each])):
        with pytest.raises(InvalidArgument, match=r"token id .* is not in the vocabulary of 301 tokens"):
            call(bad)


@pytest.mark.parametrize("bad", ["half a pair: \ud83d", 5, None, b"bytes"])
def test_text_that_is_not_unicode_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="text must be a string without lone surrogates"):
        BYTE_LEVEL.encode(bad)


def test_pieces_stand_for_every_id_of_a_padded_vocabulary() -> None:
    tokenizer = Tokenizer(byte_level_files())
    size = tokenizer.vocab_size
    pieces = tokenizer.pieces(size + 3)
    assert pieces[:size] == [tokenizer.text_bytes(token_id) for token_id in range(size)]
    assert any(pieces[:size])
    assert pieces[size:] == [b""] * 3


def test_settings_of_a_training_run_do_not_cut_or_pad() -> None:
    tokenizer = library(BYTE_LEVEL)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    built = Tokenizer(replace(BYTE_LEVEL.files, tokenizer_json=tokenizer.to_str().encode()))
    text = "the quick brown fox"
    for special in (True, False):
        assert built.encode(text, special=special) == BYTE_LEVEL.encode(text)


def test_chat_ids_are_the_ids_of_the_rendered_chat() -> None:
    assert BYTE_LEVEL.has_chat_template
    assert BYTE_LEVEL.render_chat(MESSAGES) == "<|user|>hello<|end|>\n<|assistant|>"
    assert BYTE_LEVEL.render_chat(MESSAGES, add_generation_prompt=False) == "<|user|>hello<|end|>\n"
    ids = BYTE_LEVEL.chat_ids(MESSAGES)
    assert (ids[0], ids[-1]) == (1, 2)
    assert BYTE_LEVEL.decode(ids, special=True) == BYTE_LEVEL.render_chat(MESSAGES)
    assert BYTE_LEVEL.chat_ids(MESSAGES, add_generation_prompt=False) == ids[:-1]


def test_a_model_without_a_template_says_so() -> None:
    assert not SENTENCEPIECE.has_chat_template
    with pytest.raises(InvalidArgument, match="this model has no chat template"):
        SENTENCEPIECE.chat_ids(MESSAGES)


@pytest.mark.parametrize("text", ["", "{}", "nonsense", '{"model": 5}'])
def test_a_broken_file_is_refused(text: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"tokenizer\.json cannot be read"):
        Tokenizer(TokenizerFiles(text.encode()))


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_named_token_must_exist(name: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=f"the {name} token '<nope>' is not in"):
        Tokenizer(replace(BYTE_LEVEL.files, **{f"{name}_token": "<nope>"}))


def test_text_never_imports_torch() -> None:
    probe = "import sys, kakeya.text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


@pytest.fixture(scope="module")
def smollm(default_model: Path) -> Tokenizer:
    return Tokenizer(open_checkpoint(default_model).tokenizer_files())


def test_the_default_model_speaks_chatml(smollm: Tokenizer) -> None:
    ids = smollm.chat_ids([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2024?"}])
    assert smollm.decode(ids, special=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2024?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [smollm.token_text(each) for each in ids[ids.index(2) + 2 :]][3:8] == ["2", "0", "2", "4", "?"]
    assert (smollm.bos_id, smollm.eos_id, ids.count(1), ids.count(2)) == (1, 2, 3, 2)


# Ids that llama.cpp gives for the same file.
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world 12345", [19556, 905, 216, 33, 34, 35, 36, 37]),
        ("\n        0: x", [466, 32, 42, 1792]),
        ("日本語 🙂 é", [23274, 115, 40993, 179, 120, 248, 47526, 26411]),
    ],
)
def test_the_default_models_ids(text: str, ids: list[int], smollm: Tokenizer) -> None:
    assert smollm.encode(text) == ids
    assert smollm.decode(ids) == text


def test_a_digest_names_which_id_stands_for_which_token() -> None:
    tokenizer, same = Tokenizer(byte_level_files()), Tokenizer(replace(byte_level_files(), chat_template="x"))
    other = Tokenizer(sentencepiece_files())
    assert tokenizer.ids_digest == same.ids_digest != other.ids_digest
    written = byte_level_files().tokenizer_json.replace(b'"!":', b'"swap":').replace(b'"#":', b'"!":')
    swapped = Tokenizer(replace(byte_level_files(), tokenizer_json=written.replace(b'"swap":', b'"#":')))
    assert not tokenizer.has_ids_of(swapped)
    assert tokenizer.ids_digest != swapped.ids_digest
