"""What `bench quality` concludes and shows: choices, long histories, recall, llama.cpp beside us."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kakeya.bench.quality.benchmark import QualityBench
from kakeya.bench.quality.results import (
    BOUNDED,
    BUCKET,
    DEFAULT,
    FAR_TOKENS,
    FULL,
    HIGHEST,
    PINNED,
    REFERENCE,
    SCORED_NEEDED,
    STRETCH_TOKENS,
    STRETCHES,
    Answer,
    Bucket,
    ChoiceRow,
    MemoryResults,
    PeerResults,
    QualityResults,
    RecallResults,
    RecallRow,
    Scores,
    Way,
    WayRow,
    all_choices,
    between,
    bucket_edges,
    choice_gates,
    far_stretches,
    fresh_row,
    memory_gate,
    peer_gate,
    peer_row,
    perplexity,
    recall_gate,
    show,
    thinned,
    way_row,
)
from kakeya.bench.registry import shown
from kakeya.bench.report import as_json, from_json, read_report
from kakeya.bench.tables import Chart, Table
from kakeya.types import DType, KernelChoice, WeightFormat

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
FULL_WAY, SLIDING, SINKS = Way(0, 300, full=True), Way(0, 64), Way(4, 1020)
REFUSED = ChoiceRow(DType.FLOAT32, WeightFormat.INT8, KernelChoice.TORCH, refused="no such kernel")


def tables(**results: Any) -> list[Table]:
    return [each for each in show(QualityResults(**results)) if isinstance(each, Table)]


def charts(**results: Any) -> list[Chart]:
    return [each for each in show(QualityResults(**results)) if isinstance(each, Chart)]


# Choices.


def chosen(positions: int = 4000, kl: float | None = 0.001, agreement: float | None = 0.99) -> ChoiceRow:
    scores = Scores(positions, kl, agreement, math.exp(3))
    return ChoiceRow(**vars(DEFAULT), held_as="int4", prompt=scores, decode=scores)


def test_every_combination_is_tried_once_but_the_reference() -> None:
    choices = all_choices()
    assert len(choices) == len(set(choices))
    assert REFERENCE not in choices
    assert choices[0] == DEFAULT
    assert len(choices) == 1 + len(DType) * len(WeightFormat) * 2 - 1  # two kinds of kernels


@pytest.mark.parametrize(
    ("rows", "passed"),
    [
        ([chosen()], True),
        ([chosen(kl=0.5, agreement=0.5)], False),
        ([chosen(positions=1999)], None),
        ([ChoiceRow(**vars(DEFAULT), refused="cannot")], None),
        ([], None),
    ],
)
def test_defaults_must_be_close_to_the_reference(rows: list[ChoiceRow], passed: bool | None) -> None:
    gates = choice_gates(rows)
    assert [gate.passed for gate in gates] == [passed, passed]
    if rows == [chosen(positions=1999)]:
        assert "1,999" in gates[0].reason


def test_choices_are_shown_with_the_reference_and_the_refusals() -> None:
    unscored = ChoiceRow(**vars(DEFAULT), held_as="int4", prompt=Scores(), decode=Scores())
    rows = (chosen(), REFUSED, unscored)
    [table] = tables(reference=Scores(2, 0.0, 1.0, math.e), choices=rows)
    first, default, refused, empty = table.cells
    assert first[:4] == ["float32", "float32", "torch", "the reference"]
    assert first[-1] == "2.718"
    assert default == ["bfloat16", "auto", "auto", "int4", "1.00e-03", "1.00e-03", "99.00%", "20.086"]
    assert refused[3:] == ["not here: no such kernel", "–", "–", "–", "–"]
    assert empty[4:] == ["–", "–", "–", "–"]
    [chart] = charts(reference=Scores(2), choices=(chosen(), REFUSED))
    assert (chart.at, [series.values for series in chart.series]) == (["auto"], [[0.001]] * 2)


# Memory.


def steady(tokens: int, nats: float = 2.0) -> list[float]:
    return [nats] * (tokens - 1)


def ways() -> tuple[WayRow, ...]:
    return (
        way_row(FULL_WAY, steady(300), 1.0, 2**20),
        way_row(SLIDING, steady(3000, 8.0), 2.0, 2**20),
        way_row(SINKS, steady(3000, 3.0), 2.0, 3 * 2**19),
    )


def test_ways_are_named_by_what_they_keep() -> None:
    assert [way.label() for way in (FULL_WAY, SLIDING, SINKS)] == ["full", "window 64", "4 + 1,020"]


@pytest.mark.parametrize("tokens", [0, 1, 128, 129, 3000, 10_000])
def test_buckets_cover_a_history_once(tokens: int) -> None:
    edges = bucket_edges(tokens)
    assert (edges[0], edges[-1]) == (0, tokens)
    assert all(0 < end - start <= BUCKET for start, end in pairwise(edges))
    assert bucket_edges(7000) == [0, 128, 256, 512, 1024, 2048, 4096, 6144, 7000]


def test_perplexity_is_the_exponential_of_the_mean() -> None:
    assert perplexity([1.0, 3.0]) == pytest.approx(math.e**2)
    assert perplexity([]) is None
    assert perplexity([math.inf]) is None
    assert perplexity([math.nan]) is None


def test_surprises_are_found_by_position() -> None:
    nats = [1.0, 2.0, 3.0]
    assert between(nats, 0, 3) == [1.0, 2.0]
    assert between(nats, 3, 9) == [3.0]
    assert between(nats, 5, 9) == []


def test_a_row_compares_the_end_with_the_beginning() -> None:
    nats = [5.0] * 1023 + [2.0] * 976 + [3.0] * 1000  # the window is full at 1,024
    row = way_row(SINKS, nats, 1.5, 77)
    assert (row.tokens, row.tokens_per_second, row.session_bytes) == (3000, 2000, 77)
    assert row.perplexity_early == pytest.approx(math.exp(2))
    assert row.perplexity_late == pytest.approx(math.exp(3))
    assert row.late_over_early == pytest.approx(math.e)
    assert row.perplexity_far is None
    assert row.perplexity == pytest.approx(math.exp(sum(nats) / 2999))
    assert [bucket.to for bucket in row.buckets] == [128, 256, 512, 1024, 2048, 3000]
    assert row.buckets[0].perplexity == pytest.approx(math.exp(5))


def test_past_a_hundred_thousand_only_what_lies_there_counts() -> None:
    nats = [1.0] * (FAR_TOKENS - 1) + [2.0] * 10
    assert way_row(SINKS, nats, 1.0, 1).perplexity_far == pytest.approx(math.exp(2))


@pytest.mark.parametrize("way", [FULL_WAY, Way(4, 5000)])
def test_a_window_that_never_filled_has_no_ends_to_compare(way: Way) -> None:
    row = way_row(way, steady(300), 1.0, 1)
    assert row.late_over_early is None
    assert row.perplexity_early is None


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
    streamed = [9.0] * 9 + [2.0] * 5 + [9.0] * 5 + [4.0] * 5  # positions 10 to 14 and 20 to 24
    row = fresh_row(SINKS, streamed, {10: [1.0] * 5, 20: [3.0] * 5}, size=5)
    assert row.perplexity_streamed == pytest.approx(math.exp(3))
    assert row.perplexity_fresh == pytest.approx(math.exp(2))
    assert row.streamed_over_fresh == pytest.approx(math.e)
    assert [piece.at for piece in row.stretches] == [10, 20]
    assert row.stretches[1].streamed == pytest.approx(math.exp(4))


@pytest.mark.parametrize(("over", "passed"), [(0.0, True), (0.0487, True), (0.06, False), (None, None)])
def test_a_long_session_must_predict_like_a_fresh_one(over: float | None, passed: bool | None) -> None:
    fresh = None if over is None else fresh_row(SINKS, steady(40, 2 + over), {10: [2.0] * 5}, size=5)
    gate = memory_gate(MemoryResults(ways(), 512, fresh))
    assert (gate.name, gate.passed) == ("perplexity_flat", passed)
    if passed is None:
        assert "100,256 tokens" in gate.reason


def test_neighbours_are_drawn_as_one_where_there_is_no_room() -> None:
    row = way_row(SINKS, steady(131_072), 1.0, 1)
    points = thinned(row.buckets)
    assert len(points) < len(row.buckets) / 2
    assert points[0][0] == 64
    assert points[-1][0] > 100_000
    assert all(value == pytest.approx(math.exp(2)) for _, value in points)


def test_neighbours_count_by_their_tokens() -> None:
    assert thinned([Bucket(10, math.exp(1)), Bucket(30, math.exp(4))], 2.0) == [
        (15.0, pytest.approx(math.exp(3)))
    ]
    assert thinned([Bucket(10, math.exp(1))]) == [(5.0, pytest.approx(math.e))]
    assert thinned([]) == []
    assert thinned([Bucket(10, None), Bucket(30, 1e9)]) == [
        (5.0, pytest.approx(HIGHEST)),
        (20.0, HIGHEST),
    ]


def test_the_table_has_every_way_and_the_fresh_sessions() -> None:
    fresh = fresh_row(SINKS, steady(40), {10: [2.0] * 5}, size=5)
    memory, again = tables(memory=MemoryResults(ways(), 512, fresh))
    assert memory.cells[0] == ["full", "1.0", "300", "300", "7.39", "–", "–", "–", "–"]
    assert memory.cells[2][:5] == ["4 + 1,020", "1.5", "3,000", "1,500", "20.09"]
    assert memory.cells[2][7] == "1.000"
    assert again.title == "1 stretches of 5 tokens far on, remembering 4 + 1,020"
    assert again.cells[2] == ["long over fresh", "1.0000"]
    assert len(tables(memory=MemoryResults(ways(), 512))) == 1


def test_the_picture_has_a_line_for_each_way_and_the_page_one_more_for_sinks() -> None:
    picture, sinks = charts(memory=MemoryResults(ways(), 512))
    assert picture.picture
    assert picture.mark == (512, "trained to 512")
    assert [series.name for series in picture.series] == ["full", "window 64", "4 + 1,020"]
    assert picture.series[0].values[-1] is None, "full attention stops early"
    assert [series.name for series in sinks.series] == ["4 + 1,020"]
    assert sinks.at[0] == 0.064
    assert len(charts(memory=MemoryResults(ways()[:2], 512))) == 1


# Recall.


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


@pytest.mark.parametrize(
    ("answer", "right"),
    [(" 12345.", True), ("it is 12345", True), (" 1234", False), (" 12 345", False), ("", False)],
)
def test_an_answer_is_right_when_the_number_is_in_it(answer: str, right: bool) -> None:
    assert Answer("12345", answer).is_right() is right


def test_recall_is_over_all_trials_of_some_distances() -> None:
    row = recalled(BOUNDED, 100, 3, 1)
    assert (row.right, row.trials, row.recall) == (3, 4, 0.75)
    results = recall(8, 6)
    assert results.share(BOUNDED, [100, 900]) == 0.3
    assert results.share(BOUNDED, [100]) == 0.6
    assert results.share(PINNED, [100]) is None


@pytest.mark.parametrize(
    ("full", "bounded", "passed"), [(9, 9, True), (9, 7, True), (9, 6, False), (5, 10, True), (4, 4, None)]
)
def test_only_what_is_lost_within_the_window_is_judged(full: int, bounded: int, passed: bool | None) -> None:
    gate = recall_gate(recall(full, bounded))
    assert gate.passed is passed
    if passed is None:
        assert "full attention itself recalls 0.40" in gate.reason


def test_nothing_within_the_window_is_not_judged() -> None:
    gate = recall_gate(RecallResults(tuple(row for row in recall(9, 9).rows if row.distance == 900)))
    assert gate.passed is None
    assert "no distance within the window" in gate.reason


def test_table_and_plot_have_every_memory_and_distance() -> None:
    results = recall(8, 6)
    [table], [chart] = tables(recall=results), charts(recall=results)
    assert table.headings[1:] == ["100", "900"]
    assert table.cells == [
        ["full", "8/10", "8/10"],
        ["4 + 1,020", "6/10", "0/10"],
        ["4 + 1,020, number pinned", "–", "7/10"],
    ]
    assert [series.values for series in chart.series] == [[0.8, 0.8], [0.6, 0.0], [None, 0.7]]
    [partial] = tables(recall=RecallResults(results.rows[:2], "4 + 1,020"))
    assert [row[0] for row in partial.cells] == ["full"], "what was not tried yet is not shown"


# Peer.


def peer(ours: float, theirs: float, scored: int = SCORED_NEEDED) -> Any:
    return peer_row("m.gguf", "Q4_K", [math.log(ours)] * scored, [math.log(theirs)] * scored)


def test_a_row_has_both_perplexities_and_the_error_of_their_ratio() -> None:
    row = peer(12.0, 10.0)
    assert (row.file, row.held_as, row.scored) == ("m.gguf", "Q4_K", SCORED_NEEDED)
    assert row.ours == pytest.approx(12.0)
    assert row.llama_cpp == pytest.approx(10.0)
    assert row.ours_over_llama_cpp == pytest.approx(1.2)
    uneven = peer_row("m.gguf", "Q4_K", [1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 3.0, 3.0])
    assert uneven.standard_error == pytest.approx(math.sqrt(1 / 3) / 2)
    assert peer_row("m.gguf", "Q4_K", [0.1], [0.1]).standard_error is None


@pytest.mark.parametrize(
    ("row", "passed", "reason"),
    [
        (peer(10.0, 10.0), True, ""),
        (peer(10.049, 10.0), True, ""),
        (peer(9.951, 10.0), True, ""),
        (peer(10.051, 10.0), False, ""),
        (peer(9.949, 10.0), False, ""),
        (peer(20.0, 10.0, SCORED_NEEDED - 1), None, "needs 450 scored tokens, got 449"),
        (peer_row("m.gguf", "Q4_K", [1000.0] * 450, [1.0] * 450), None, "a perplexity is no number"),
    ],
)
def test_either_direction_is_too_far_and_little_text_is_not_judged(
    row: Any, passed: bool | None, reason: str
) -> None:
    gate = peer_gate(row)
    assert gate.name == "m.gguf: perplexity apart from llama.cpp's"
    assert gate.passed is passed
    assert reason in gate.reason


def test_the_peers_table_has_a_line_for_each_file() -> None:
    unscored = peer_row("m.gguf", "Q4_K", [1000.0] * 450, [1.0] * 450)
    [table] = tables(peer=PeerResults("stand-in 1", "any", (peer(12.0, 10.0), unscored)))
    assert table.title == "Perplexity beside stand-in 1"
    assert table.cells[0] == ["m.gguf", "Q4_K", "450", "12.0000", "10.0000", "1.20000", "0.00000"]
    assert table.cells[1][3] == "–"


# Reports.


def test_results_survive_their_report() -> None:
    fresh = fresh_row(SINKS, steady(40), {10: [2.0] * 5}, size=5)
    results = QualityResults(
        reference=Scores(2, 0.0, 1.0, 3.0),
        choices=(chosen(), REFUSED),
        memory=MemoryResults(ways(), 512, fresh),
        recall=recall(9, 9),
        peer=PeerResults("stand-in 1", "any", (peer(12.0, 10.0),)),
    )
    assert from_json(QualityResults, as_json(results)) == results


@pytest.mark.parametrize(
    ("name", "titles"),
    [
        ("quality-cpu", ["Against float32 weights of the same file"]),
        ("quality-formats", ["Perplexity beside llama-cpp-python 0.3.36"]),
        ("quality-q2k", ["Perplexity beside llama-cpp-python 0.3.36"]),
        (
            "quality-memory",
            [
                "Perplexity; early: from a full window to 32,768 tokens",
                "24 stretches of 256 tokens far on, remembering 4 + 1,020",
                "Right answers",
            ],
        ),
    ],
)
def test_committed_evidence_is_shown_as_it_was_judged(name: str, titles: list[str]) -> None:
    report = read_report(EVIDENCE / f"{name}.json")
    assert [each.title for each in shown(report) if isinstance(each, Table)] == titles
    again = QualityBench().gates(from_json(QualityResults, report.results))
    assert {gate.name: gate for gate in again} == {gate.name: gate for gate in report.gates}
