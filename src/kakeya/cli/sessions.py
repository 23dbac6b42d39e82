"""`kakeya sessions`: look at the sessions of a server, and move them between servers."""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Column, Table

from kakeya.cli.command import ENVIRONMENT_PREFIX
from kakeya.cli.console import Screen, human_bytes
from kakeya.errors import ConfigError
from kakeya.options import Json

if TYPE_CHECKING:
    from kakeya.client import Client, SessionInfo

SessionId = Annotated[str, typer.Argument(help="The session's id.", metavar="ID")]
ServerAddress = Annotated[
    str, typer.Option(help="HOST:PORT of the server.", envvar=f"{ENVIRONMENT_PREFIX}_SERVER")
]
ApiKey = Annotated[
    str | None,
    typer.Option(help="Whose sessions; the server's key for you.", envvar=f"{ENVIRONMENT_PREFIX}_API_KEY"),
]
TlsCa = Annotated[
    str | None, typer.Option(help="Call it over TLS: its authority, PEM, or `system`.", metavar="FILE")
]
_DEFAULT_SERVER = "127.0.0.1:50051"


def register(app: typer.Typer) -> None:
    verbs = typer.Typer(
        no_args_is_help=True, help="List, show, export, import and close sessions of a server."
    )
    verbs.command("list", help="List your sessions, oldest first.")(list_sessions)
    verbs.command("show", help="Show what a session holds.")(show)
    verbs.command("export", help="Write a session to a file. It stays on the server.")(export)
    verbs.command("import", help="Make a new session from a file. Its id is printed.")(import_session)
    verbs.command("close", help="Close a session, and delete what is stored of it.")(close)
    app.add_typer(verbs, name="sessions")


def list_sessions(
    server: ServerAddress = _DEFAULT_SERVER,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    as_json: Json = False,
) -> None:
    with _client(server, api_key, tls_ca) as client:
        sessions = client.list_sessions()
    screen = Screen()
    if as_json:
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


def show(
    session: SessionId,
    server: ServerAddress = _DEFAULT_SERVER,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    as_json: Json = False,
) -> None:
    with _client(server, api_key, tls_ca) as client:
        facts = asdict(client.session(session).info())
    screen = Screen()
    if as_json:
        screen.line(json.dumps(facts))
        return
    for name, value in facts.items():
        screen.line(f"{name.replace('_', ' '):<34}{_written(name, value)}")


def export(
    session: SessionId,
    file: Annotated[Path, typer.Argument(help="Where to write it.")],
    server: ServerAddress = _DEFAULT_SERVER,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
) -> None:
    with _client(server, api_key, tls_ca) as client:
        contents = client.session(session).export()
    _with_file(file, lambda: _write(file, contents))
    Screen().notice(f"{human_bytes(len(contents))} written to {file}")


def import_session(
    file: Annotated[Path, typer.Argument(help="What `export` wrote.")],
    label: Annotated[str, typer.Option(help="The new session's label.")] = "",
    server: ServerAddress = _DEFAULT_SERVER,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
) -> None:
    contents = _with_file(file, file.read_bytes)
    with _client(server, api_key, tls_ca) as client:
        Screen().line(client.import_session(contents, label=label).session_id)


def close(
    session: SessionId,
    server: ServerAddress = _DEFAULT_SERVER,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
) -> None:
    with _client(server, api_key, tls_ca) as client:
        length = client.session(session).close()
    Screen().notice(f"closed after {length:,} tokens" if length is not None else "closed")


def _client(server: str, api_key: str | None, tls_ca: str | None) -> "Client":
    from kakeya.client import TLS, Client

    tls = None if tls_ca is None else TLS(ca_file=None if tls_ca == "system" else tls_ca)
    return Client(server, api_key=api_key, tls=tls)


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
