"""One self-contained HTML page for one report or many: no script, no font, no request to anywhere."""

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from kakeya.bench.chart import draw, style
from kakeya.bench.report import Collection, Gate, Report
from kakeya.bench.tables import Chart, Table, listing

Shown = Sequence[Table | Chart]

COLLECTION_TITLE = "Benchmark reports"


def report_page(title: str, report: Report, shown: Shown) -> str:
    """The page of one report."""
    return document(title, [f"<h1>{escape(title)}</h1>", *_report_parts(report, shown)])


def collection_page(collection: Collection, shown: dict[str, Shown]) -> str:
    """The overview and then every report in full; `shown` has the tables and charts of each."""
    names = enumerate(collection.reports)
    links = " · ".join(f'<a href="#report-{number}">{escape(name)}</a>' for number, name in names)
    body = [f"<h1>{COLLECTION_TITLE}</h1>", f'<p class="meta">{links}</p>', *_table(overview(collection))]
    if collection.passed_over:
        others = list(collection.passed_over.items())
        body += _table(listing("Files that are no reports", ("file", "why"), others))
    for number, (name, report) in enumerate(collection.reports.items()):
        body.append(f'<hr>\n<h1 id="report-{number}">{escape(name)}</h1>')
        body += _report_parts(report, shown[name])
    return document(COLLECTION_TITLE, body)


def overview(collection: Collection) -> Table:
    """One line for each report."""
    headings = ("report", "kind", "model", "finished", "passed", "failed", "not judged", "failed gates")
    rows = [(name, *_overview(report)) for name, report in collection.reports.items()]
    return listing(f"{len(rows)} reports", headings, rows, labels=4)


def _overview(report: Report) -> Sequence[str]:
    verdicts = Counter(gate.passed for gate in report.gates)
    finished = (report.finished_at or "partial").partition("T")[0]
    counts = [str(verdicts[passed]) for passed in (True, False, None)]
    failed = ", ".join(gate.name for gate in report.gates if gate.passed is False)
    return report.kind, model_of(report.config), finished, *counts, failed or "–"


def model_of(config: dict[str, Any]) -> str:
    """The model's name: in the settings, in what the server says, or in one of the parts."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    names = (part.get(name) for part in parts for name in ("model", "model_id"))
    return next((str(name) for name in names if name), "–")


def document(title: str, body: Iterable[str]) -> str:
    """A page that holds these pieces of HTML."""
    opening = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    head = f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return "\n".join([opening, head, f"<style>\n{style()}</style></head><body>", *body, "</body></html>\n"])


def _report_parts(report: Report, shown: Shown) -> list[str]:
    """A report as pieces of HTML, without a heading of its own."""
    ended = f"finished {report.finished_at}" if report.finished_at else "unfinished: a partial checkpoint"
    machine = f"{report.machine.get('cpu')}, {report.machine.get('os')}"
    return [
        f'<p class="meta">started {report.started_at}, {ended}</p>',
        f'<p class="meta">{escape(machine)}</p>',
        *_gates(report.gates),
        *(part for each in shown for part in ([draw(each)] if isinstance(each, Chart) else _table(each))),
        *_table(listing("Settings", ("setting", "value"), flat(report.config))),
        *_table(listing("Machine", ("fact", "value"), flat(report.machine))),
    ]


def _gates(gates: Sequence[Gate]) -> list[str]:
    rows = [
        f'<tr><td>{escape(gate.name)}</td><td class="{gate.verdict.split()[-1]}">{gate.verdict}</td>'
        f"<td>{escape(gate.reason)}</td></tr>"
        for gate in gates
    ]
    header = '<h2>Gates</h2>\n<div class="scroll"><table><tr><th>gate</th><th>verdict</th><th>why</th></tr>'
    return [header, *rows, "</table></div>"] if rows else []


def _table(table: Table) -> list[str]:
    return [
        f"<h2>{escape(table.title)}</h2>",
        f'<div class="scroll"><table><tr>{_cells("th", table.headings, table.labels)}</tr>',
        *(f"<tr>{_cells('td', row, table.labels)}</tr>" for row in table.cells),
        "</table></div>",
    ]


def _cells(tag: str, texts: Sequence[str], labels: int) -> str:
    opening = [f"<{tag}>" if place < labels else f'<{tag} class="number">' for place in range(len(texts))]
    return "".join(f"{start}{escape(text)}</{tag}>" for start, text in zip(opening, texts, strict=True))


def flat(facts: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Facts within facts, each with its whole name."""
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            rows += flat(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", str(value)))
    return rows
