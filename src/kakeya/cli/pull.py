"""`kakeya pull`: have a model on this machine."""

from typing import Annotated

import typer

from kakeya.cli.console import FetchBar, Screen
from kakeya.config import DEFAULT_MODEL

_NAME = "A catalogue name, a path, or a hub id: org/name, org/name:Q4_K_M, org/name/file.gguf."


def register(app: typer.Typer) -> None:
    app.command(
        "pull", help="Fetch a model, or check that it is here and whole. A broken fetch is continued."
    )(pull)


def pull(name: Annotated[str, typer.Argument(help=_NAME)] = DEFAULT_MODEL) -> None:
    """Fetch, check and say where the model is. The path alone goes to stdout, for scripts."""
    from kakeya.models import catalogue

    screen = Screen()
    with FetchBar(screen) as progress:
        path = catalogue.pull(name, progress)
    if (quant := catalogue.quant_taken(name, path)) is not None:
        screen.notice(f"{name} is {quant} here; another quant is named as {name}:TAG")
    screen.line(str(path))
