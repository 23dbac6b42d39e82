"""What `bench speculation` asks for: kinds of text that a proposer finds easy or hard."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kakeya.bench.text import prose

_PASSAGE_WORDS = 90
_QUESTIONS = (
    "What should I see in Lisbon in two days?",
    "Why is the sky blue? Explain it to a child.",
    "How do I make a simple tomato soup?",
    "Give me some advice for my first job interview.",
    "What are the differences between a frog and a toad?",
    "Tell me a short story about a lighthouse keeper.",
    "How does a bicycle stay upright?",
    "What is a good way to learn the names of the stars?",
)
_PROGRAMS = (
    "a function that parses an ISO date without a library, with tests",
    "a class for a bounded queue that several threads may use",
    "a function that finds the longest common subsequence of two strings",
    "a small command line program that counts words in files",
    "a binary search tree with insert, delete and an iterator",
    "a function that flattens nested lists, and its tests",
    "a decorator that retries a function with growing pauses",
    "a matrix class with addition, multiplication and transposition",
)
_SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "animals": {"type": "array", "maxItems": 5, "items": {"type": "string", "maxLength": 20}},
        "places": {
            "type": "array",
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 20},
                    "kind": {"type": "string", "enum": ["island", "mountain", "town", "other"]},
                },
                "required": ["name", "kind"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["title", "animals", "places"],
    "additionalProperties": False,
}
_JSON = {"type": "json_schema", "json_schema": {"name": "notes", "schema": _SCHEMA, "strict": True}}


@dataclass(frozen=True)
class Task:
    """One chat, and more fields of its request."""

    messages: list[dict[str, str]]
    fields: Mapping[str, Any] = field(default_factory=dict)


def _ask(text: str, **fields: Any) -> Task:
    return Task([{"role": "user", "content": text}], fields)


def _passage(number: int) -> str:
    """Another part of the prose for each number."""
    words = prose().split()
    first = number * _PASSAGE_WORDS % (len(words) - _PASSAGE_WORDS)
    return " ".join(words[first : first + _PASSAGE_WORDS])


def _edit(number: int) -> Task:
    passage = _passage(number)
    asked = f"Correct the spelling of this text and change nothing else:\n\n{passage}"
    return _ask(asked, prediction={"type": "content", "content": passage})


_TASKS: dict[str, Callable[[int], Task]] = {
    "chat": lambda number: _ask(_QUESTIONS[number % len(_QUESTIONS)]),
    "code": lambda number: _ask(f"Write {_PROGRAMS[number % len(_PROGRAMS)]}, in Python."),
    "summary": lambda number: _ask(f"Summarize this text in three sentences:\n\n{_passage(number)}"),
    "json": lambda number: _ask(f"Take notes of this text:\n\n{_passage(number)}", response_format=_JSON),
    "translation": lambda number: _ask(
        f"Translate this text into Spanish, then your translation back into English:\n\n{_passage(number)}"
    ),
    "copy": lambda number: _ask(f"Repeat this text word for word:\n\n{_passage(number)}"),
    "edit": _edit,
}
KINDS = tuple(_TASKS)


def tasks(kind: str, numbers: Iterable[int]) -> list[Task]:
    """Chats of a kind: eight numbers in a row have different ones."""
    return [_TASKS[kind](number) for number in numbers]
