"""What the Messages routes take, and what they refuse by name."""

from typing import Any

import pytest
from pydantic import ValidationError

from kakeya.http_server.errors import ApiError
from kakeya.http_server.messages.schema import CountRequest, MessagesRequest
from kakeya.text.prompting import Message
from kakeya.text.turns import End

HELLO = {"role": "user", "content": "Hello"}
CALL = {"type": "tool_use", "id": "t1", "name": "paint", "input": {"colour": "red"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "wet"}]}
PAINT = {"name": "paint", "input_schema": {"type": "object"}}


def parsed(**fields: Any) -> MessagesRequest:
    return MessagesRequest(**{"model": "m", "max_tokens": 5, "messages": [HELLO], **fields})


def test_blocks_become_messages() -> None:
    asked = CountRequest(
        model="m",
        system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        messages=[
            HELLO,
            {"role": "assistant", "content": [{"type": "text", "text": "So:"}, CALL]},
            {"role": "user", "content": [RESULT, {"type": "text", "text": "And?"}]},
        ],
    ).asked()
    system, hello, called, result, more = asked.messages
    assert (system, hello) == (Message("system", "Be brief."), Message("user", "Hello"))
    assert called.content == "So:"
    assert (called.tool_calls[0].id, called.tool_calls[0].arguments) == ("t1", '{"colour": "red"}')
    assert result == Message("tool", "wet", (), "t1", "paint")
    assert more == Message("user", "And?")
    assert asked.end is End.ANSWER


def test_a_failed_call_says_so_and_an_empty_result_is_empty() -> None:
    call = {"role": "assistant", "content": [CALL]}
    failed = {"type": "tool_result", "tool_use_id": "t1", "content": "no paint", "is_error": True}
    empty = {"type": "tool_result", "tool_use_id": "t1", "content": None}
    for block, text in ((failed, "Error: no paint"), (empty, "")):
        asked = parsed(messages=[HELLO, call, {"role": "user", "content": [block]}]).to_answer()
        assert [message.role for message in asked.messages] == ["user", "assistant", "tool"]
        assert asked.messages[-1].content == text


def test_what_changes_nothing_is_taken() -> None:
    cached = {"type": "ephemeral", "ttl": "1h"}
    asked = parsed(
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": cached}]}],
        cache_control=cached,
        thinking={"type": "enabled", "budget_tokens": 2048},
        metadata={"user_id": "me"},
        service_tier="auto",
        speed="standard",
        output_config={"effort": "high"},
        tools=[{**PAINT, "type": "custom", "cache_control": cached, "eager_input_streaming": True}],
    ).to_answer()
    assert asked.messages == [Message("user", "Hello")]
    assert (asked.most_tokens, asked.choice.names) == (5, ("paint",))


@pytest.mark.parametrize(
    "choice, names, required, parallel",
    [
        (None, ("paint", "rest"), False, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("paint", "rest"), False, False),
        ({"type": "any"}, ("paint", "rest"), True, True),
        ({"type": "tool", "name": "rest"}, ("rest",), True, False),
        ({"type": "none"}, (), False, True),
    ],
)
def test_tool_choices(
    choice: dict[str, Any] | None, names: tuple[str, ...], required: bool, parallel: bool
) -> None:
    asked = parsed(tools=[PAINT, {**PAINT, "name": "rest"}], tool_choice=choice).to_answer()
    assert (asked.choice.names, asked.choice.required, asked.choice.parallel) == (names, required, parallel)
    assert bool(asked.tools) == bool(names)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"messages": []}, "at least 1"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "of type 'image'"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "not the user's"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "not the assistant's"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, RESULT]}]},
            "before the text",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "search"}]}, "web_search_20250305"),
        ({"tool_choice": {"type": "tool"}}, "name goes with the type tool"),
        ({"tool_choice": {"type": "any", "name": "paint"}}, "name goes with the type tool"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 65}, "at most 64"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"container": "c"}, "container is not supported"),
        ({"mcp_servers": []}, "mcp_servers is not supported"),
        ({"speed": "fast"}, "speed"),
        ({"stop": ["x"]}, "stop"),
    ],
)
def test_fields_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        parsed(**fields)


@pytest.mark.parametrize(
    "messages, message",
    [
        ([{"role": "user", "content": [RESULT]}], "answers no call"),
        ([HELLO, {"role": "assistant", "content": [CALL]}], "their results must follow"),
    ],
)
def test_calls_and_results_belong_together(messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        parsed(messages=messages).to_answer()
