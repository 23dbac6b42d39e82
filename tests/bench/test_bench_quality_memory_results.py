"""Perplexity by place in the history: buckets, ends, fresh sessions, gates and how it looks."""

import math
import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from kakeya.bench.chart import Series
from kakeya.bench.history_chart import HistoryCurve, history_curve
from kakeya.bench.quality_memory_page import (
    fresh_table,
    memory_picture,
    memory_sections,
    memory_table,
)
from kakeya.bench.quality_memory_results import (
    BUCKET,
    FAR_TOKENS,
    STRETCH_TOKENS,
    STRETCHES,
    Scored,
    Way,
    bucket_edges,
    far_stretches,
    fresh_row,
    memory_gates,
    perplexity,
    thinned,
    way_row,
)
from kakeya.bench.work import Work

FULL = Way(0, 300, full=True)
SLIDING = Way(0, 64)
SINKS = Way(4, 1020)


def steady(tokens: int, nats: float = 2.0) -> Scored:
    return Scored(1, [nats] * (tokens - 1))


def results(**changes: Any) -> dict[str, Any]:
    rows = [
        way_row(FULL, steady(300), 1.0, 2**20),
        way_row(SLIDING, steady(3000, 8.0), 2.0, 2**20),
        way_row(SINKS, steady(3000, 3.0), 2.0, 3 * 2**19),
    ]
    return {"ways": rows, "fresh": None, "trained_tokens": 512} | changes


def test_ways_are_named_by_what_they_keep() -> None:
    assert [way.label for way in (FULL, SLIDING, SINKS)] == ["full", "window 64", "4 + 1,020"]
    assert SINKS.kept == 1024


@pytest.mark.parametrize("tokens", [0, 1, 128, 129, 3000, 10_000])
def test_buckets_cover_a_history_once(tokens: int) -> None:
    edges = bucket_edges(tokens)
    assert edges[0] == 0
    assert edges[-1] == tokens
    assert all(0 < end - start <= BUCKET for start, end in pairwise(edges))


def test_buckets_double_and_then_stay() -> None:
    assert bucket_edges(7000) == [0, 128, 256, 512, 1024, 2048, 4096, 6144, 7000]


def test_perplexity_is_the_exponential_of_the_mean() -> None:
    assert perplexity([1.0, 3.0]) == pytest.approx(math.e**2)
    assert perplexity([]) is None
    assert perplexity([math.inf]) is None
    assert perplexity([math.nan]) is None


def test_surprises_are_found_by_position() -> None:
    scored = Scored(1, [1.0, 2.0, 3.0])
    assert scored.end == 4
    assert scored.between(0, 3) == [1.0, 2.0]
    assert scored.between(3, 9) == [3.0]
    assert scored.between(5, 9) == []
    assert scored.perplexity(2, 3) == pytest.approx(math.e**2)


def test_a_row_compares_the_end_with_the_beginning() -> None:
    surprises = [5.0] * 1023 + [2.0] * 976 + [3.0] * 1000  # the window is full at 1,024
    row = way_row(SINKS, Scored(1, surprises), 1.5, 77)
    assert row["tokens"] == 3000
    assert row["tokens_per_second"] == 2000
    assert row["session_bytes"] == 77
    assert row["perplexity_early"] == pytest.approx(math.exp(2))
    assert row["perplexity_late"] == pytest.approx(math.exp(3))
    assert row["late_over_early"] == pytest.approx(math.e)
    assert row["perplexity_far"] is None
    assert row["perplexity"] == pytest.approx(math.exp(sum(surprises) / 2999))
    assert [bucket["to"] for bucket in row["buckets"]] == [128, 256, 512, 1024, 2048, 3000]
    assert row["buckets"][0]["perplexity"] == pytest.approx(math.exp(5))


def test_past_a_hundred_thousand_only_what_lies_there_counts() -> None:
    surprises = [1.0] * (FAR_TOKENS - 1) + [2.0] * 10
    assert way_row(SINKS, Scored(1, surprises), 1.0, 1)["perplexity_far"] == pytest.approx(math.exp(2))


@pytest.mark.parametrize("way", [FULL, Way(4, 5000)])
def test_a_window_that_never_filled_has_no_ends_to_compare(way: Way) -> None:
    row = way_row(way, steady(300), 1.0, 1)
    assert row["late_over_early"] is None
    assert row["perplexity_early"] is None


@pytest.mark.parametrize("tokens", [FAR_TOKENS + 256, FAR_TOKENS + 1000, 131_072, 10**6])
def test_stretches_lie_far_on_and_apart(tokens: int) -> None:
    starts = far_stretches(tokens)
    assert 1 <= len(starts) <= STRETCHES
    assert starts[0] == FAR_TOKENS
    assert all(later - earlier >= STRETCH_TOKENS for earlier, later in pairwise(starts))
    assert starts[-1] + STRETCH_TOKENS <= tokens


def test_a_short_history_has_no_stretches() -> None:
    assert far_stretches(FAR_TOKENS + 255) == far_stretches(100) == []
    assert far_stretches(50, far=20, size=10) == [20, 30, 40]


def test_fresh_sessions_are_compared_on_the_same_tokens() -> None:
    streamed = Scored(1, [9.0] * 9 + [2.0] * 5 + [9.0] * 5 + [4.0] * 5)  # positions 10 to 14 and 20 to 24
    row = fresh_row(SINKS, streamed, {10: [1.0] * 5, 20: [3.0] * 5}, size=5)
    assert row["perplexity_streamed"] == pytest.approx(math.exp(3))
    assert row["perplexity_fresh"] == pytest.approx(math.exp(2))
    assert row["streamed_over_fresh"] == pytest.approx(math.e)
    assert [piece["from"] for piece in row["stretches"]] == [10, 20]
    assert row["stretches"][1]["streamed"] == pytest.approx(math.exp(4))


@pytest.mark.parametrize(("value", "passed"), [(1.0, True), (1.05, True), (1.06, False), (None, None)])
def test_a_long_session_must_predict_like_a_fresh_one(value: float | None, passed: bool | None) -> None:
    (gate,) = memory_gates(results(fresh={"streamed_over_fresh": value}))
    assert gate.name == "perplexity_flat"
    assert gate.passed is passed


def test_a_short_history_is_not_judged() -> None:
    (gate,) = memory_gates(results())
    assert gate.passed is None
    assert "100,256 tokens" in gate.reason


def test_neighbours_are_drawn_as_one_where_there_is_no_room() -> None:
    row = way_row(SINKS, steady(131_072), 1.0, 1)
    points = thinned(row["buckets"], 0.12)
    assert len(points) < len(row["buckets"]) / 2
    assert points[0][0] == 64
    assert points[-1][0] > 100_000
    assert all(value == pytest.approx(math.exp(2)) for _, value in points)


def test_neighbours_count_by_their_tokens() -> None:
    buckets = [
        {"from": 90, "to": 100, "perplexity": math.exp(1)},
        {"from": 100, "to": 120, "perplexity": math.exp(4)},
        {"from": 120, "to": 121, "perplexity": None},
    ]
    assert thinned(buckets, 0.2) == [(105.0, pytest.approx(math.exp(3)))]
    assert thinned(buckets[:1], 0.2) == [(95.0, pytest.approx(math.e))]
    assert thinned([], 0.2) == []
    rest = {"from": 121, "to": 124, "perplexity": math.exp(4)}
    assert thinned([*buckets, rest], 0.2) == [(107.0, pytest.approx(math.exp((10 + 20 * 4 + 3 * 4) / 33)))]


def polylines(svg: str) -> list[list[tuple[float, float]]]:
    lines = [line for line in ElementTree.fromstring(svg).iter() if line.tag.endswith("polyline")]
    return [[tuple(map(float, p.split(","))) for p in (line.get("points") or "").split()] for line in lines]


def curve_of(
    at: list[float], values: list[float | None], mark: tuple[float, str] | None = None
) -> HistoryCurve:
    return HistoryCurve(title="t", unit="u", x_title="x", series=[Series("a", values)], at=at, mark=mark)


def test_every_doubling_of_the_history_is_equally_wide() -> None:
    chart = curve_of([64, 131_072], [1.0, 2.0])
    assert chart.labels == ["128", "512", "2,048", "8,192", "32,768", "131,072"]
    widths = [chart.x(place + 1) - chart.x(place) for place in range(5)]
    assert widths == [pytest.approx(widths[0])] * 5
    (line,) = polylines(history_curve(chart))
    assert [x for x, _ in line] == [72.0, 600.0]


def test_a_mark_is_drawn_where_the_axis_has_its_place() -> None:
    assert "trained &lt;here&gt;" in history_curve(curve_of([64, 900], [1.0, 2.0], (512, "trained <here>")))
    assert "trained" not in history_curve(curve_of([64, 900], [1.0, 2.0], (8192, "trained")))


def test_a_history_without_values_is_still_a_chart() -> None:
    assert not re.search("nan|inf", history_curve(curve_of([], [])))
    assert not re.search("nan|inf", history_curve(curve_of([5.0], [None])))


def test_the_table_has_every_way() -> None:
    rows = memory_table(results()["ways"]).rows
    assert rows[0] == ("full", "1.0", "300", "300", "7.39", "–", "–", "–", "–")
    assert rows[2][0] == "4 + 1,020"
    assert rows[2][1:5] == ("1.5", "3,000", "1,500", "20.09")
    assert rows[2][7] == "1.000"


def test_fresh_sessions_are_shown_when_there_were_some() -> None:
    assert len(memory_sections(results())) == 1
    fresh = fresh_row(SINKS, steady(40), {10: [2.0] * 5}, size=5)
    _, section = memory_sections(results(fresh=fresh))
    assert section.table == fresh_table(fresh)
    assert section.table.rows[2] == ("long over fresh", "1.0000")
    assert section.table.title == "1 stretches of 5 tokens far on, remembering 4 + 1,020"


def test_the_picture_has_a_line_for_each_way_and_the_page_one_more_for_sinks() -> None:
    lines = polylines(memory_picture(results()))
    assert len(lines) == 3
    heights = [line[-1][1] for line in lines]
    assert heights[1] < heights[2] < heights[0]  # 8, 3 and 2 nats; y grows downwards
    assert lines[0][-1][0] < lines[1][-1][0]  # full attention stops early
    charts = memory_sections(results())[0].charts
    assert [len(polylines(chart)) for chart in charts] == [3, 1]
    assert len(memory_sections(results(ways=results()["ways"][:2]))[0].charts) == 1


def test_what_is_worse_than_guessing_is_drawn_at_the_edge() -> None:
    rows = [way_row(FULL, steady(300, nats), 1.0, 1) for nats in (3.0, 20.0)]
    lines = polylines(memory_picture(results(ways=[rows[0] | {"way": "good"}, rows[1]])))
    assert lines[1][0][1] == 40.0
    assert lines[0][0][1] > 100


def test_work_is_told_as_a_share_and_never_more_than_all() -> None:
    told: list[tuple[float, str]] = []
    work = Work(10, lambda share, label: told.append((share, label)))
    work.begin("a")
    work.advance(5)
    work.begin("b")
    work.advance(50)
    assert told == [(0.0, "a"), (0.5, "a"), (0.5, "b"), (1.0, "b")]
    Work(0, lambda share, label: told.append((share, label))).begin("nothing to do")
    assert told[-1] == (0.0, "nothing to do")
