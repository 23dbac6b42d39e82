"""The command line: one file per verb, imported when it is asked for; torch only when a model runs."""

import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

import kakeya
from kakeya.errors import ConfigError, KakeyaError

VERBS = (
    "pull",
    "models",
    "chat",
    "generate",
    "serve",
    "sessions",
    "propose",
    "train",
    "cluster",
    "bench",
    "bridge",
    "doctor",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `kakeya`. Exits 0, 1 with one line on stderr for what went wrong, or 2 for wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _prepare_process()
    try:
        build(given)(args=given, prog_name="kakeya")
    except KakeyaError as error:
        if os.environ.get("KAKEYA_DEBUG") == "1":
            raise
        sys.stderr.write(f"kakeya: {error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def build(arguments: Sequence[str]) -> typer.Typer:
    """The application with the verb that is wanted, or with all of them when help is."""
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(_common)
    wanted = [verb for verb in VERBS if verb in arguments[:1]] or VERBS
    for verb in wanted:
        import_module(f"kakeya.cli.{verb}").register(app)
    return app


def _common(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Kakeya: a session-bound, memory-bounded inference runtime for language models."""
    if version:
        typer.echo(f"kakeya {kakeya.__version__}")
        raise typer.Exit


def _prepare_process() -> None:
    """Make SIGTERM unwind like any exit, so that temporary files are removed; let odd bytes through.

    Bytes that are not UTF-8 reach the tokenizer as lone surrogates, and it refuses them by name. gRPC's core
    writes to stderr past all loggers, such as a line for each client on Node that hangs up. It looks once,
    while it is imported, how much to say.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
