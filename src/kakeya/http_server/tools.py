"""Tools the model may call: how they are described to it and how calls are written, the Hermes way."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kakeya.text.tool_calls import ToolSpec

_INTRODUCTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, *, strict: bool | None = None
) -> dict[str, Any]:
    """A tool in the one form in which threads keep it, whichever API it came through."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = dict(parameters)
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def describe_tools(system: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """A system message that also tells what can be called and how, in the words Qwen models know."""
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(signatures=signatures)
    return f"{system}\n\n{introduction}" if system else introduction


def write_tool_result(content: str) -> str:
    """What a tool answered, as the model reads it."""
    return f"<tool_response>\n{content}\n</tool_response>"


@dataclass(frozen=True)
class ToolChoice:
    """Which tools the model may call, whether it must, and whether several at once. No names: none."""

    names: tuple[str, ...] = ()
    required: bool = False
    parallel: bool = True


def specs_of(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> list[ToolSpec]:
    """The tools that may be called, as grammars take them."""
    functions = [tool["function"] for tool in tools]
    return [
        ToolSpec(function["name"], function.get("parameters"), function.get("description", ""))
        for function in functions
        if function["name"] in choice.names
    ]
