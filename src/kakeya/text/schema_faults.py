"""Finds what in a JSON Schema cannot be honoured, and where it is."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kakeya.errors import InvalidArgument

Schema = Mapping[str, Any] | bool

_HOLDS_SCHEMA = (
    "additionalProperties",
    "items",
    "additionalItems",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_HOLDS_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_HOLDS_MAP = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_MOST_TRIES = 4000


def check_schema(schema: Schema, name: str) -> None:
    """Raises InvalidArgument for what would compile and then not be obeyed. `name` names the schema."""
    if isinstance(schema, Mapping) and "x-guidance" in schema:
        raise InvalidArgument(f"{name}: x-guidance is not a keyword of JSON Schema")
    for pointer, part in _walk(schema):
        if not isinstance(part, Mapping):
            continue
        if _may_repeat_keys(part):
            raise InvalidArgument(
                f"{name} cannot be guaranteed at #{pointer}: minProperties is more than 1 and more than the "
                "properties in 'required', and keys beyond those may repeat"
            )
        if isinstance(factor := part.get("multipleOf"), (int, float)) and factor <= 0:
            raise InvalidArgument(f"{name} cannot be compiled at #{pointer}: multipleOf must be above 0")


def find_fault(schema: Schema, message: str, error_of: Callable[[Schema], str]) -> str:
    """A pointer to the smallest part of a schema that gives the same error message by itself.

    `error_of` says what is wrong with a schema, nothing when it compiles. An error of parts that do not go
    together lies where they meet. The effort is bounded: in a huge schema the answer may be less exact.
    """
    shared = {key: part for key, part in _items(schema) if key in ("$defs", "definitions")}
    pointer, left = "", _MOST_TRIES
    parts = list(_children(schema))
    while parts and left:
        step, part = parts.pop(0)
        left -= 1
        if isinstance(part, Mapping) and error_of({**shared, **part}) == message:
            pointer, parts = pointer + step, list(_children(part))
    return pointer


def _may_repeat_keys(schema: Mapping[str, Any]) -> bool:
    """Whether an object needs more properties than are known by name: nothing keeps those apart."""
    least, required = schema.get("minProperties"), schema.get("required")
    named = len({str(name) for name in required}) if isinstance(required, list) else 0
    return isinstance(least, (int, float)) and least > max(1, named)


def _walk(schema: Schema) -> Iterator[tuple[str, Any]]:
    """A schema and all schemas inside it, each with its JSON pointer."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        pointer, part = waiting.pop()
        yield pointer, part
        waiting.extend((pointer + step, child) for step, child in _children(part))


def _children(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, each with its step of a JSON pointer."""
    for key, value in _items(schema):
        if key in _HOLDS_MAP:
            yield from ((f"/{key}/{_escaped(name)}", part) for name, part in _items(value))
        elif key in _HOLDS_LIST and isinstance(value, list):
            yield from ((f"/{key}/{index}", part) for index, part in enumerate(value))
        elif key in _HOLDS_SCHEMA:
            yield f"/{key}", value


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    """What a JSON object holds; nothing where something else stands."""
    return value.items() if isinstance(value, Mapping) else ()


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
