"""Reads the tool calls out of a whole text."""

from kakeya.text.tool_calls import ArgumentsPiece, CallBegin, CallEnd, ToolCallParser


def parse_tool_calls(text: str) -> list[tuple[str, str]]:
    """The name and the arguments (JSON as it was written) of each whole call in a text."""
    whole: list[tuple[str, str]] = []
    name = arguments = ""
    for event in ToolCallParser().feed(text):
        if isinstance(event, CallBegin):
            name, arguments = event.name, ""
        elif isinstance(event, ArgumentsPiece):
            arguments += event.text
        elif isinstance(event, CallEnd):
            whole.append((name, arguments))
    return whole
