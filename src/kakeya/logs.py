"""Structured logs: one line per event, as text or as JSON, with session and request ids.

Every room logs through the standard library and passes its facts as `extra`. This module decides what is
written on a line. Token contents are never logged.
"""

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TextIO

_ROOT = "kakeya"
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class LogFormat(StrEnum):
    """Lines for people, or one JSON object per line."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least important line that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def configure(level: LogLevel, log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Send the package's log lines of `level` and above to `stream` (standard error unless given).

    Replaces what was set before.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else TextFormatter())
    logger = logging.getLogger(_ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO kakeya.sessions: generate ended session_id=… tokens=12`."""

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={_quoted(value)}" for name, value in _facts(record).items())
        line = f"{_time(record)} {record.levelname} {record.name}: {_one_line(record.getMessage())}{facts}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the event's facts, an exception."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


def _facts(record: logging.LogRecord) -> Mapping[str, Any]:
    """What was passed as `extra`; empty ids are left out."""
    return {name: value for name, value in record.__dict__.items() if _is_fact(name) and value != ""}


def _is_fact(name: str) -> bool:
    """Other packages mark every record of the process with private names, as Ray does."""
    return name not in _STANDARD and not name.startswith("_")


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _quoted(value: object) -> str:
    """A value that cannot be mistaken for another part of the line, whatever a client put into it."""
    text = str(value)
    is_plain = text.isprintable() and not any(character in text for character in ' "=\\')
    return text if is_plain else json.dumps(text)


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text, ensure_ascii=False)[1:-1]
