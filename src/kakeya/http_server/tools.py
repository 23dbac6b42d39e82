"""Tools that the model may call and JSON that it must write, in the one form that all routes share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kakeya.http_server.errors import blames, invalid
from kakeya.http_server.text_sessions import TextSessions
from kakeya.text.grammar import Grammar
from kakeya.text.tool_calls import ToolSpec


def function_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the one form in which text sessions keep it, whichever API it came through."""
    given = ((name, function.get(name)) for name in ("name", "description", "parameters", "strict"))
    return {"type": "function", "function": {name: value for name, value in given if value is not None}}


@dataclass(frozen=True)
class JsonFormat:
    """The answer must be JSON: of the schema, or any object. `param` is the field that asks for it."""

    param: str
    schema: Mapping[str, Any] | None


@dataclass(frozen=True)
class ToolChoice:
    """Which tools the model may call, whether it must, and whether several at once. No names: none."""

    names: tuple[str, ...] = ()
    required: bool = False
    parallel: bool = True


def choose_tools(
    names: Sequence[str],
    mode: str | None,
    wanted: Sequence[str] | None,
    *,
    parallel: bool,
    json_format: JsonFormat | None,
) -> ToolChoice:
    """The choice that a request makes: `none`, `auto` or `required`, among all tools or among `wanted`.

    Raises ApiError, naming the field, for tools that share a name, a choice that cannot be made, and calls
    in an answer that must be JSON.
    """
    if len(set(names)) < len(names):
        raise invalid("tools", "tools must have different names")
    for name in wanted or ():
        if name not in names:
            raise invalid("tool_choice", f"tool_choice names {name!r}, which is not one of the tools")
    if mode == "required" and not names:
        raise invalid("tool_choice", "tool_choice is required, but there are no tools")
    if mode == "none" or not names:
        return ToolChoice()
    if json_format is not None:
        param = json_format.param
        raise invalid(param, f"{param} cannot be combined with tools, unless tool_choice is none")
    return ToolChoice(tuple(names if wanted is None else wanted), mode == "required", parallel)


def answer_grammar(
    sessions: TextSessions, tools: Sequence[Mapping[str, Any]], choice: ToolChoice, wanted: JsonFormat | None
) -> Grammar | None:
    """What an answer is held to, if anything. Compiling takes a while: call it on a worker.

    Raises ApiError, naming the field, for a schema that cannot be compiled.
    """
    if choice.names:
        with blames("tools"):
            functions = [tool["function"] for tool in tools if tool["function"]["name"] in choice.names]
            specs = [
                ToolSpec(function["name"], function.get("parameters"), function.get("description", ""))
                for function in functions
            ]
            return sessions.compiler.tool_calls(specs, required=choice.required, parallel=choice.parallel)
    if wanted is None:
        return None
    if wanted.schema is None:
        return sessions.compiler.json_object()
    with blames(wanted.param):
        return sessions.compiler.json_schema(wanted.schema)
