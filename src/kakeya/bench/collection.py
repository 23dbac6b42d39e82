"""Reads whatever reports lie in a directory, for `kakeya bench report`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kakeya.bench.gates import Gate
from kakeya.bench.report import SCHEMA_VERSION, Report
from kakeya.errors import ConfigError


@dataclass(frozen=True)
class Found:
    """A report and the name of its file, as seen from the directory and without its ending."""

    name: str
    report: Report


@dataclass(frozen=True)
class Collection:
    """Reports by the names of their files, and which JSON files are none, with the reason."""

    reports: tuple[Found, ...]
    passed_over: dict[str, str]


def collected(directory: Path) -> Collection:
    """All reports in a directory and below. Raises ConfigError when there is none."""
    if not directory.is_dir():
        raise ConfigError(f"reports are looked for in a directory, got {directory}")
    reports: list[Found] = []
    passed_over: dict[str, str] = {}
    for path, name in _json_files(directory):
        try:
            reports.append(Found(name, read_report(path)))
        except ConfigError as error:
            passed_over[name] = str(error)
    if not reports:
        others = "".join(f"; {name}: {why}" for name, why in passed_over.items())
        raise ConfigError(f"there is no report in {directory}{others}")
    return Collection(tuple(reports), passed_over)


def _json_files(directory: Path) -> Iterator[tuple[Path, str]]:
    """Hidden files are somebody's half-written ones."""
    for path in sorted(directory.rglob("*.json")):
        inside = path.relative_to(directory)
        if not any(part.startswith(".") for part in inside.parts):
            yield path, inside.with_suffix("").as_posix()


def read_report(path: Path) -> Report:
    """The report that a benchmark wrote. Raises ConfigError when the file is none, and says why."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {error}") from error
    if not isinstance(fields, dict) or not {"schema_version", "kind", "results"} <= fields.keys():
        raise ConfigError("not a report")
    if fields["schema_version"] != SCHEMA_VERSION:
        raise ConfigError(f"schema version {fields['schema_version']} is not {SCHEMA_VERSION}")
    try:
        return _report(fields)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"a report that is not whole: {error}") from error


def _report(fields: dict[str, Any]) -> Report:
    return Report(
        kind=str(fields["kind"]),
        config=dict(fields["config"]),
        machine=dict(fields["machine"]),
        results=dict(fields["results"]),
        gates=tuple(Gate(**gate) for gate in fields["gates"]),
        started_at=str(fields["started_at"]),
        finished_at=fields["finished_at"],
    )
