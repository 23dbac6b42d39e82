"""Items, as the Responses API lists them, and the messages that a chat template reads."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kakeya.http_server.errors import invalid
from kakeya.http_server.responses.schema import FunctionCallItem, InputItem, MessageItem, TextPart
from kakeya.text.prompting import Message, ToolCall

Item = dict[str, Any]


def new_id(prefix: str, home: str = "") -> str:
    """An id that nobody can guess; `home` says which server of a cluster keeps what it names."""
    return f"{prefix}_{home}{secrets.token_hex(24)}"


def text_of(parts: Iterable[TextPart]) -> str:
    return "".join(part.text for part in parts)


def output_text(text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A part of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def listed(items: Iterable[InputItem]) -> list[Item]:
    """The items as they are shown later, each with an id."""
    return [_listed(item) for item in items]


def _listed(item: InputItem) -> Item:
    fields: Item
    if isinstance(item, MessageItem):
        is_output = item.role == "assistant"
        texts = [part.text for part in item.content]
        content = [output_text(text) if is_output else {"type": "input_text", "text": text} for text in texts]
        prefix, fields = "msg", {"role": item.role, "content": content}
    elif isinstance(item, FunctionCallItem):
        prefix, fields = "fc", {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
    else:
        prefix, fields = "fco", {"call_id": item.call_id, "output": text_of(item.output)}
    return {"id": item.id or new_id(prefix), "type": item.type, "status": "completed", **fields}


def messages_of(
    items: Sequence[InputItem], calls: Mapping[str, str] | None = None, param: str = "input"
) -> tuple[Message, ...]:
    """The items as messages. `calls` are the names of the functions called before, by call id.

    An assistant's words and the calls that follow them are one message. Raises ApiError for the output of a
    call that nobody made.
    """
    known = dict(calls or {})
    messages: list[Message] = []
    for index, item in enumerate(items):
        if isinstance(item, MessageItem):
            role = "system" if item.role == "developer" else item.role
            messages.append(Message(role, text_of(item.content)))
        elif isinstance(item, FunctionCallItem):
            known[item.call_id] = item.name
            call = ToolCall(item.call_id, item.name, item.arguments)
            last = messages.pop() if messages and messages[-1].role == "assistant" else Message("assistant")
            messages.append(replace(last, tool_calls=(*last.tool_calls, call)))
        elif (name := known.get(item.call_id)) is not None:
            output = text_of(item.output)
            messages.append(Message("tool", output, tool_call_id=item.call_id, name=name))
        else:
            message = f"no function was called as {item.call_id!r} in what came before this output"
            raise invalid(f"{param}.{index}.call_id", message)
    return tuple(messages)


def calls_in(messages: Iterable[Message]) -> dict[str, str]:
    """The names of the functions that were called, by call id."""
    return {call.id: call.name for message in messages for call in message.tool_calls}


def page(items: Sequence[Item], *, after: str | None, limit: int, order: str) -> dict[str, Any]:
    """A list of items as the API gives it. Raises ApiError when `after` is not one of them."""
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        at = next((index for index, item in enumerate(ordered) if item["id"] == after), None)
        if at is None:
            raise invalid("after", f"after: {after!r} is not in this list")
        ordered = ordered[at + 1 :]
    shown = ordered[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(ordered) > limit,
    }
