"""Presets: benchmark runs under a name, with everything decided. A manifest, a TOML file, lists them.

One manifest comes with the package. Others can add to it, and none can change what a name stands for.
"""

import math
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from kakeya.bench.registry import KINDS
from kakeya.errors import ConfigError, PresetNotFound

# Names become names of files, words of a command line and log lines: nothing in them can mean anything there.
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
LONGEST_NAME = 64
LONGEST_LIMIT_S = 7 * 24 * 3600
MOST_ARGUMENTS = 64
LONGEST_TEXT = 1000
LARGEST_MANIFEST = 2**20
_KEYS = frozenset({"proves", "benchmark", "arguments", "limit_s"})


@dataclass(frozen=True)
class Preset:
    """One run. `benchmark` is the verb, and the kind of its report; after `limit_s` seconds it is ended."""

    name: str
    proves: str
    benchmark: str
    arguments: tuple[str, ...]
    limit_s: float

    @property
    def command(self) -> str:
        """What a person would type for it."""
        return shlex.join(("kakeya", "bench", self.benchmark, *self.arguments))


def is_name(text: str) -> bool:
    """Whether a preset could be called so."""
    return len(text) <= LONGEST_NAME and NAME.fullmatch(text) is not None


def read_presets(manifests: Sequence[Path] = ()) -> dict[str, Preset]:
    """The package's presets and those of these files, by name.

    Raises ConfigError for a file that cannot be read, for anything in it that is not a preset, and for a name
    that is taken.
    """
    packaged = files("kakeya.bench") / "data" / "presets.toml"
    found = _presets("the package", packaged.read_text(encoding="utf-8"))
    for path in manifests:
        for name, preset in _presets(str(path), _content(path)).items():
            if name in found:
                raise ConfigError(f"{path}: there is a preset {name!r} already: choose another name")
            found[name] = preset
    return found


def preset_named(presets: Mapping[str, Preset], name: str) -> Preset:
    """Raises PresetNotFound, which lists those that are there."""
    found = presets.get(name)
    if found is None:
        shown = ascii(name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…")
        raise PresetNotFound(f"there is no preset {shown}; there are: {', '.join(presets)}")
    return found


def _content(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_MANIFEST + 1)
        if len(content) > LARGEST_MANIFEST:
            raise ConfigError(f"the manifest {path} is larger than {LARGEST_MANIFEST:,} bytes")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the manifest {path} cannot be read: {error}") from error


def _presets(where: str, text: str) -> dict[str, Preset]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the manifest of {where} is not TOML: {error}") from error
    return {name: _preset(f"{where}: preset {name!a}", name, table) for name, table in tables.items()}


def _preset(where: str, name: str, table: Any) -> Preset:
    if not is_name(name):
        raise ConfigError(
            f"{where}: a name has lower-case letters a to z, digits and single hyphens between them, "
            f"and at most {LONGEST_NAME} characters"
        )
    if not isinstance(table, dict) or table.keys() != _KEYS:
        raise ConfigError(f"{where}: a preset is a table with {', '.join(sorted(_KEYS))}, and nothing else")
    if table["benchmark"] not in KINDS:
        raise ConfigError(f"{where}: benchmark must be one of {', '.join(KINDS)}, got {table['benchmark']!r}")
    arguments = table["arguments"]
    if not isinstance(arguments, list) or len(arguments) > MOST_ARGUMENTS:
        raise ConfigError(f"{where}: arguments must be a list of at most {MOST_ARGUMENTS} texts")
    return Preset(
        name,
        _text(where, "proves", table["proves"]),
        table["benchmark"],
        tuple(_text(where, "each of the arguments", argument) for argument in arguments),
        _limit(where, table["limit_s"]),
    )


def _text(where: str, what: str, value: Any) -> str:
    """No control characters, which a terminal or a log would obey."""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_TEXT or not value.isprintable():
        raise ConfigError(
            f"{where}: {what} must be a text of 1 to {LONGEST_TEXT:,} printable characters, got {value!a:.80}"
        )
    return value


def _limit(where: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not 0 < value <= LONGEST_LIMIT_S:
        raise ConfigError(
            f"{where}: limit_s must be above 0 and at most {LONGEST_LIMIT_S:,} seconds, got {value!r}"
        )
    return float(value)
