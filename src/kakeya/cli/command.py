"""Verbs with many flags: a dataclass lists them once; flag, environment, file and listing follow from it."""

import inspect
import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import typer

from kakeya.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

ENVIRONMENT_PREFIX = "KAKEYA"
# Click's names for where a value came from, and ours.
_SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file", "DEFAULT": "default"}


def command_of(options: type[T], run: Callable[[typer.Context, T], None]) -> Callable[..., None]:
    """A function whose parameters are the fields of the dataclass `options`, as Typer wants to see them."""
    hints = get_type_hints(options, include_extras=True)

    def parameter(name: str, default: object, annotation: object) -> inspect.Parameter:
        default = inspect.Parameter.empty if default is MISSING else default
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    parameters = [
        parameter("context", MISSING, typer.Context),
        *(parameter(field.name, field.default, hints[field.name]) for field in fields(options)),
    ]

    def command(context: typer.Context, **given: Any) -> None:
        run(context, options(**given))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def read_file(context: typer.Context, path: Path | None) -> Path | None:
    """Take from a TOML file what neither a flag nor the environment sets.

    Raises ConfigError for a file that cannot be read and for a setting that does not exist.
    """
    if path is None:
        return None
    try:
        settings = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from error
    known = {parameter.name for parameter in context.command.params} - {"config", "print_config", "help"}
    for name in settings:
        if name.replace("-", "_") not in known:
            raise ConfigError(f"{path}: there is no setting {name!r}; they are named like the flags")
    context.default_map = {name.replace("-", "_"): _as_given(value) for name, value in settings.items()}
    return path


def _as_given(value: object) -> object:
    """The value as it would stand on the command line, so that the same parser checks it."""
    return [str(item) for item in value] if isinstance(value, list) else str(value)


def effective_settings(context: typer.Context, options: Any, hidden: frozenset[str]) -> Iterator[str]:
    """The settings as lines of TOML, each with where it came from. Values of `hidden` ones are not shown."""
    for field in fields(options):
        name, value = field.name.replace("_", "-"), getattr(options, field.name)
        source = context.get_parameter_source(field.name)
        origin = _SOURCES[source.name] if source is not None else "default"
        if value is None or value == []:
            yield f"# {name} is not set"
        elif field.name in hidden:
            yield f"# {name} is set by {origin}, and not shown"
        else:
            yield f"{name} = {_toml(value)}  # {origin}"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(str(value))
