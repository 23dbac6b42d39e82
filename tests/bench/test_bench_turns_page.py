"""How turns look: the table, the logarithmic plot and the marks of those who stopped."""

import re
from xml.etree import ElementTree

import pytest

from kakeya.bench.chart import BOTTOM, HEIGHT, TOP, Series
from kakeya.bench.http_session_page import http_session_page, http_session_picture, http_session_table
from kakeya.bench.http_session_results import http_session_results
from kakeya.bench.report import Report, now
from kakeya.bench.turns_chart import MOST_LINES, LogCurve, latency_curve
from kakeya.bench.turns_page import over_turns, turns_page, turns_picture, turns_sections, turns_table
from kakeya.bench.turns_results import LLAMA, MATCHED, RESPONSES, UNMATCHED, Answered, Turn, turns_results


def said(number: int, latency_s: float, ttft_s: float | None = 0.1) -> Turn:
    return Turn(number, float(number), Answered(latency_s, ttft_s, 20 * number, 5, 20 * number - 15))


STOP = Turn(13, 13.0, None, "Refused", "the <context> is full", stopped=True)
TURNS = {
    RESPONSES: [said(number, 0.25) for number in range(1, 25)],
    LLAMA: [*(said(number, 0.5 + 0.1 * number, None) for number in range(1, 13)), STOP],
}
RESULTS = {
    "contestants": turns_results(TURNS, 100),
    "software": {RESPONSES: {"library": "kakeya 1"}, LLAMA: {"library": "x 2", "context": 260}},
}
MACHINE = {"cpu": "any", "os": "any"}


def curve_of(*values: float | None) -> LogCurve:
    return LogCurve(
        title="t", unit="s", x_title="x", series=[Series("a", values)], at=list(range(len(values)))
    )


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((0.25, 11.0), [0.2, 0.5, 1, 2, 5, 10, 20]),
        ((1.0, None, 1.0), [1, 2]),
        ((0.5, 5.0), [0.5, 1, 2, 5]),
        ((0.002, 300.0), [0.002, 0.01, 0.1, 1, 10, 100, 500]),
        ((None,), [1, 2]),
        ((0.0, 0.5), [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]),
    ],
)
def test_lines_of_the_grid_are_round_and_few(values: tuple[float | None, ...], ticks: list[float]) -> None:
    chart = curve_of(*values)
    assert chart.ticks == ticks
    assert len(ticks) <= MOST_LINES


def test_every_factor_is_equally_high() -> None:
    chart = curve_of(0.1, 10.0)
    assert chart.y(0.1) == HEIGHT - BOTTOM
    assert chart.y(10.0) == TOP
    assert chart.y(1.0) == pytest.approx((TOP + HEIGHT - BOTTOM) / 2)
    assert chart.y(0.0) == chart.y(0.1)


def test_the_grid_is_labelled_where_its_lines_are() -> None:
    drawn = latency_curve("t", [1.0, 2.0], [Series("a", [0.25, 11.0])], {})
    assert re.findall(r'text-anchor="end">([\d.]+)<', drawn) == ["0.2", "0.5", "1", "2", "5", "10", "20"]


def test_who_stopped_is_marked_where_it_stopped() -> None:
    drawn = ElementTree.fromstring(turns_picture(RESULTS))
    circles = [each for each in drawn.iter() if each.tag.endswith("circle")]
    assert [each.get("class") for each in circles] == ["s1"]
    texts = {each.text: each for each in drawn.iter() if each.tag.endswith("text")}
    assert "stopped at turn 13" in texts
    assert texts["stopped at turn 13"].get("text-anchor") is None


def test_words_near_the_edge_turn_back() -> None:
    drawn = latency_curve("t", [1.0, 10.0], [Series("a", [1.0, 2.0])], {"a": "ended"})
    assert 'text-anchor="end">ended</text>' in drawn
    unsaid = latency_curve("t", [1.0], [Series("a", [None])], {"a": "ended"})
    assert "ended" not in unsaid


def test_each_contestant_has_a_value_or_none_at_each_turn() -> None:
    at, series = over_turns(RESULTS["contestants"], lambda turn: turn["latency_s"])
    assert at == [float(number) for number in range(1, 25)]
    assert series[1].values[11:] == [pytest.approx(1.7), *[None] * 12]
    assert over_turns([], lambda turn: 0.0) == ([], [])


def test_the_table_has_both_ends_of_everybody() -> None:
    rows = turns_table(RESULTS["contestants"]).rows
    assert rows[0] == (RESPONSES, "24", "250", "250", "1.00", "100", "15 / 15", "485", "5.0", "1.00", "well")
    assert rows[1][0] == LLAMA
    assert rows[1][5] == "–"
    assert rows[1][-1] == "stopped at turn 13"
    broken = [*TURNS[RESPONSES], Turn(25, 1.0, None, "RemoteError", "once", stopped=False)]
    assert turns_table(turns_results({RESPONSES: broken}, 100)).rows[0][-1] == "1 errors"


def test_the_page_says_who_took_part_and_what_went_wrong() -> None:
    page = turns_page(Report("turns", {}, MACHINE, RESULTS, finished_at=now()))
    assert "<td>library x 2, context 260</td>" in page
    assert "<td>Refused: the &lt;context&gt; is full</td>" in page
    assert 'aria-label="Latency per turn"' in page
    assert 'aria-label="Prompt tokens computed per turn"' in page
    well = {"contestants": turns_results({RESPONSES: TURNS[RESPONSES]}, 100), "software": {}}
    assert [section.table.title for section in turns_sections(well)][1:] == ["Who took part"]


def test_a_report_without_turns_can_be_shown() -> None:
    empty = {"contestants": turns_results({RESPONSES: []}, 100), "software": {}}
    ElementTree.fromstring(turns_picture(empty))
    assert turns_table(empty["contestants"]).rows[0][1:3] == ("0", "–")


def test_http_sessions_are_shown_side_by_side() -> None:
    turns = {MATCHED: TURNS[RESPONSES], UNMATCHED: TURNS[LLAMA]}
    results = http_session_results(turns, 30.0, 8, 100)
    table = http_session_table({**results, "bystanders_share": 0.012})
    assert table.columns == ("what", MATCHED, UNMATCHED, "ratio")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["turns, and errors"] == ("24, 0", "12, 1", "")
    assert rows["latency p50, ms"] == ("250", "1,150", "4.60x")
    assert rows["first token p50, ms"] == ("100", "–", "–")
    assert rows["last over first"] == ("1.00", "1.71", "")
    assert rows["share of the machine that others used"] == ("1.2%", "1.2%", "")
    assert http_session_table(results).rows[-1][1:] == ("–", "–", "")
    page = http_session_page(Report("http-session", {}, MACHINE, results, finished_at=now()))
    assert "the &lt;context&gt; is full" in page
    ElementTree.fromstring(http_session_picture(results))
    well = http_session_results({MATCHED: TURNS[RESPONSES], UNMATCHED: TURNS[RESPONSES]}, 30.0, 8, 100)
    assert "went wrong" not in http_session_page(Report("http-session", {}, MACHINE, well))
