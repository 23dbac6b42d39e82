"""`kakeya models`: what can be fetched by name, and what is here."""

import json
from dataclasses import asdict

import typer
from rich.table import Table

from kakeya.cli.console import Screen, human_bytes
from kakeya.cli.options import Json

_NO_LIMIT = 10_000


def register(app: typer.Typer) -> None:
    app.command("models", help="List the models known by name and those fetched.")(models)


def models(as_json: Json = False) -> None:
    """List the catalogue and the cache."""
    from kakeya.models import catalogue

    screen, listings = Screen(), catalogue.list_models()
    if as_json:
        screen.line(json.dumps([{**asdict(listing), "path": str(listing.path)} for listing in listings]))
        return
    table = Table("name", "here", "size", "licence", "what it is", box=None, pad_edge=False)
    for listing in listings:
        here = "yes" if listing.fetched else "no"
        table.add_row(listing.name, here, human_bytes(listing.size), listing.licence, listing.description)
    # In a pipe there is no screen to fit: one line per model, whatever its length.
    if not screen.out.is_terminal:
        screen.out.width = _NO_LIMIT
    screen.out.print(table, soft_wrap=False)
