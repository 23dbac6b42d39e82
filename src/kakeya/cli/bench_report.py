"""`kakeya bench report`: one page over whatever reports lie in a directory."""

import json
from pathlib import Path
from typing import Annotated

import typer

from kakeya.bench.report import write_page, write_picture
from kakeya.cli.bench_common import show_tables
from kakeya.cli.console import Screen
from kakeya.errors import ConfigError


def register(bench: typer.Typer) -> None:
    bench.command("report", help="One HTML page over the reports in a directory, and their pictures.")(report)


def report(
    directory: Annotated[Path, typer.Argument(help="Where the reports are, also further down.")],
    output: Annotated[Path, typer.Option(help="The page.")] = Path("bench-report.html"),
    pictures: Annotated[
        Path | None, typer.Option(help="Write each report's picture as SVG into this directory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the overview as JSON.")] = False,
) -> None:
    """Read, write the page, show the overview; exit 1 when a gate of any report failed."""
    _check(output, pictures)
    from kakeya.bench.collection import collected
    from kakeya.bench.collection_page import collection_page, overview, overview_table, pictures as drawn_of

    collection, screen = collected(directory), Screen()
    write_page(output, collection_page(collection))
    drawn = drawn_of(collection) if pictures is not None else {}
    for name, svg in drawn.items():
        assert pictures is not None
        write_picture(pictures / f"{name.replace('/', '-')}.svg", svg)
    if as_json:
        screen.line(json.dumps(overview(collection), indent=2))
    else:
        show_tables(screen, [overview_table(collection)])
    screen.notice(f"page: {output}" + (f", pictures: {len(drawn)} in {pictures}" if pictures else ""))
    raise typer.Exit(max(found.report.exit_status for found in collection.reports))


def _check(output: Path, pictures: Path | None) -> None:
    """Refuse places that could not be written. Raises ConfigError."""
    if output.suffix != ".html":
        raise ConfigError(f"the page must be named *.html, got {output}")
    if output.is_dir() or not output.parent.is_dir():
        raise ConfigError(f"the page needs an existing directory to be written in, got {output}")
    if pictures is not None and not pictures.is_dir():
        raise ConfigError(f"pictures need an existing directory to be written in, got {pictures}")
