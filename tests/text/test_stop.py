"""Stop strings: never leaked, whatever the pieces, and nothing else held back for good."""

import pytest
from hypothesis import given, strategies as st

from kakeya.errors import InvalidArgument
from kakeya.text import StopStrings

letters = st.text("ab\n", max_size=12)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read one more character at a time until some stop string is complete; of several, the longest."""
    for length in range(len(text) + 1):
        complete = [stop for stop in stops if text[:length].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: text.find(longest)], longest
    return text, None


@given(st.lists(letters, max_size=8), st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4))
def test_the_text_before_the_first_stop_string_and_nothing_more(pieces: list[str], stops: list[str]) -> None:
    watcher, shown = StopStrings(stops), ""
    text, matched = expected("".join(pieces), stops)
    for piece in pieces:
        shown += watcher.feed(piece)
        assert text.startswith(shown)
    assert watcher.matched == matched
    assert shown + watcher.finish() == text


@given(letters, letters, st.text("ab", min_size=1, max_size=4))
def test_one_stop_string_agrees_with_find(before: str, after: str, stop: str) -> None:
    text = before + stop + after
    watcher = StopStrings([stop])
    assert "".join(watcher.feed(character) for character in text) == text[: text.find(stop)]
    assert watcher.matched == stop


def test_only_a_possible_beginning_is_held_back() -> None:
    watcher = StopStrings(["###", "\nUser:"])
    assert watcher.feed("hello #") == "hello "
    assert watcher.feed("1 and ##") == "#1 and "
    assert watcher.feed("\n") == "##"
    assert watcher.feed("Us") == ""
    assert watcher.feed("ed\nUser: x") == "\nUsed"
    assert watcher.matched == "\nUser:"


def test_nothing_follows_a_match() -> None:
    watcher = StopStrings(["stop"])
    assert watcher.feed("a stop b") == "a "
    assert watcher.feed("more") == ""
    assert watcher.finish() == ""


def test_without_stop_strings_everything_passes() -> None:
    watcher = StopStrings([])
    assert watcher.feed("anything") == "anything"
    assert watcher.finish() == ""
    assert watcher.matched is None


@pytest.mark.parametrize("bad", ["stop", [""], ["a", ""]])
def test_bad_stop_strings_are_refused(bad: list[str]) -> None:
    with pytest.raises(InvalidArgument, match="stop must be a list of strings that are not empty"):
        StopStrings(bad)
