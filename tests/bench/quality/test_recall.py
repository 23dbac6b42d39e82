"""The part recall: what it concludes and shows."""

import pytest

from kakeya.bench.quality.recall import BOUNDED, FULL, PINNED, Answer, RecallResults, RecallRow


def recalled(memory: str, distance: int, right: int, wrong: int, *, within: bool = False) -> RecallRow:
    answers = [Answer("12345", " 12345.")] * right + [Answer("12345", " 54321.")] * wrong
    return RecallRow(memory, distance, within, tuple(answers))


def recall(full: int, bounded: int) -> RecallResults:
    """Ten trials near, of which so many were right, and ten far."""
    rows = (
        recalled(FULL, 100, full, 10 - full, within=True),
        recalled(FULL, 900, full, 10 - full, within=True),
        recalled(BOUNDED, 100, bounded, 10 - bounded, within=True),
        recalled(BOUNDED, 900, 0, 10),
        recalled(PINNED, 900, 7, 3),
    )
    return RecallResults(rows, "4 + 1,020")


def test_an_answer_is_right_when_the_number_is_in_it() -> None:
    said = (" 12345.", "it is 12345", " 1234", " 12 345", "")
    row = RecallRow(FULL, 1, True, tuple(Answer("12345", each) for each in said))
    assert (row.right, row.trials, row.recall) == (2, 5, 0.4)
    results = recall(8, 6)
    assert [results.share(BOUNDED, at) for at in ([100, 900], [100])] == [0.3, 0.6]
    assert results.share(PINNED, [100]) is None


@pytest.mark.parametrize(
    ("full", "bounded", "passed"), [(9, 9, True), (9, 7, True), (9, 6, False), (5, 10, True), (4, 4, None)]
)
def test_only_what_is_lost_within_the_window_is_judged(full: int, bounded: int, passed: bool | None) -> None:
    (gate,) = recall(full, bounded).gates()
    assert (gate.name, gate.passed) == ("recall_lost_within_the_window", passed)
    assert ("full attention itself recalls 0.40" in gate.reason) is (passed is None)
    far = [row for row in recall(full, bounded).rows if row.distance == 900]
    (gate,) = RecallResults(tuple(far)).gates()
    assert gate.passed is None
    assert "no distance within the window" in gate.reason


def test_table_and_plot_have_every_memory_and_distance_that_was_tried() -> None:
    results = recall(8, 6)
    table, chart = results.show()
    assert table.headings[1:] == ["100", "900"]
    assert table.cells == [
        ["full", "8/10", "8/10"],
        ["4 + 1,020", "6/10", "0/10"],
        ["4 + 1,020, number pinned", "–", "7/10"],
    ]
    assert [series.values for series in chart.series] == [[0.8, 0.8], [0.6, 0.0], [None, 0.7]]
    partial, _ = RecallResults(results.rows[:2], "4 + 1,020").show()
    assert [row[0] for row in partial.cells] == ["full"]
