"""Tool calls in a stream of text: found whole, never leaked, whatever the pieces."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from kakeya.errors import InvalidArgument
from kakeya.text.tool_calls import (
    ArgumentsPiece,
    CallBegin,
    CallEnd,
    TextPiece,
    ToolCallParser,
    ToolEvent,
    ToolSpec,
    write_tool_call,
)
from support.grammars import parse_tool_calls

WEATHER = write_tool_call("get_weather", '{"city": "Paris"}')
CLOCK = write_tool_call("clock", "{}")


def events_of(*pieces: str) -> list[ToolEvent]:
    parser = ToolCallParser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def joined(events: list[ToolEvent]) -> list[ToolEvent]:
    """Neighbouring pieces of the same thing as one."""
    merged: list[ToolEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, TextPiece) and isinstance(last, TextPiece):
            merged[-1] = TextPiece(last.text + event.text)
        elif isinstance(event, ArgumentsPiece) and isinstance(last, ArgumentsPiece):
            merged[-1] = ArgumentsPiece(event.index, last.text + event.text)
        else:
            merged.append(event)
    return merged


def call(index: int, name: str, arguments: str) -> list[ToolEvent]:
    return [CallBegin(index, name), ArgumentsPiece(index, arguments), CallEnd(index)]


def test_a_call_is_written_as_the_models_write_it() -> None:
    assert WEATHER == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_calls_come_apart_from_the_text_before_them() -> None:
    assert events_of(f"Let me look.\n\n{WEATHER}\n{CLOCK}") == [
        TextPiece("Let me look."),
        *call(0, "get_weather", '{"city": "Paris"}'),
        *call(1, "clock", "{}"),
    ]


def test_text_after_a_call_is_text() -> None:
    assert events_of(f"{CLOCK}\n\nDone. ") == [
        *call(0, "clock", "{}"),
        TextPiece("\n\nDone."),
        TextPiece(" "),
    ]
    assert events_of(f"{CLOCK}\n \n") == call(0, "clock", "{}")


arguments = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.sampled_from(["</tool_call>", '"}', "\\", "{"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
some_text = st.text(alphabet=st.sampled_from('ab <>/_\n{}"tool_call'), max_size=20).map(str.strip)


@given(
    some_text.filter(lambda text: "<tool_call>" not in text),
    st.lists(
        st.tuples(
            st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True), st.dictionaries(st.text(), arguments)
        ),
        max_size=3,
    ),
    st.booleans(),
    st.data(),
)
def test_how_the_text_is_cut_makes_no_difference(
    text: str, calls: list[tuple[str, dict[str, object]]], ascii_only: bool, data: st.DataObject
) -> None:
    written = [(name, json.dumps(value, ensure_ascii=ascii_only)) for name, value in calls]
    whole = "\n".join([text] * bool(text) + [write_tool_call(name, value) for name, value in written])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=12)) | {0, len(whole)})
    pieces = [whole[start:end] for start, end in pairwise(cuts)]
    expected: list[ToolEvent] = [TextPiece(text)] if text else []
    for index, (name, value) in enumerate(written):
        expected += call(index, name, value)
    assert joined(events_of(*pieces)) == expected
    assert joined(events_of(*whole)) == expected
    assert parse_tool_calls(whole) == written


@given(st.text(alphabet=st.sampled_from('ab <>/_\n{}"tool_call'), max_size=60))
def test_text_without_a_call_passes_unchanged(text: str) -> None:
    if "<tool_call>" not in text:
        assert "".join(event.text for event in events_of(*text) if isinstance(event, TextPiece)) == text


def test_text_is_shown_as_soon_as_it_can_be() -> None:
    parser = ToolCallParser()
    assert parser.feed("Hello wor") == [TextPiece("Hello wor")]
    assert parser.feed("ld <b>") == [TextPiece("ld <b>")]
    assert parser.feed(" <tool") == []
    assert parser.feed("box>") == [TextPiece(" <toolbox>")]
    assert parser.finish() == []


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = ToolCallParser()
    assert parser.feed('<tool_call>\n{"name": "f", "arguments":') == []
    assert parser.feed(' {"a"') == [CallBegin(0, "f"), ArgumentsPiece(0, '{"a"')]
    assert parser.feed(": 1}") == [ArgumentsPiece(0, ": 1}")]
    assert parser.feed("}\n</tool_cal") == []
    assert parser.feed("l>") == [CallEnd(0)]


@pytest.mark.parametrize("length", range(1, len(WEATHER)))
def test_a_call_that_is_cut_short_is_neither_text_nor_whole(length: int) -> None:
    cut = WEATHER[:length]
    events = events_of("Well.\n" + cut)
    assert CallEnd(0) not in events
    assert parse_tool_calls(cut) == []
    shown = "".join(event.text for event in events if isinstance(event, TextPiece))
    assert shown == ("Well." if "<tool_call>" in cut else "Well.\n" + cut)


@pytest.mark.parametrize(
    "odd",
    [
        "<tool_call></tool_call>",
        "<tool_call>\nget_weather(Paris)\n</tool_call>",
        '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
        '<tool_call>{"arguments": {}, "name": "f"}</tool_call>',
        '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>',
    ],
)
def test_what_is_no_call_stays_text(odd: str) -> None:
    assert joined(events_of(f"a {odd}{CLOCK}")) == [TextPiece("a " + odd), *call(0, "clock", "{}")]
    assert parse_tool_calls(odd) == []


def test_other_white_space_is_read_too() -> None:
    loose = '<tool_call>{"name" : "f" ,\n "arguments" :{"a": [{}, "]"]} }  </tool_call>'
    assert parse_tool_calls(loose) == [("f", '{"a": [{}, "]"]}')]


@pytest.mark.parametrize("name", ["", "two words", "a" * 65, "naïve", "a.b", "f\n"])
def test_a_tools_name_is_checked(name: str) -> None:
    with pytest.raises(InvalidArgument, match="a tool's name must be 1 to 64 letters"):
        ToolSpec(name)


def test_a_good_name_is_taken() -> None:
    assert ToolSpec("get_weather-2", {"type": "object"}, "The weather.").name == "get_weather-2"
