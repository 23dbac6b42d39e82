"""The report every benchmark leaves: one JSON file and one HTML page, each replaced atomically."""

import inspect
import json
import math
import os
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kakeya.errors import ConfigError

# Version 1 had dictionaries in place of typed rows, and other verbs for conversations.
SCHEMA_VERSION = 2
# What everybody else may use of the machine while anything is timed.
BYSTANDERS_LIMIT = 0.05

Direction = Literal["at least", "at most"]


@dataclass(frozen=True)
class Gate:
    """One limit and how it fared; `passed` is None when there was nothing to judge, and `reason` says why."""

    name: str
    value: float | None
    direction: Direction
    limit: float
    passed: bool | None
    reason: str

    @property
    def verdict(self) -> str:
        return {True: "passed", False: "failed", None: "not judged"}[self.passed]


def at_least(name: str, value: float | None, limit: float, *, absent: str) -> Gate:
    """`value` must reach `limit`. `absent` is the reason given when there is no value."""
    return _judge(name, value, "at least", limit, absent)


def at_most(name: str, value: float | None, limit: float, *, absent: str) -> Gate:
    """`value` must not exceed `limit`. `absent` is the reason given when there is no value."""
    return _judge(name, value, "at most", limit, absent)


def bystanders_gate(share: float | None) -> Gate:
    """A busy machine slows one side of a comparison more than the other."""
    untold = "this system does not tell how busy it is"
    return at_most("share of the machine that others used", share, BYSTANDERS_LIMIT, absent=untold)


def busy(share: float | None, what: str = "ratios") -> str | None:
    """Why ratios are not judged, if others took too much of the machine."""
    if share is None or share <= BYSTANDERS_LIMIT:
        return None
    return f"others used {share:.0%} of the machine, so {what} mean nothing"


def _judge(name: str, value: float | None, direction: Direction, limit: float, absent: str) -> Gate:
    if value is None:
        return Gate(name, None, direction, limit, None, absent)
    if not math.isfinite(value):
        reason = f"the measured value is {value}, which is not a number"
        return Gate(name, None, direction, limit, None, reason)
    passed = value >= limit if direction == "at least" else value <= limit
    reason = f"{value:.4g} is {'' if passed else 'not '}{direction} {limit:g}"
    return Gate(name, value, direction, limit, passed, reason)


def now() -> str:
    """This moment in UTC, as reports write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Report:
    """What was measured, on what, and how it fared. Without `finished_at` it is a partial checkpoint."""

    kind: str
    config: dict[str, Any]
    machine: dict[str, Any]
    results: dict[str, Any] = field(default_factory=dict)
    gates: tuple[Gate, ...] = ()
    started_at: str = field(default_factory=now)
    finished_at: str | None = None

    @property
    def partial(self) -> bool:
        return self.finished_at is None

    @property
    def exit_status(self) -> int:
        """1 when any gate failed, otherwise 0. A gate that was not judged did not fail."""
        return int(any(gate.passed is False for gate in self.gates))

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": self.kind,
            "partial": self.partial,
            "started_at": self.started_at,
            "finished_at": self.finished_at,
            "config": as_json(self.config),
            "machine": as_json(self.machine),
            "results": self.results,
            "gates": [asdict(gate) for gate in self.gates],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"


def as_json(value: Any) -> Any:
    """Plain JSON: of a dataclass its fields, and its properties, which are the figures derived from them.

    Of a path only its end is told, since reports are for strangers.
    """
    if is_dataclass(value):
        derived = inspect.getmembers(type(value), lambda each: isinstance(each, property))
        names = [*(each.name for each in fields(value)), *(name for name, _ in derived)]
        return {name: as_json(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(name): as_json(each) for name, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return as_json(sorted(value))
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    return value.name if isinstance(value, Path) else value


def from_json(kind: Any, value: Any) -> Any:
    """The value of type `kind` that `as_json` wrote. What it does not know is left out.

    Raises TypeError, ValueError, KeyError or AttributeError when it is no such value.
    """
    arguments = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        inner = next(each for each in arguments if each is not NoneType)
        return None if value is None else from_json(inner, value)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: from_json(hints[name], each) for name, each in value.items() if name in hints})  # type: ignore[operator]
    if get_origin(kind) is dict:
        return {arguments[0](name): from_json(arguments[1], each) for name, each in value.items()}
    if get_origin(kind) in (list, tuple):
        return get_origin(kind)(from_json(arguments[0], each) for each in value)
    return kind(value) if isinstance(kind, type) and issubclass(kind, Enum) else value


def check_file(what: str, path: Path | None, suffix: str) -> None:
    """Refuse a report, a picture or a page that could not be written, before any time is spent.

    Raises ConfigError.
    """
    if path is None:
        return
    if path.suffix != suffix:
        raise ConfigError(f"the {what} must be named *{suffix}, got {path}")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"the {what} needs an existing directory to be written in, got {path}")


def write_file(what: str, path: Path, content: str | bytes) -> None:
    """Write a whole file or none: what stood there before stays until the new one is complete.

    Raises ConfigError when the place cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content if isinstance(content, bytes) else content.encode())
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write the {what} at {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def read_report(path: Path) -> Report:
    """The report that a benchmark wrote, in this version or an earlier one. Raises ConfigError."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {error}") from error
    if not isinstance(told, dict) or not {"schema_version", "kind", "results"} <= told.keys():
        raise ConfigError("not a report")
    if told["schema_version"] not in range(1, SCHEMA_VERSION + 1):
        raise ConfigError(f"schema version {told['schema_version']} is later than {SCHEMA_VERSION}")
    try:
        gates = tuple(Gate(**gate) for gate in told["gates"])
        return Report(**{each.name: told[each.name] for each in fields(Report)} | {"gates": gates})
    except (KeyError, TypeError) as error:
        raise ConfigError(f"a report that is not whole: {error}") from error


@dataclass(frozen=True)
class Collection:
    """Reports by the names of their files, and which JSON files are none, with the reason."""

    reports: dict[str, Report]
    passed_over: dict[str, str]


def collect(directory: Path) -> Collection:
    """All reports in a directory and below. Raises ConfigError when there is none."""
    if not directory.is_dir():
        raise ConfigError(f"reports are looked for in a directory, got {directory}")
    found = Collection({}, {})
    for path in sorted(directory.rglob("*.json")):
        inside = path.relative_to(directory)
        if any(part.startswith(".") for part in inside.parts):
            continue  # somebody's half-written file
        name = inside.with_suffix("").as_posix()
        try:
            found.reports[name] = read_report(path)
        except ConfigError as error:
            found.passed_over[name] = str(error)
    if not found.reports:
        others = "".join(f"; {name}: {why}" for name, why in found.passed_over.items())
        raise ConfigError(f"there is no report in {directory}{others}")
    return found
