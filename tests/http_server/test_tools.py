"""Tools in the form that all routes share, which of them may be called, and what an answer is held to."""

from types import SimpleNamespace
from typing import Any

import pytest

from kakeya.http_server.errors import ApiError
from kakeya.http_server.tools import JsonFormat, ToolChoice, answer_grammar, choose_tools, function_tool

CLOCK = function_tool(
    {"name": "clock", "description": "Tells the time.", "parameters": {"type": "object"}, "strict": True}
)
PLAIN = function_tool({"name": "plain", "description": None, "type": "function"})
JSON = JsonFormat("text.format", None)


def test_a_tool_says_only_what_it_was_given() -> None:
    assert CLOCK["function"] == {
        "name": "clock",
        "description": "Tells the time.",
        "parameters": {"type": "object"},
        "strict": True,
    }
    assert PLAIN == {"type": "function", "function": {"name": "plain"}}


@pytest.mark.parametrize(
    ("mode", "wanted", "json_format", "choice"),
    [
        ("none", None, None, ToolChoice()),
        ("none", None, JSON, ToolChoice()),
        (None, None, None, ToolChoice(("clock", "plain"))),
        ("auto", None, None, ToolChoice(("clock", "plain"))),
        ("required", None, None, ToolChoice(("clock", "plain"), required=True)),
        ("auto", ["plain"], None, ToolChoice(("plain",))),
        ("required", ["plain"], None, ToolChoice(("plain",), required=True)),
        ("required", ["other"], None, "tool_choice"),
        ("auto", None, JSON, "text.format"),
    ],
)
def test_a_choice_is_made_or_its_field_named(
    mode: str | None, wanted: list[str] | None, json_format: JsonFormat | None, choice: ToolChoice | str
) -> None:
    def chosen() -> ToolChoice:
        return choose_tools(["clock", "plain"], mode, wanted, parallel=True, json_format=json_format)

    if isinstance(choice, ToolChoice):
        assert chosen() == choice
        return
    with pytest.raises(ApiError) as refused:
        chosen()
    assert refused.value.param == choice


@pytest.mark.parametrize(
    ("names", "mode", "param"), [(["a", "a"], "auto", "tools"), ([], "required", "tool_choice")]
)
def test_tools_that_nobody_can_choose_from_are_refused(names: list[str], mode: str, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        choose_tools(names, mode, None, parallel=True, json_format=None)
    assert refused.value.param == param


def test_only_chosen_tools_may_be_called() -> None:
    sessions: Any = SimpleNamespace(compiler=SimpleNamespace(tool_calls=lambda specs, **_: specs))

    def callable_tools(*names: str) -> Any:
        return answer_grammar(sessions, [CLOCK, PLAIN], ToolChoice(names), None)

    assert [(spec.name, spec.parameters) for spec in callable_tools("plain")] == [("plain", None)]
    [clock] = callable_tools("clock")
    assert (clock.parameters, clock.description) == ({"type": "object"}, "Tells the time.")
    assert callable_tools() is None
