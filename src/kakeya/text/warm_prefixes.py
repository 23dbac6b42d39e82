"""Prefixes that are known beforehand, such as a system message with its tools: one JSON object a line."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kakeya.errors import ConfigError
from kakeya.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class WarmPrefix:
    """A text, or the first messages of a chat with the tools that it has."""

    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """As a session that begins so would have it. Raises InvalidArgument when the template refuses."""
        if self.messages:
            return tokenizer.chat_ids(self.messages, add_generation_prompt=False, tools=self.tools)
        return tokenizer.encode(self.text, bos=True)


def parse_prefixes(written: str, name: str) -> list[WarmPrefix]:
    """The prefixes of a file called `name`. Raises ConfigError naming the line that is wrong."""
    lines = enumerate(written.splitlines(), 1)
    return [_parse(f"{name}, line {number}", line) for number, line in lines if line.strip()]


def _parse(where: str, line: str) -> WarmPrefix:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not a JSON object: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: not a JSON object: {line[:40]!r}")
    unknown = given.keys() - {"text", "messages", "tools"}
    if unknown:
        raise ConfigError(f"{where}: unknown name {sorted(unknown)[0]!r}; text, messages and tools are known")
    text, messages, tools = given.get("text", ""), given.get("messages", []), given.get("tools", [])
    if not isinstance(text, str) or bool(text) == bool(messages):
        raise ConfigError(f"{where}: either a text or messages are needed")
    for name, entries in (("messages", messages), ("tools", tools)):
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ConfigError(f"{where}: {name} must be a list of JSON objects")
    return WarmPrefix(text, tuple(messages), tuple(tools))
