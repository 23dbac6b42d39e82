"""Chat templates: the Jinja programs that models ship to write a conversation as text.

They run in a sandbox, with the names and settings that template authors write for (those of `transformers`).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kakeya.errors import InvalidArgument

if TYPE_CHECKING:
    import jinja2

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
OWN_VARIABLES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", *_SPECIAL_TOKENS)
)
"""Names that a template is given or that are ours to decide: no caller may set them."""
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
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Write the conversation. `variables` are further names that the template may look at.

        Bad messages, and whatever the template raises, become InvalidArgument.
        """
        conversation = _checked(messages)
        own = {
            "messages": conversation,
            "add_generation_prompt": add_generation_prompt,
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
            **self._special_tokens,
        }
        try:
            return self._compiled.render({**(variables or {}), **own})
        except InvalidArgument:
            raise
        except Exception as error:  # a template is foreign code and may raise anything
            raise InvalidArgument(f"the chat template refused the messages: {error}") from error

    @cached_property
    def _compiled(self) -> "jinja2.Template":
        if self._source is None:
            raise InvalidArgument("this model has no chat template; send it plain text instead")
        # Imported here because plain text needs no Jinja.
        from kakeya.text.sandbox import compiled

        return compiled(self._source)


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
