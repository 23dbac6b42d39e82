"""What `bench peers` concludes: our speed and our turns beside everybody else's, in one table. Pure."""

from collections.abc import Mapping
from typing import Any

from kakeya.bench.engine_results import median_of, row_label
from kakeya.bench.turns_results import LLAMA, RESPONSES, TRANSFORMERS

SPEED, LATENCY = "tokens/s", "ms"

Row = Mapping[str, Any]


def comparison_rows(engine: Row, turns: Row) -> list[dict[str, Any]]:
    """One row for each kind of work. `over` says how many times as fast we are as each of the others."""
    speeds = [_speed_row(row) for row in (*engine["prompt"], *engine["decode"])]
    return [*speeds, _turn_row("first", turns), _turn_row("last", turns), _together_row(turns)]


def _speed_row(row: Row) -> dict[str, Any]:
    ours, theirs = median_of(row), median_of(row, "peer_tokens_per_second")
    return _row(row_label(row), SPEED, ours, {LLAMA: theirs}, {LLAMA: row["ratio"]})


def _turn_row(end: str, turns: Row) -> dict[str, Any]:
    """Each at its own first or last turns, which need not be the same ones: not all last equally long."""
    latency = {name: _ms(total["latency"][end]) for name, total in _summaries(turns).items()}
    others = {name: latency.get(name) for name in (LLAMA, TRANSFORMERS)}
    return _row(f"a turn, {end} turns of each", LATENCY, latency.get(RESPONSES), others, {})


def _together_row(turns: Row) -> dict[str, Any]:
    """The last turns that both did, by the same history: the fair ratio."""
    totals = _summaries(turns)
    over = {name: totals[name]["times_ours_at_its_end"] for name in (LLAMA, TRANSFORMERS) if name in totals}
    return _row("a turn, the last ones that both did", LATENCY, None, {}, over)


def _row(work: str, unit: str, ours: float | None, others: Row, over: Row) -> dict[str, Any]:
    others = {name: others.get(name) for name in (LLAMA, TRANSFORMERS)}
    return {
        "work": work,
        "unit": unit,
        "ours": ours,
        **others,
        "over": {name: over.get(name) for name in (LLAMA, TRANSFORMERS)},
    }


def _summaries(turns: Row) -> dict[str, Row]:
    return {row["contestant"]: row["summary"] for row in turns["contestants"]}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
