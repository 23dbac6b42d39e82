"""Streaming text: the pieces joined are the whole, and no piece holds half a character."""

import pytest
from hypothesis import given, strategies as st

from kakeya.errors import InvalidArgument
from kakeya.text import Detokenizer, Tokenizer
from support.tiny import byte_level_files, sentencepiece_files

BYTE_LEVEL = Tokenizer(byte_level_files())
SENTENCEPIECE = Tokenizer(sentencepiece_files())
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])


def pieces(tokenizer: Tokenizer, ids: list[int], *, special: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer, special=special)
    return [*(detokenizer.feed(each) for each in ids), detokenizer.finish()]


@BOTH
@given(ids=st.lists(st.integers(0, 299), max_size=40), special=st.booleans())
def test_any_ids_stream_to_what_they_decode_to(tokenizer: Tokenizer, ids: list[int], special: bool) -> None:
    assert "".join(pieces(tokenizer, ids, special=special)) == tokenizer.decode(ids, special=special)


@BOTH
@given(text=st.text(max_size=30))
def test_valid_text_streams_without_replacement_characters(tokenizer: Tokenizer, text: str) -> None:
    streamed = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(streamed) == text
    assert streamed[-1] == ""
    assert "".join(streamed).count("\ufffd") == text.count("\ufffd")


@BOTH
def test_a_character_comes_whole_with_its_last_byte(tokenizer: Tokenizer) -> None:
    streamed = pieces(tokenizer, tokenizer.encode("x🙂y"))
    assert [piece for piece in streamed if piece] == ["x", "🙂", "y"]
    assert len(streamed) >= 7


@BOTH
def test_an_unfinished_character_is_replaced_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x🙂")[:-1]
    assert pieces(tokenizer, ids)[-1] == "\ufffd"
    assert "".join(pieces(tokenizer, ids)) == "x\ufffd"


def test_the_space_in_front_of_a_text_is_dropped_once() -> None:
    ids = SENTENCEPIECE.encode("the quick")
    assert "".join(pieces(SENTENCEPIECE, ids)) == "the quick"
    assert "".join(pieces(SENTENCEPIECE, [1, *ids])) == "the quick"
    assert "".join(pieces(SENTENCEPIECE, [1, *ids], special=True)) == "<s> the quick"
    [space] = SENTENCEPIECE.encode(" ")[:1]
    assert "".join(pieces(SENTENCEPIECE, [space, *ids])).lstrip() == "the quick"


def test_an_unknown_id_changes_nothing() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    first, *rest = BYTE_LEVEL.encode("🙂")
    assert detokenizer.feed(first) == ""
    with pytest.raises(InvalidArgument):
        detokenizer.feed(10**6)
    assert "".join(detokenizer.feed(each) for each in rest) == "🙂"
