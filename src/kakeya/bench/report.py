"""The report every benchmark leaves: one JSON file and one HTML page, each replaced atomically."""

import json
import os
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kakeya.bench.gates import Gate, exit_status
from kakeya.errors import ConfigError

SCHEMA_VERSION = 1


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
        return exit_status(self.gates)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": self.kind,
            "partial": self.partial,
            "started_at": self.started_at,
            "finished_at": self.finished_at,
            "config": self.config,
            "machine": self.machine,
            "results": self.results,
            "gates": [gate.to_dict() for gate in self.gates],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"


def write_picture(path: Path, svg: str) -> None:
    """Write an SVG file. Raises ConfigError when the place cannot be written."""
    _write("picture", path, svg)


def write_page(path: Path, page: str) -> None:
    """Write an HTML file. Raises ConfigError when the place cannot be written."""
    _write("page", path, page)


def _write(what: str, path: Path, text: str) -> None:
    try:
        _replace(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write the {what} at {path}: {error}") from error


def check_output(path: Path) -> None:
    """Refuse a report path that could not be written, before any time is spent. Raises ConfigError."""
    if path.suffix != ".json":
        raise ConfigError(f"the report must be named *.json (its page goes beside it as *.html), got {path}")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"the report needs an existing directory to be written in, got {path}")


def check_picture(path: Path | None) -> None:
    """Refuse a picture that could not be written, before any time is spent. Raises ConfigError."""
    if path is None:
        return
    if path.suffix != ".svg":
        raise ConfigError(f"the picture must be named *.svg, got {path}")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"the picture needs an existing directory to be written in, got {path}")


def write_report(path: Path, report: Report, page: str) -> Path:
    """Write the JSON to `path` and its page beside it; returns the page's path.

    A reader never sees half a file, and what stood there before stays until the new one is complete.
    Raises ConfigError when the place cannot be written.
    """
    page_path = path.with_suffix(".html")
    try:
        _replace(path, report.to_json())
        _replace(page_path, page)
    except OSError as error:
        raise ConfigError(f"cannot write the report at {path}: {error}") from error
    return page_path


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            # mkstemp makes files private; a report is as readable as any other file its owner makes.
            os.fchmod(file.fileno(), 0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
