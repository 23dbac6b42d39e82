"""What a benchmark shows, as data: tables of typed rows, and charts. Others draw them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

Of = str | Callable[[Any], object]

# Bytes and seconds times these.
MIB = 2**-20
MS = 1000


def figure(value: object, scale: float = 1, form: str = ",.0f") -> str:
    """A value as it stands in a table: numbers scaled and formatted, text as it is, – where there is none."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format(value * scale, form) if isinstance(value, (int, float)) else str(value)


def figures(*values: object, scale: float = 1, form: str = ",.0f") -> str:
    """Several of a kind in one cell."""
    return " / ".join(figure(value, scale, form) for value in values)


@dataclass(frozen=True)
class Column:
    """A heading, and what of a row stands below it: an attribute such as `latency.median`, or a function.

    Numbers are multiplied by `scale` and formatted by `form`; `unit` stands behind each.
    """

    title: str
    of: Of
    scale: float = 1
    form: str = ",.0f"
    unit: str = ""

    def cell(self, row: object) -> str:
        value = _value(row, self.of)
        return figure(value, self.scale, self.form) + ("" if value is None else self.unit)


def _value(row: object, of: Of) -> Any:
    """None as soon as one on the way is."""
    if not isinstance(of, str):
        return of(row)
    for name in of.split("."):
        row = None if row is None else getattr(row, name)
    return row


@dataclass(frozen=True)
class Table:
    """A heading and a line for each row; columns after the first `labels` ones hold numbers."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    labels: int = 1

    @property
    def headings(self) -> list[str]:
        return [column.title for column in self.columns]

    @property
    def cells(self) -> list[list[str]]:
        return [[column.cell(row) for column in self.columns] for row in self.rows]


def listing(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], labels: int | None = None
) -> Table:
    """A table whose rows are lists of cells; all of it text unless `labels` says otherwise."""
    columns = [Column(name, itemgetter(place)) for place, name in enumerate(headings)]
    return Table(title, columns, rows, len(columns) if labels is None else labels)


@dataclass(frozen=True)
class Series:
    """One line or one colour of bars; None where there is no measurement."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class Chart:
    """Values over places on the x axis: labels, or numbers, whose line is thinned where it has many points.

    An axis starts at zero unless it is logarithmic. `mark` names a number on the x axis; `ends` says in words
    how series stopped. The chart that is `picture` becomes the SVG file of the report.
    """

    title: str
    unit: str
    x_title: str
    at: Sequence[str] | Sequence[float]
    series: Sequence[Series]
    bars: bool = False
    log_x: bool = False
    log_y: bool = False
    mark: tuple[float, str] | None = None
    ends: Mapping[str, str] = field(default_factory=dict)
    picture: bool = False

    @property
    def numeric(self) -> bool:
        return not any(isinstance(place, str) for place in self.at)


def over(
    title: str,
    unit: str,
    x_title: str,
    at: Sequence[str] | Sequence[float],
    rows: Sequence[Any],
    series: Mapping[str, Of],
    scale: float = 1,
    **how: Any,
) -> Chart:
    """A chart with a line over the rows for each figure that `series` names; `how`: more of its fields."""

    def scaled(row: object, of: Of) -> float | None:
        value = _value(row, of)
        return None if value is None else value * scale

    lines = [Series(name, [scaled(row, of) for row in rows]) for name, of in series.items()]
    return Chart(title, unit, x_title, at, lines, **how)
