"""Chat templates: the Jinja programs that models ship to write a conversation as text.

They run in a sandbox, with the names and settings that template authors write for (those of `transformers`).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kakeya.errors import InvalidArgument

ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatTemplate:
    """A template and the special tokens it may name, compiled at first use. No `source`, no template."""

    def __init__(self, source: str | None, **special_tokens: str | None) -> None:
        self._source = source
        self._special_tokens = {name: token for name, token in special_tokens.items() if token is not None}

    @property
    def exists(self) -> bool:
        return self._source is not None

    @property
    def knows_tools(self) -> bool:
        """Whether it writes tools by itself, and calls of them as `<tool_call>`, as we read them."""
        return self._source is not None and "tools" in self._source and "<tool_call>" in self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Write the conversation. Bad messages, and whatever the template raises, become InvalidArgument."""
        conversation = _checked(messages)
        try:
            return self._compiled.render(
                messages=conversation,
                add_generation_prompt=add_generation_prompt,
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                **self._special_tokens,
            )
        except InvalidArgument:
            raise
        except Exception as error:  # a template is foreign code and may raise anything
            raise InvalidArgument(f"the chat template refused the messages: {error}") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if self._source is None:
            raise InvalidArgument("this model has no chat template; send it plain text instead")
        try:
            return _environment().from_string(self._source)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidArgument(f"the model's chat template is not valid: {error}") from error


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what to train on; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would change what the model reads.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as the dictionaries templates expect, or InvalidArgument naming the first bad one."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidArgument(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise InvalidArgument("messages is empty; a conversation needs at least one message")
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidArgument(f"{where} must have a role and a content, got {message!r}")
    if message.get("role") not in ROLES:
        raise InvalidArgument(f"{where}.role must be one of {', '.join(ROLES)}, got {message.get('role')!r}")
    if not isinstance(message.get("content"), str):
        raise InvalidArgument(f"{where}.content must be a string, got {message.get('content')!r}")
    return dict(message)
