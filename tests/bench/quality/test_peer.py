"""The part peer: what it concludes and shows."""

import math

import pytest

from kakeya.bench.quality.peer import SCORED_NEEDED, PeerResults, PeerRow

UNSCORED = PeerRow.of("m.gguf", "Q4_K", [1000.0] * 450, [1.0] * 450)


def peer(ours: float, theirs: float, scored: int = SCORED_NEEDED) -> PeerRow:
    return PeerRow.of("m.gguf", "Q4_K", [math.log(ours)] * scored, [math.log(theirs)] * scored)


def test_the_error_is_that_of_the_ratio() -> None:
    uneven = PeerRow.of("m.gguf", "Q4_K", [1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 3.0, 3.0])
    assert uneven.standard_error == pytest.approx(math.sqrt(1 / 3) / 2)
    assert PeerRow.of("m.gguf", "Q4_K", [0.1], [0.1]).standard_error is None


@pytest.mark.parametrize(
    ("row", "passed", "reason"),
    [
        (peer(10.0, 10.0), True, ""),
        (peer(10.049, 10.0), True, ""),
        (peer(9.951, 10.0), True, ""),
        (peer(10.051, 10.0), False, ""),
        (peer(9.949, 10.0), False, ""),
        (peer(20.0, 10.0, SCORED_NEEDED - 1), None, "needs 450 scored tokens, got 449"),
        (UNSCORED, None, "a perplexity is no number"),
    ],
)
def test_either_direction_is_too_far_and_little_text_is_not_judged(
    row: PeerRow, passed: bool | None, reason: str
) -> None:
    (gate,) = PeerResults("l", "s", (row,)).gates()
    assert (gate.name, gate.passed) == ("m.gguf: perplexity apart from llama.cpp's", passed)
    assert reason in gate.reason


def test_the_table_has_a_line_for_each_file() -> None:
    (table,) = PeerResults("stand-in 1", "any", (peer(12.0, 10.0), UNSCORED)).show()
    assert table.title == "Perplexity beside stand-in 1"
    assert table.cells == [
        ["m.gguf", "Q4_K", "450", "12.0000", "10.0000", "1.20000", "0.00000"],
        ["m.gguf", "Q4_K", "450", "–", "2.7183", "–", "0.00000"],
    ]
