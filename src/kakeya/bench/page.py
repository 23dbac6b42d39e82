"""One self-contained HTML page for a report: no script, no font, no request to anywhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from kakeya.bench.chart import HEIGHT, WIDTH
from kakeya.bench.gates import Gate
from kakeya.bench.report import Report


@dataclass(frozen=True)
class Table:
    """A heading and rows of text; columns after the first `labels` ones hold numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int = 1


@dataclass(frozen=True)
class Section:
    """A part of the page: a table, the charts drawn from the same numbers, or both."""

    table: Table
    charts: Sequence[str] = ()


def render_page(title: str, report: Report, sections: Iterable[Section]) -> str:
    """The whole page as text."""
    return document(title, [f"<h1>{escape(title)}</h1>", *report_parts(report, sections)])


def report_parts(report: Report, sections: Iterable[Section]) -> list[str]:
    """A report as pieces of HTML, without a heading of its own."""
    return [
        *(f'<p class="meta">{escape(line)}</p>' for line in _meta(report)),
        *_gates(report.gates),
        *(part for section in sections for part in _section(section)),
        *table_parts(Table("Settings", ("setting", "value"), _flat(report.config), labels=2)),
        *table_parts(Table("Machine", ("fact", "value"), _flat(report.machine), labels=2)),
    ]


def document(title: str, body: Iterable[str]) -> str:
    """A page that holds these pieces of HTML."""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>',
            f"<style>\n{_style()}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def picture(chart: str) -> str:
    """A chart of the page as an SVG file of its own, for a README."""
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">'
    ground = '<rect width="100%" height="100%" style="fill: var(--page)"/>'
    style = f"<style>\n{_style()}svg {{ margin: 0; height: 100%; }}\n</style>"
    return f"{opening}\n{style}\n{ground}\n{chart}\n</svg>\n"


def _style() -> str:
    return files("kakeya.bench").joinpath("data", "page.css").read_text(encoding="utf-8")


def _meta(report: Report) -> list[str]:
    ended = f"finished {report.finished_at}" if report.finished_at else "unfinished: a partial checkpoint"
    return [f"started {report.started_at}, {ended}", f"{report.machine['cpu']}, {report.machine['os']}"]


def _gates(gates: Sequence[Gate]) -> list[str]:
    rows = [
        f'<tr><td>{escape(gate.name)}</td><td class="{gate.verdict.split()[-1]}">{gate.verdict}</td>'
        f"<td>{escape(gate.reason)}</td></tr>"
        for gate in gates
    ]
    header = '<h2>Gates</h2>\n<div class="scroll"><table><tr><th>gate</th><th>verdict</th><th>why</th></tr>'
    return [header, *rows, "</table></div>"] if rows else []


def _section(section: Section) -> list[str]:
    return [*table_parts(section.table), *section.charts]


def table_parts(table: Table) -> list[str]:
    """A table under its heading, as pieces of HTML."""
    return [
        f"<h2>{escape(table.title)}</h2>",
        f'<div class="scroll"><table><tr>{_cells("th", table.columns, table.labels)}</tr>',
        *(f"<tr>{_cells('td', row, table.labels)}</tr>" for row in table.rows),
        "</table></div>",
    ]


def _cells(tag: str, texts: Sequence[str], labels: int) -> str:
    opening = [f"<{tag}>" if place < labels else f'<{tag} class="number">' for place in range(len(texts))]
    return "".join(f"{start}{escape(text)}</{tag}>" for start, text in zip(opening, texts, strict=True))


def _flat(facts: dict[str, object], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", str(value)))
    return rows
