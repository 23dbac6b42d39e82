"""Tokens to text that may be shown: whole characters, no stop strings, tokens never ahead of their text."""

from collections.abc import Sequence

from hypothesis import given, strategies as st

from kakeya.text import AnswerText, Tokenizer
from kakeya.text.answer import Piece
from kakeya.types import TokenEvent, TokenLogprob
from support.tiny import byte_level_files

TOKENIZER = Tokenizer(byte_level_files())


def reading(*stop: str, continues: Sequence[int] = ()) -> AnswerText:
    return AnswerText(TOKENIZER, stop=stop, continues=continues, tells_tokens=True)


def read(token_ids: list[int], *stop: str) -> list[Piece]:
    """What can be shown after each token, and at the end."""
    tokens = reading(*stop)
    pieces = []
    for token_id in token_ids:
        if not tokens.stopped:
            tokens.feed(TokenEvent(token_id, -1.0))
        pieces.append(tokens.ready())
    tokens.finish()
    return [*pieces, tokens.ready()]


WORDS = st.text(st.sampled_from("abé日<|end|> hello\n"), max_size=30)


@given(text=WORDS, stops=st.lists(st.text(st.sampled_from("abé日l "), min_size=1, max_size=3), max_size=3))
def test_nothing_of_a_stop_string_ever_shows(text: str, stops: list[str]) -> None:
    pieces = read(TOKENIZER.encode(text, special=False), *stops)
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        first = min(ends)
        begin = min(first - len(stop) for stop in stops if text[:first].endswith(stop))
        shown = text[:begin]
    else:
        shown = text
    assert "".join(piece.text for piece in pieces) == shown
    assert not any(stop in shown for stop in stops)
    told = [token for piece in pieces for token in piece.tokens]
    data = b"".join(bytes(token.bytes) for token in told)
    assert shown.encode().startswith(data), "no token shows what the text does not"
    if not ends:
        assert data == shown.encode()


@given(text=WORDS)
def test_a_token_comes_with_the_end_of_its_text(text: str) -> None:
    so_far, told = "", b""
    for piece in read(TOKENIZER.encode(text, special=False), "never"):
        so_far += piece.text
        told += b"".join(bytes(token.bytes) for token in piece.tokens)
        assert so_far.encode().startswith(told)
    assert so_far == text
    assert told == text.encode()


def test_half_a_character_waits_for_the_other_half() -> None:
    pieces = read(TOKENIZER.encode("é!"))
    assert [(piece.text, len(piece.tokens)) for piece in pieces] == [("", 0), ("é", 2), ("!", 1), ("", 0)]
    assert [token.offset for piece in pieces for token in piece.tokens] == [0, 0, 1]


def test_half_a_character_at_the_end_is_told() -> None:
    pieces = read(TOKENIZER.encode("Qé")[:2])
    assert [(piece.text, len(piece.tokens)) for piece in pieces] == [("Q", 1), ("", 0), ("\ufffd", 1)]


def test_what_waits_for_a_stop_string_waits_with_its_tokens() -> None:
    pieces = read(TOKENIZER.encode("QZK"), "ZX")
    assert [(piece.text, len(piece.tokens)) for piece in pieces] == [("Q", 1), ("", 0), ("ZK", 2), ("", 0)]


def test_a_special_token_has_no_text_but_is_told() -> None:
    assert read([1, *TOKENIZER.encode("Q")])[0].tokens[0].text == "<|user|>"


def test_what_was_skipped_is_not_shown_but_counts() -> None:
    lead, trail = TOKENIZER.encode("é")
    tokens = reading(continues=[lead])
    tokens.feed(TokenEvent(trail, -1.0, (TokenLogprob(lead, -0.5),)))
    piece = tokens.ready()
    assert piece.text == "é"
    assert piece.tokens[0].top == (("\ufffd", [0xC3], -0.5),)


def test_a_token_that_the_tokenizer_does_not_know_has_no_text() -> None:
    tokens = reading()
    for token_id in (*TOKENIZER.encode("Q"), 5000, *TOKENIZER.encode("Z")):
        tokens.feed(TokenEvent(token_id, -1.0, (TokenLogprob(5001, -0.5),)))
    piece = tokens.ready()
    assert piece.text == "QZ"
    assert [(token.text, token.bytes) for token in piece.tokens] == [("Q", [81]), ("", []), ("Z", [90])]
    assert piece.tokens[0].top == (("", [], -0.5),)


def test_the_token_that_ends_an_answer_has_no_text() -> None:
    letter = TOKENIZER.encode("Q")[0]
    for tells_end, told in ((False, 1), (True, 2)):
        tokens = AnswerText(TOKENIZER, {letter}, tells_tokens=True, tells_end=tells_end)
        tokens.feed(TokenEvent(*TOKENIZER.encode("Z")))
        assert not tokens.closed
        tokens.feed(TokenEvent(letter))
        tokens.finish()
        assert (tokens.closed, tokens.token_count) == (True, 2)
        assert len(tokens.ready().tokens) == told
    assert AnswerText(TOKENIZER, {letter}).closed is False


def test_what_follows_a_stop_string_does_not_count() -> None:
    tokens = reading("Z")
    for token_id in TOKENIZER.encode("QZK"):
        tokens.feed(TokenEvent(token_id))
    assert (tokens.stopped, tokens.token_count) == (True, 2)
    assert tokens.ready().text == tokens.text == "Q"
