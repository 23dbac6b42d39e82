"""One self-contained HTML page for one report or many: no script, no font, no request to anywhere."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kakeya.bench.chart import draw, style, templates
from kakeya.bench.report import Collection, Report
from kakeya.bench.tables import Chart, Table, listing

Shown = Sequence[Table | Chart]


def report_page(title: str, report: Report, shown: Shown) -> str:
    """The page of one report."""
    return _page(title, [_section("", report, shown)], [])


def collection_page(collection: Collection, shown: dict[str, Shown]) -> str:
    """The overview and then every report in full; `shown` has the tables and charts of each."""
    tables = [overview(collection)]
    if others := list(collection.passed_over.items()):
        tables.append(listing("Files that are no reports", ("file", "why"), others))
    sections = [_section(name, report, shown[name]) for name, report in collection.reports.items()]
    return _page("Benchmark reports", sections, tables)


def _page(title: str, sections: list[dict[str, Any]], overview: list[Table]) -> str:
    template = templates()["page.html"]
    page: str = template.render(title=title, style=style(), sections=sections, overview=overview)
    return page


def _section(name: str, report: Report, shown: Shown) -> dict[str, Any]:
    parts = [
        *(draw(each) if isinstance(each, Chart) else each for each in shown),
        listing("Settings", ("setting", "value"), flat(report.config)),
        listing("Machine", ("fact", "value"), flat(report.machine)),
    ]
    return {"name": name, "report": report, "parts": parts}


def overview(collection: Collection) -> Table:
    """One line for each report."""
    headings = ("report", "kind", "model", "finished", "passed", "failed", "not judged", "failed gates")
    rows = []
    for name, report in collection.reports.items():
        verdicts = Counter(gate.passed for gate in report.gates)
        finished = (report.finished_at or "partial").partition("T")[0]
        failed = ", ".join(gate.name for gate in report.gates if gate.passed is False)
        counts = (verdicts[True], verdicts[False], verdicts[None])
        rows.append((name, report.kind, model_of(report.config), finished, *counts, failed or "–"))
    return listing(f"{len(rows)} reports", headings, rows, labels=4)


def model_of(config: dict[str, Any]) -> str:
    """The model's name: in the settings, in what the server says, or in one of the parts."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    names = (part.get(name) for part in parts for name in ("model", "model_id"))
    return next((str(name) for name in names if name), "–")


def flat(facts: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Facts within facts, each with its whole name."""
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            rows += flat(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", str(value)))
    return rows
