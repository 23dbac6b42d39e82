"""Tools that the model may call and JSON that it must write, in the one form that all routes share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kakeya.http_server.checks import blames, invalid
from kakeya.http_server.text_sessions import TextSessions
from kakeya.text.tool_calls import ToolSpec

if TYPE_CHECKING:
    from kakeya.text.grammar import Grammar


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, *, strict: bool | None = None
) -> dict[str, Any]:
    """A tool in the one form in which text sessions keep it, whichever API it came through."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = dict(parameters)
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """Which tools the model may call, whether it must, and whether several at once. No names: none."""

    names: tuple[str, ...] = ()
    required: bool = False
    parallel: bool = True


def any_tools(names: Sequence[str], mode: str | None, *, parallel: bool) -> ToolChoice:
    """A choice among all tools: `none`, `auto` or `required`. Raises ApiError where none must be called."""
    if mode == "none" or (not names and mode != "required"):
        return ToolChoice()
    if not names:
        raise invalid("tool_choice", "tool_choice is required, but there are no tools")
    return ToolChoice(tuple(names), required=mode == "required", parallel=parallel)


def named_tools(names: Sequence[str], wanted: Sequence[str], *, required: bool, parallel: bool) -> ToolChoice:
    """A choice among `wanted`. Raises ApiError for a name that is none of the tools'."""
    for name in wanted:
        if name not in names:
            raise invalid("tool_choice", f"tool_choice names {name!r}, which is none of the tools")
    return ToolChoice(tuple(wanted), required=required, parallel=parallel)


def check_names(names: Sequence[str]) -> None:
    """Raises ApiError when two tools have the same name."""
    if len(set(names)) < len(names):
        raise invalid("tools", "tools must have different names")


@dataclass(frozen=True)
class JsonFormat:
    """The answer must be JSON: of the schema, or any object. `param` is the field that asks for it."""

    param: str
    schema: Mapping[str, Any] | None


def answer_grammar(
    sessions: TextSessions, tools: Sequence[Mapping[str, Any]], choice: ToolChoice, wanted: JsonFormat | None
) -> "Grammar | None":
    """What an answer is held to, if anything. Compiling takes a while: call it on a worker.

    Raises ApiError, naming the field, for a schema that cannot be compiled.
    """
    if choice.names:
        with blames("tools"):
            return sessions.compiler.tool_calls(
                specs_of(tools, choice), required=choice.required, parallel=choice.parallel
            )
    if wanted is None:
        return None
    if wanted.schema is None:
        return sessions.compiler.json_object()
    with blames(wanted.param):
        return sessions.compiler.json_schema(wanted.schema)


def specs_of(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> list[ToolSpec]:
    """The tools that may be called, as grammars take them."""
    functions = [tool["function"] for tool in tools]
    return [
        ToolSpec(function["name"], function.get("parameters"), function.get("description", ""))
        for function in functions
        if function["name"] in choice.names
    ]
