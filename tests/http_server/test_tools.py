"""Tools in the form that all routes share, and which of them may be called."""

from kakeya.http_server.tools import ToolChoice, function_tool, specs_of

CLOCK = function_tool("clock", "Tells the time.", {"type": "object"}, strict=True)
PLAIN = function_tool("plain", None, None)


def test_a_tool_says_only_what_it_was_given() -> None:
    assert CLOCK["function"] == {
        "name": "clock",
        "description": "Tells the time.",
        "parameters": {"type": "object"},
        "strict": True,
    }
    assert PLAIN == {"type": "function", "function": {"name": "plain"}}


def test_only_chosen_tools_may_be_called() -> None:
    specs = specs_of([CLOCK, PLAIN], ToolChoice(("plain",)))
    assert [(spec.name, spec.parameters) for spec in specs] == [("plain", None)]
    [clock] = specs_of([CLOCK, PLAIN], ToolChoice(("clock",)))
    assert (clock.parameters, clock.description) == ({"type": "object"}, "Tells the time.")
    assert specs_of([CLOCK], ToolChoice()) == []
