"""Recall by distance: rows, gates and how it looks."""

from typing import Any

import pytest

from kakeya.bench.quality_recall_page import recall_sections, recall_table
from kakeya.bench.quality_recall_results import (
    BOUNDED,
    FULL,
    PINNED,
    Trial,
    recall_gates,
    recall_of,
    recall_rows,
)


def tried(distance: int, right: int, wrong: int) -> list[Trial]:
    return [Trial(distance, "12345", " 12345.")] * right + [Trial(distance, "12345", " 54321.")] * wrong


def results(full: int, bounded: int) -> dict[str, Any]:
    """Ten trials near, of which so many were right, and ten far."""
    rows = [
        *recall_rows(FULL, tried(100, full, 10 - full) + tried(900, full, 10 - full), reach=5000),
        *recall_rows(BOUNDED, tried(100, bounded, 10 - bounded) + tried(900, 0, 10), reach=500),
        *recall_rows(PINNED, tried(900, 7, 3), reach=500),
    ]
    return {"rows": rows, "bounded": "4 + 1,020"}


@pytest.mark.parametrize(
    ("answer", "right"),
    [(" 12345.", True), ("it is 12345", True), (" 1234", False), (" 12 345", False), ("", False)],
)
def test_an_answer_is_right_when_the_number_is_in_it(answer: str, right: bool) -> None:
    assert Trial(1, "12345", answer).is_right is right


def test_trials_are_counted_by_distance() -> None:
    near, far = recall_rows(BOUNDED, tried(100, 3, 1) + tried(900, 0, 2), reach=100)
    assert (near["distance"], near["right"], near["trials"], near["recall"]) == (100, 3, 4, 0.75)
    assert (far["right"], far["trials"]) == (0, 2)
    assert (near["within_window"], far["within_window"]) == (True, False)
    assert near["answers"][3] == {"key": "12345", "answer": " 54321."}


def test_recall_is_over_all_trials_of_some_distances() -> None:
    rows = results(8, 6)["rows"]
    assert recall_of(rows, BOUNDED, [100, 900]) == 0.3
    assert recall_of(rows, BOUNDED, [100]) == 0.6
    assert recall_of(rows, PINNED, [100]) is None


@pytest.mark.parametrize(
    ("full", "bounded", "passed"), [(9, 9, True), (9, 7, True), (9, 6, False), (5, 10, True), (4, 4, None)]
)
def test_only_what_is_lost_within_the_window_is_judged(full: int, bounded: int, passed: bool | None) -> None:
    (gate,) = recall_gates(results(full, bounded))
    assert gate.passed is passed
    if passed is None:
        assert "full attention itself recalls 0.40" in gate.reason


def test_nothing_within_the_window_is_not_judged() -> None:
    rows = [row for row in results(9, 9)["rows"] if row["distance"] == 900]
    (gate,) = recall_gates({"rows": rows})
    assert gate.passed is None
    assert "no distance within the window" in gate.reason


def test_table_and_plot_have_every_memory_and_distance() -> None:
    shown = results(8, 6)
    table = recall_table(shown)
    assert table.columns[1:] == ("100", "900")
    assert table.rows == [
        ("full", "8/10", "8/10"),
        ("4 + 1,020", "6/10", "0/10"),
        ("4 + 1,020, number pinned", "–", "7/10"),
    ]
    (section,) = recall_sections(shown)
    assert section.charts[0].count("<circle") == 5
    assert "4 + 1,020, number pinned, 900: 0.7 right" in section.charts[0]


def test_a_memory_that_was_not_tried_yet_is_not_shown() -> None:
    shown = results(8, 6)
    partial = shown | {"rows": [row for row in shown["rows"] if row["memory"] == FULL]}
    assert [row[0] for row in recall_table(partial).rows] == ["full"]
