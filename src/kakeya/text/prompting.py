"""Messages with tools and calls, and how a model's chat template gets to see them.

Tools are written as Hermes models know them where the template does not know tools itself.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kakeya.text.tokenizer import Tokenizer
from kakeya.text.tool_calls import write_tool_call
from kakeya.text.turns import End, TemplateMessage, Turns, opening_of

Tool = Mapping[str, Any]

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


@dataclass(frozen=True)
class ToolCall:
    """A function that the model wants called. `arguments` is JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message of a conversation, whichever API it came through.

    `role` is system, user, assistant or tool. A tool's message answers the call `tool_call_id` of `name`.
    """

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def identity(self) -> str:
        """Equal for messages that mean the same: the blanks of a call's arguments do not count."""
        calls = [(call.id, call.name, _canonical(call.arguments)) for call in self.tool_calls]
        return json.dumps([self.role, self.content, calls, self.tool_call_id])


def written_variables(variables: Mapping[str, Any] | None) -> str:
    """What a template is told besides as one string, to compare it by; empty for nothing."""
    return json.dumps(dict(variables), sort_keys=True) if variables else ""


def written_tools(tools: Sequence[Tool]) -> str:
    """The tools as one string, which tells whether they are the same; empty for none."""
    return json.dumps(list(tools)) if tools else ""


class Prompter:
    """Writes conversations for one model. It does not change once built, so threads may share it.

    Tools are given to a template that knows them; for others they are described in the system message, and
    what tools answered is written as the user's. `variables` is what `written_variables` gives: what the
    template is told besides. Raises InvalidArgument when there is no template or when it refuses.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> None:
        self._turns = Turns(tokenizer, eos_token_ids)
        self._knows_tools = tokenizer.template_knows_tools

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The model's own, and the token with which its template closes an answer."""
        return self._turns.end_token_ids

    def whole(
        self, messages: Sequence[Message], tools: str, variables: str = "", end: End = End.ANSWER
    ) -> list[int]:
        """The ids of the whole conversation, up to where the next answer begins, or to another end."""
        written = self._written(messages, tools)
        return self._turns.whole(written, self._passed(tools), _read(variables), end)

    def opening_tokens(self, messages: Sequence[Message], tools: str, variables: str = "") -> int:
        """How many ids come before the conversation itself: the system message and the tools."""
        opening = opening_of(self._written(messages, tools))
        return self._turns.opening_tokens(opening, self._passed(tools), _read(variables))

    def after_answer(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        tools: str,
        variables: str = "",
        *,
        closed: bool,
    ) -> list[int] | None:
        """What `new` adds behind the answer that ends `messages`; None if the whole must be written anew."""
        asked, passed = self._written(messages[:-1], tools), self._passed(tools)
        return self._turns.after_answer(asked, self._later(new), passed, _read(variables), closed=closed)

    def _passed(self, tools: str) -> list[Tool]:
        return json.loads(tools) if tools and self._knows_tools else []

    def _written(self, messages: Sequence[Message], tools: str) -> list[TemplateMessage]:
        """The messages as the template takes them, the tools described where it does not know them."""
        written = self._later(messages)
        if not tools or self._knows_tools:
            return written
        has_system = bool(messages) and messages[0].role == "system"
        system = messages[0].content if has_system else ""
        described = {"role": "system", "content": _describe_tools(system, json.loads(tools))}
        return [described, *written[has_system:]]

    def _later(self, messages: Sequence[Message]) -> list[TemplateMessage]:
        if self._knows_tools:
            return [_native(message) for message in messages]
        written: list[TemplateMessage] = []
        for is_result, group in groupby(messages, key=lambda message: message.role == "tool"):
            if is_result:
                results = "\n".join(f"<tool_response>\n{each.content}\n</tool_response>" for each in group)
                written.append({"role": "user", "content": results})
            else:
                written += [_plain(message) for message in group]
        return written


def _read(variables: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(variables) if variables else {}
    return read


def _describe_tools(system: str, tools: Sequence[Tool]) -> str:
    """A system message that also tells what can be called and how, in the words Qwen models know."""
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(signatures=signatures)
    return f"{system}\n\n{introduction}" if system else introduction


def _native(message: Message) -> TemplateMessage:
    """As `transformers` hands messages to templates."""
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _parsed(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        written["tool_call_id"] = message.tool_call_id
    if message.name:
        written["name"] = message.name
    return written


def _plain(message: Message) -> TemplateMessage:
    calls = [write_tool_call(call.name, call.arguments) for call in message.tool_calls]
    parts = [message.content, *calls] if message.content else calls
    return {"role": message.role, "content": "\n".join(parts)}


def _parsed(arguments: str) -> Any:
    """What templates expect; a string that is not JSON is left as it is."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
