"""The table and the plots of `bench turns`, for the terminal and for the page. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kakeya.bench.chart import Series
from kakeya.bench.curve import curve
from kakeya.bench.page import Section, Table, picture, render_page
from kakeya.bench.report import Report
from kakeya.bench.turns_chart import latency_curve
from kakeya.bench.turns_results import ENDS

TITLE = "One conversation, turn by turn"

Row = Mapping[str, Any]


def turns_page(report: Report) -> str:
    """The report as one HTML page."""
    return render_page(TITLE, report, turns_sections(report.results))


def turns_picture(results: Row) -> str:
    """Latency of every turn by everybody, as an SVG file."""
    return picture(turns_curve(results["contestants"]))


def turns_sections(results: Row) -> list[Section]:
    """The table with its plots, who took part, and what went wrong."""
    rows = results["contestants"]
    charts = [turns_curve(rows), tokens_curve(rows)]
    sections = [Section(turns_table(rows), charts), Section(_software_table(results["software"]))]
    errors = error_rows(rows)
    return [*sections, Section(error_table(errors))] if errors else sections


def turns_table(rows: Sequence[Row]) -> Table:
    """One line for each contestant: the first turns beside the last ones."""
    columns = ("who", "turns", "first, ms", "last, ms", "last/first", "first token, ms",
               "computed, first / last", "history", "answer", "× ours", "ended")  # fmt: skip
    return Table(
        f"Latency, medians of the first and last {ENDS} turns", columns, [_cells(row) for row in rows]
    )


def _cells(row: Row) -> tuple[str, ...]:
    total = row["summary"]
    latency, computed = total["latency"], total["computed_tokens"]
    return (
        row["contestant"],
        f"{total['n_turns']:,}",
        _ms(latency["first"]),
        _ms(latency["last"]),
        _number(latency["last_over_first"], "{:.2f}"),
        _ms(total["ttft"]["last"]),
        f"{_number(computed['first'])} / {_number(computed['last'])}",
        _number(total["history_tokens"]),
        _number(total["mean_answer_tokens"], "{:.1f}"),
        _number(total["times_ours_at_its_end"], "{:.2f}"),
        _ending(total),
    )


def _ending(total: Row) -> str:
    if total["stopped"]:
        return f"stopped at turn {total['stopped']['turn']}"
    return f"{total['n_errors']} errors" if total["n_errors"] else "well"


def error_rows(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Contestant, turn and message of everything that went wrong."""
    return [
        (row["contestant"], f"{turn['turn']:,}", f"{turn['error_class']}: {turn['error_str']}")
        for row in rows
        for turn in row["turns"]
        if not turn["ok"]
    ]


def error_table(errors: Sequence[Sequence[str]]) -> Table:
    """The first errors; the JSON has them all."""
    return Table("What went wrong", ("who", "turn", "message"), errors[:20], labels=3)


def _software_table(software: Row) -> Table:
    rows = [
        (who, ", ".join(f"{name} {value}" for name, value in facts.items()))
        for who, facts in software.items()
    ]
    return Table("Who took part", ("who", "what"), rows, labels=2)


def turns_curve(rows: Sequence[Row]) -> str:
    """Latency over turns, one line each."""
    at, series = over_turns(rows, lambda turn: turn["latency_s"])
    stops = {row["contestant"]: row["summary"]["stopped"] for row in rows}
    ends = {name: f"stopped at turn {stop['turn']}" for name, stop in stops.items() if stop}
    return latency_curve("Latency per turn", at, series, ends)


def tokens_curve(rows: Sequence[Row]) -> str:
    """What had to be computed of the prompt, over turns, one line each."""
    at, series = over_turns(rows, lambda turn: turn["prompt_tokens"] - turn.get("cached_tokens", 0))
    return curve("Prompt tokens computed per turn", "tokens", "turn", at, series)


def over_turns(rows: Sequence[Row], of: Callable[[Row], float]) -> tuple[list[float], list[Series]]:
    """The turns' numbers, and for each contestant a value at each of them; None where it has none."""
    count = max((turn["turn"] for row in rows for turn in row["turns"]), default=0)
    series = []
    for row in rows:
        values = {turn["turn"]: of(turn) for turn in row["turns"] if turn["ok"]}
        series.append(Series(row["contestant"], [values.get(number) for number in range(1, count + 1)]))
    return [float(number) for number in range(1, count + 1)], series


def _ms(seconds: float | None) -> str:
    return _number(None if seconds is None else seconds * 1000, "{:,.0f}")


def _number(value: float | None, pattern: str = "{:,.0f}") -> str:
    return "–" if value is None else pattern.format(value)
