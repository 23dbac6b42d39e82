"""Tool calls in a model's text, as Hermes and Qwen write them: at its end, one after the other.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Writing and reading are both here, and the grammar that a model is held to is built from the same pieces.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kakeya.errors import InvalidArgument
from kakeya.text.stop import begun

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
CALL_END = "}\n" + CLOSE_TAG
CALL_SEPARATOR = "\n"

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL)


@dataclass(frozen=True)
class ToolSpec:
    """A function that the model may call; `parameters` is the JSON Schema of its arguments, None for none."""

    name: str
    parameters: Mapping[str, Any] | None = None
    description: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidArgument(
                f"a tool's name must be 1 to 64 letters, digits, underscores or hyphens, got {self.name!r}"
            )


def call_head(name: str) -> str:
    """What stands between the opening tag and the arguments."""
    return f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


def write_tool_call(name: str, arguments: str) -> str:
    """A call as the model would have written it; `arguments` is a JSON object as text."""
    return f"{OPEN_TAG}{call_head(name)}{arguments}{CALL_END}"


@dataclass(frozen=True)
class TextPiece:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call begins; calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class ArgumentsPiece:
    """The next characters of a call's arguments; joined they are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is whole."""

    index: int


ToolEvent = TextPiece | CallBegin | ArgumentsPiece | CallEnd


class ToolCallParser:
    """Splits a stream of text into text and calls; how the text was cut into pieces makes no difference.

    Text passes on as soon as it cannot belong to a tag. White space around calls is not part of the text.
    What stands between the tags and is no call stays text, tags included.
    """

    def __init__(self) -> None:
        self._step: Callable[[list[ToolEvent]], None] = self._text
        self._held = ""
        self._gap = ""  # white space before the tag just read
        self._calls = 0
        self._follows_call = False
        self._object = _ObjectEnd()

    def feed(self, piece: str) -> list[ToolEvent]:
        """What this piece completes."""
        self._held += piece
        events: list[ToolEvent] = []
        done = None
        while self._held and done != self._step:
            done = self._step
            done(events)
        return events

    def finish(self) -> list[ToolEvent]:
        """The text held back for a tag that never came. Call it once, at the end.

        A call that was cut short is not ended: its `CallEnd` is missing, or it never began.
        """
        held, self._held = self._held, ""
        if self._step != self._text or not held or (self._follows_call and held.isspace()):
            return []
        return [TextPiece(held)]

    def _text(self, events: list[ToolEvent]) -> None:
        text, tag, rest = self._held.partition(OPEN_TAG)
        if tag:
            shown = text.rstrip()
            self._step, self._held, self._gap = self._head, rest, text[len(shown) :]
        else:
            shown = text[: len(text) - begun([OPEN_TAG], text)].rstrip()
            self._held = text[len(shown) :]
        if shown:
            self._follows_call = False
            events.append(TextPiece(shown))

    def _head(self, events: list[ToolEvent]) -> None:
        head = _HEAD.match(self._held)
        name = _read_name(head[1]) if head else None
        if head and name is not None:
            events.append(CallBegin(self._calls, name))
            self._step, self._held = self._arguments, self._held[head.end() :]
        elif CLOSE_TAG in self._held:
            odd, _, self._held = self._held.partition(CLOSE_TAG)
            events.append(TextPiece(self._gap + OPEN_TAG + odd + CLOSE_TAG))
            self._step, self._follows_call = self._text, False

    def _arguments(self, events: list[ToolEvent]) -> None:
        end = self._object.find(self._held)
        events.append(ArgumentsPiece(self._calls, self._held[:end]))
        self._held = self._held[end:] if end is not None else ""
        if end is not None:
            self._step = self._tail

    def _tail(self, events: list[ToolEvent]) -> None:
        if CLOSE_TAG in self._held:
            self._held = self._held.partition(CLOSE_TAG)[2]
            events.append(CallEnd(self._calls))
            self._calls += 1
            self._follows_call = True
            self._step = self._text


class _ObjectEnd:
    """Finds where a JSON object ends, piece by piece."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, piece: str) -> int | None:
        """How much of the piece belongs to the object, None while it goes on after it."""
        for at, character in enumerate(piece):
            if self._in_string:
                self._read_in_string(character)
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None

    def _read_in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False


def _read_name(quoted: str) -> str | None:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return None
