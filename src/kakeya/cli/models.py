"""`kakeya models`: what can be fetched by name, what is here, and what this machine runs, and how fast."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kakeya.cli.console import Screen, human_bytes
from kakeya.config import EngineConfig
from kakeya.options import Json

if TYPE_CHECKING:
    from kakeya.models.catalogue import CatalogueEntry, ModelListing
    from kakeya.models.speed import MeasuredMatmul

_NO_LIMIT = 10_000
_UNKNOWN = "-"

Fits = Annotated[
    bool, typer.Option("--fits", help="Measure this machine for a second: what runs, at about what speed.")
]


def register(app: typer.Typer) -> None:
    app.command("models", help="List the models known by name and those fetched.")(models)


def models(fits: Fits = False, as_json: Json = False) -> None:
    """List the catalogue and the cache."""
    from kakeya.models import catalogue

    screen, listings = Screen(), catalogue.list_models()
    facts = [_facts(listing) for listing in listings]
    machine = _look_at_machine() if fits else None
    if machine is not None:
        facts = [fact | machine.fit(listing.entry) for fact, listing in zip(facts, listings, strict=True)]
    if as_json:
        screen.line(json.dumps(facts))
        return
    _print(screen, _table(facts) if machine is None else _fits_table(facts))
    if machine is not None:
        for line in machine.footnotes():
            screen.line(line)


@dataclass(frozen=True)
class Machine:
    """What this machine has for a model: free memory, and a matmul whose speed was measured."""

    free: int
    matmul: "MeasuredMatmul | None"

    def fit(self, entry: "CatalogueEntry | None") -> dict[str, Any]:
        """Whether the model fits and how fast it would be; None where that is not known."""
        fits = decode = prompt = None
        if entry is not None:
            fits = entry.memory_need(EngineConfig()).total <= self.free
        if entry is not None and self.matmul is not None:
            decode = round(self.matmul.decode_tokens_per_s(entry.geometry, entry.size), 1)
            prompt = round(self.matmul.prompt_tokens_per_s(entry.geometry), 1)
        return {
            "fits": fits,
            "free_bytes": self.free,
            "decode_tokens_per_s": decode,
            "prompt_tokens_per_s": prompt,
            "estimated_from": None if self.matmul is None else asdict(self.matmul),
        }

    def footnotes(self) -> Iterator[str]:
        """What the figures are and where they come from."""
        yield ""
        yield (
            f"needs: weights, one session of {EngineConfig().cache.capacity:,} tokens and the process; "
            f"{human_bytes(self.free)} are free"
        )
        if self.matmul is None:
            yield "no speeds: the native kernels were not built, and theirs is the matmul that is measured"
            return
        read, multiplied = self.matmul.weight_bytes_per_s, self.matmul.multiply_adds_per_s
        yield (
            f"speeds are estimates for one session with a short history on the CPU, from a matmul by 4-bit "
            f"weights measured now: {human_bytes(read)} of weights a second for one row, "
            f"{multiplied / 1e9:,.0f} billion multiply-adds a second for a prompt "
            f"({self.matmul.isa}, {self.matmul.threads} threads)"
        )


def _look_at_machine() -> Machine:
    from kakeya.models.fitting import available_memory
    from kakeya.models.speed import measure

    return Machine(available_memory(), measure())


def _facts(listing: "ModelListing") -> dict[str, Any]:
    needs = None if listing.entry is None else listing.entry.memory_need(EngineConfig()).total
    return {
        "name": listing.name,
        "description": listing.description,
        "licence": listing.licence,
        "size": listing.size,
        "needs_bytes": needs,
        "fetched": listing.path is not None,
        "path": None if listing.path is None else str(listing.path),
    }


def _table(facts: Sequence[dict[str, Any]]) -> Table:
    table = _columns(facts, "here", "size", "needs", "licence", "good for")
    for fact in facts:
        size, needs = _bytes(fact["size"]), _bytes(fact["needs_bytes"])
        table.add_row(fact["name"], _yes(fact["fetched"]), size, needs, fact["licence"], fact["description"])
    return table


def _fits_table(facts: Sequence[dict[str, Any]]) -> Table:
    table = _columns(facts, "here", "needs", "fits", "tokens/s", "prompt tokens/s")
    for fact in facts:
        speeds = [
            _about(fact[key] if fact["fits"] else None)
            for key in ("decode_tokens_per_s", "prompt_tokens_per_s")
        ]
        table.add_row(
            fact["name"], _yes(fact["fetched"]), _bytes(fact["needs_bytes"]), _yes(fact["fits"]), *speeds
        )
    return table


def _columns(facts: Sequence[dict[str, Any]], *headers: str) -> Table:
    table = Table(box=None, pad_edge=False)
    # A name that is cut short is of no use to anybody.
    table.add_column("name", no_wrap=True, min_width=max(len(fact["name"]) for fact in facts))
    for header in headers:
        table.add_column(header)
    return table


def _yes(value: bool | None) -> str:
    return _UNKNOWN if value is None else "yes" if value else "no"


def _bytes(size: int | None) -> str:
    return _UNKNOWN if size is None else human_bytes(size)


def _about(rate: float | None) -> str:
    if rate is None:
        return _UNKNOWN
    return f"~{rate:,.0f}" if rate >= 10 else f"~{rate:.1f}"


def _print(screen: Screen, table: Table) -> None:
    # In a pipe there is no screen to fit: one line per model, whatever its length.
    if not screen.out.is_terminal:
        screen.out.width = _NO_LIMIT
    screen.out.print(table, soft_wrap=False)
