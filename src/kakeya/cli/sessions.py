"""`kakeya sessions`: look at the sessions of a server, and move them between servers."""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Column, Table

from kakeya.cli.calling import CallOptions
from kakeya.cli.command import ENVIRONMENT_PREFIX, command_of
from kakeya.cli.console import Screen, human_bytes
from kakeya.errors import ConfigError
from kakeya.options import Json

if TYPE_CHECKING:
    from kakeya.client import Client, SessionInfo


def register(app: typer.Typer) -> None:
    verbs = typer.Typer(
        no_args_is_help=True, help="List, show, export, import and close sessions of a server."
    )
    verbs.command("list", help="List your sessions, oldest first.")(command_of(ListOptions, list_sessions))
    verbs.command("show", help="Show what a session holds.")(command_of(ShowOptions, show))
    verbs.command("export", help="Write a session to a file. It stays on the server.")(
        command_of(ExportOptions, export)
    )
    verbs.command("import", help="Make a new session from a file. Its id is printed.")(
        command_of(ImportOptions, import_session)
    )
    verbs.command("close", help="Close a session, and delete what is stored of it.")(
        command_of(SessionOptions, close)
    )
    app.add_typer(verbs, name="sessions")


@dataclass(frozen=True, kw_only=True)
class ServerOptions(CallOptions):
    """Which server to call, and how."""

    server: Annotated[
        str, typer.Option(help="HOST:PORT of the server.", envvar=f"{ENVIRONMENT_PREFIX}_SERVER")
    ] = "127.0.0.1:50051"

    def client(self) -> "Client":
        """Raises ConfigError for certificates that cannot be."""
        from kakeya.client import Client

        return Client(self.server, api_key=self.api_key, tls=self.tls())


@dataclass(frozen=True, kw_only=True)
class ListOptions(ServerOptions):
    """How sessions are listed."""

    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class SessionOptions(ServerOptions):
    """Which session."""

    session: Annotated[str, typer.Argument(help="The session's id.", metavar="ID")]


@dataclass(frozen=True, kw_only=True)
class ShowOptions(SessionOptions):
    """Which session, and how it is shown."""

    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class ExportOptions(SessionOptions):
    """Which session, and where it goes."""

    file: Annotated[Path, typer.Argument(help="Where to write it.")]


@dataclass(frozen=True, kw_only=True)
class ImportOptions(ServerOptions):
    """Where a session comes from."""

    file: Annotated[Path, typer.Argument(help="What `export` wrote.")]
    label: Annotated[str, typer.Option(help="The new session's label.")] = ""


def list_sessions(context: typer.Context, options: ListOptions) -> None:
    with options.client() as client:
        sessions = client.list_sessions()
    screen = Screen()
    if options.as_json:
        screen.line(json.dumps([asdict(each) for each in sessions]))
        return
    # An id is copied from here, so on a narrow terminal it is never cut.
    whole = Column(
        "session", no_wrap=True, min_width=max((len(each.session_id) for each in sessions), default=0)
    )
    table = Table(whole, "label", "state", "tokens", "KV", "idle", box=SIMPLE)
    for each in sessions:
        table.add_row(*_row(each))
    screen.out.print(table)


def show(context: typer.Context, options: ShowOptions) -> None:
    with options.client() as client:
        facts = asdict(client.session(options.session).info())
    screen = Screen()
    if options.as_json:
        screen.line(json.dumps(facts))
        return
    for name, value in facts.items():
        screen.line(f"{name.replace('_', ' '):<34}{_written(name, value)}")


def export(context: typer.Context, options: ExportOptions) -> None:
    with options.client() as client:
        contents = client.session(options.session).export()
    _with_file(options.file, lambda: _write(options.file, contents))
    Screen().notice(f"{human_bytes(len(contents))} written to {options.file}")


def import_session(context: typer.Context, options: ImportOptions) -> None:
    contents = _with_file(options.file, options.file.read_bytes)
    with options.client() as client:
        Screen().line(client.import_session(contents, label=options.label).session_id)


def close(context: typer.Context, options: SessionOptions) -> None:
    with options.client() as client:
        length = client.session(options.session).close()
    Screen().notice(f"closed after {length:,} tokens" if length is not None else "closed")


def _with_file(file: Path, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except OSError as error:
        raise ConfigError(f"{file} cannot be used: {error}") from error


def _write(file: Path, contents: bytes) -> None:
    """All of it or nothing, in the place of what was there, and for nobody else to read: it is a talk."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(contents)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _row(each: "SessionInfo") -> list[str]:
    return [
        each.session_id,
        each.client_label,
        each.state,
        f"{each.history_length:,}",
        human_bytes(each.kv_live_bytes),
        f"{each.idle_seconds:,.0f} s",
    ]


def _written(name: str, value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return human_bytes(float(value)) if name.endswith("_bytes") and isinstance(value, int) else str(value)
