"""`kakeya pull`: have a model on this machine."""

from typing import Annotated

import typer

from kakeya.cli.console import FetchBar, Screen
from kakeya.config import DEFAULT_MODEL


def register(app: typer.Typer) -> None:
    app.command("pull", help="Fetch a model, or check that it is here and whole.")(pull)


def pull(
    name: Annotated[str, typer.Argument(help="A catalogue name, a path, or a hub id.")] = DEFAULT_MODEL,
) -> None:
    """Fetch, check and say where the model is. The path alone goes to stdout, for scripts."""
    from kakeya.models import catalogue

    screen = Screen()
    with FetchBar(screen) as progress:
        path = catalogue.pull(name, progress)
    screen.line(str(path))
