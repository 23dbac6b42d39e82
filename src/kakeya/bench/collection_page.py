"""One page over many reports, and their pictures. Pure.

What each kind of report looks like is said where it is measured; here is only which is which.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from kakeya.bench.capacity_page import capacity_picture, capacity_sections
from kakeya.bench.collection import Collection, Found
from kakeya.bench.comparison_page import comparison_picture, comparison_sections
from kakeya.bench.engine_page import engine_sections, history_picture
from kakeya.bench.gates import Gate
from kakeya.bench.gpu_page import gpu_picture, gpu_sections
from kakeya.bench.http_session_page import http_session_picture, http_session_sections
from kakeya.bench.overhead_page import overhead_sections
from kakeya.bench.page import Section, Table, document, report_parts, table_parts
from kakeya.bench.quality_page import quality_picture, quality_sections
from kakeya.bench.session_page import session_picture, session_sections
from kakeya.bench.turns_page import turns_picture, turns_sections

TITLE = "Benchmark reports"

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """How a kind of report is shown: its tables with their plots, and the picture it has for a README."""

    sections: Callable[[Results], Sequence[Section]]
    picture: Callable[[Results], str] | None = None


KINDS = {
    "engine": Kind(engine_sections, history_picture),
    "gpu": Kind(gpu_sections, gpu_picture),
    "quality": Kind(quality_sections, quality_picture),
    "session": Kind(session_sections, session_picture),
    "capacity": Kind(capacity_sections, capacity_picture),
    "overhead": Kind(overhead_sections),
    "turns": Kind(turns_sections, turns_picture),
    "http-session": Kind(http_session_sections, http_session_picture),
    "peers": Kind(comparison_sections, comparison_picture),
}


def collection_page(collection: Collection) -> str:
    """The overview and then every report in full, as one HTML page."""
    body = [
        f"<h1>{escape(TITLE)}</h1>",
        _links(collection.reports),
        *table_parts(overview_table(collection)),
    ]
    if collection.passed_over:
        body += table_parts(passed_over_table(collection))
    for number, found in enumerate(collection.reports):
        body.append(f'<hr>\n<h1 id="report-{number}">{escape(found.name)}</h1>')
        body += report_parts(found.report, sections_of(found))
    return document(TITLE, body)


def _links(reports: Sequence[Found]) -> str:
    """The way down to each report."""
    links = [f'<a href="#report-{number}">{escape(found.name)}</a>' for number, found in enumerate(reports)]
    return f'<p class="meta">{" · ".join(links)}</p>'


def overview_table(collection: Collection) -> Table:
    """One line for each report."""
    columns = ("report", "kind", "model", "finished", "passed", "failed", "not judged", "failed gates")
    rows = [_overview(found) for found in collection.reports]
    return Table(f"{len(rows)} reports", columns, rows, labels=4)


def _overview(found: Found) -> tuple[str, ...]:
    report = found.report
    verdicts = Counter(gate.passed for gate in report.gates)
    return (
        found.name,
        report.kind,
        _model(report.config),
        (report.finished_at or "partial").partition("T")[0],
        *(str(verdicts[passed]) for passed in (True, False, None)),
        ", ".join(_failed(report.gates)) or "–",
    )


def _failed(gates: Sequence[Gate]) -> Iterator[str]:
    return (gate.name for gate in gates if gate.passed is False)


def _model(config: Mapping[str, Any]) -> str:
    """The model's name: in the settings, in what the server says, or in one of the parts."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    names = (part.get(name) for part in parts for name in ("model", "model_id"))
    return next((str(name) for name in names if name), "–")


def passed_over_table(collection: Collection) -> Table:
    rows = list(collection.passed_over.items())
    return Table("Files that are no reports", ("file", "why"), rows, labels=2)


def sections_of(found: Found) -> list[Section]:
    """A report's tables and plots; one that cannot be shown says so, and does not spoil the page."""
    kind = KINDS.get(found.report.kind)
    if kind is None:
        return [_unshown(f"there is no page for reports of kind {found.report.kind!r}")]
    try:
        return list(kind.sections(found.report.results))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        return [_unshown(f"its results are not of this version: {type(error).__name__} {error}")]


def _unshown(why: str) -> Section:
    return Section(Table("Not shown", ("why",), [(why,)]))


def pictures(collection: Collection) -> dict[str, str]:
    """An SVG file for each report that has a picture, by the report's name."""
    drawn = {}
    for found in collection.reports:
        kind = KINDS.get(found.report.kind)
        if kind is not None and kind.picture is not None:
            try:
                drawn[found.name] = kind.picture(found.report.results)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError):
                continue  # the page says so, or the part that would be drawn was not measured
    return drawn


def overview(collection: Collection) -> dict[str, Any]:
    """The same overview for scripts."""
    return {
        "reports": [
            {
                "name": found.name,
                "kind": found.report.kind,
                "model": _model(found.report.config),
                "partial": found.report.partial,
                "started_at": found.report.started_at,
                "finished_at": found.report.finished_at,
                "gates": [gate.to_dict() for gate in found.report.gates],
            }
            for found in collection.reports
        ],
        "passed_over": collection.passed_over,
    }
