"""Typed reads from the loosely typed mappings that describe a model: config.json and GGUF metadata."""

from collections.abc import Mapping
from typing import Any, TypeVar

from kakeya.errors import CorruptCheckpoint

_T = TypeVar("_T")
_MOST_LAYERS = 4096
_LARGEST = 2**64  # nothing that describes a model is larger, and everything below fits a float


class Fields:
    """A mapping whose values are checked as they are read. `source` names the file in errors.

    An absent key and a null mean the same: the default, or CorruptCheckpoint where there is none.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        present = {
            name: value for name, value in self._values.items() if name not in defaults or value is not None
        }
        return Fields({**defaults, **present}, self._source)

    def with_values(self, values: Mapping[str, Any]) -> "Fields":
        return Fields({**self._values, **values}, self._source)

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None, *, least: int | None = None) -> int:
        stated = self.maybe_integer(name)
        value = self._found(name, stated if stated is not None else default)
        if least is not None and value < least:
            raise self._wrong(name, f"at least {least}", value)
        return value

    def maybe_integer(self, name: str) -> int | None:
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _LARGEST:
            raise self._wrong(name, "a whole number", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.maybe_number(name)
        return self._found(name, value if value is not None else default)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise self._wrong(name, "positive", value)
        return value

    def maybe_number(self, name: str) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
            raise self._wrong(name, "a finite number", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.maybe_text(name)
        return self._found(name, value if value is not None else default)

    def maybe_text(self, name: str) -> str | None:
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a text", value)
        return value

    def section(self, name: str) -> "Fields | None":
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object", value)
        return Fields(value, f"{self._source}, {name}")

    def layer_count(self, name: str) -> int:
        """A number of layers that is safe to make lists of."""
        value = self.integer(name)
        if not 1 <= value <= _MOST_LAYERS:
            raise self._wrong(name, f"from 1 to {_MOST_LAYERS}", value)
        return value

    def sequence(self, name: str, kind: type[_T]) -> list[_T] | None:
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self._wrong(name, f"a list of {kind.__name__}", value)
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers that must be there."""
        values = self.required(name)
        if not isinstance(values, list):
            raise self._wrong(name, "a list of numbers", values)
        return tuple(Fields({name: value}, self._source).number(name) for value in values)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of ids, or nothing: files write all three."""
        value = self.raw(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
            raise self._wrong(name, "a token id or a list of them", value)
        return tuple(ids)

    def required(self, name: str) -> Any:
        return self._found(name, self.raw(name))

    def _found(self, name: str, value: _T | None) -> _T:
        if value is None:
            raise CorruptCheckpoint(f"{self._source}: {name} is missing")
        return value

    def _wrong(self, name: str, expected: str, value: Any) -> CorruptCheckpoint:
        shown = repr(value) if len(repr(value)) < 80 else f"{repr(value)[:80]}…"
        return CorruptCheckpoint(f"{self._source}: {name} must be {expected}, got {shown}")
