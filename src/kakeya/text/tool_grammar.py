"""The grammar of an answer that may or must call tools, in llguidance's dialect of Lark."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kakeya.errors import InvalidArgument
from kakeya.text.tool_calls import CALL_END, CALL_SEPARATOR, OPEN_TAG, ToolSpec, call_head

_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def arguments_schema(tool: ToolSpec) -> Mapping[str, Any]:
    """The schema of a tool's arguments, which are always an object.

    Raises InvalidArgument when the tool's parameters describe something else.
    """
    if tool.parameters is None:
        return _NO_ARGUMENTS
    kind = tool.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidArgument(f"the parameters of tool {tool.name!r} must be of type object, got {kind!r}")
    return {**tool.parameters, "type": "object"}


def tool_call_lark(tools: Sequence[tuple[str, Mapping[str, Any]]], *, required: bool, parallel: bool) -> str:
    """Calls of the named tools, whose arguments obey their schemas; unless `required`, free text too.

    Free text may come before the first call only. The references of a schema are to itself.
    """
    more = f"({_quoted(CALL_SEPARATOR + OPEN_TAG)} call)*" if parallel else ""
    if required:
        start = [f"start: {_quoted(OPEN_TAG)} call {more}"]
    else:
        # Lazy: the text before a call ends with the first tag, so no tag can be part of free text.
        start = [
            f"start: TEXT | head call {more}",
            f"head[lazy]: TEXT {_quoted(OPEN_TAG)}",
            r"TEXT: /(.|\n)*/",
        ]
    calls = [
        f"{_quoted(call_head(name))} %json {json.dumps(schema)} {_quoted(CALL_END)}" for name, schema in tools
    ]
    return "\n".join([*start, "call: " + "\n    | ".join(calls), ""])


def _quoted(text: str) -> str:
    """A Lark string is written as JSON writes it."""
    return json.dumps(text, ensure_ascii=False)
