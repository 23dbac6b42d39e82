"""The part memory: what it concludes and shows of long histories."""

import math
from itertools import pairwise

import pytest

from kakeya.bench.quality.memory import (
    BUCKET,
    FAR_TOKENS,
    HIGHEST,
    STRETCH_TOKENS,
    STRETCHES,
    Bucket,
    Fresh,
    MemoryResults,
    Way,
    WayRow,
    between,
    bucket_edges,
    far_stretches,
    thinned,
)
from kakeya.bench.quality.scoring import cut, perplexity

FULL, SLIDING, SINKS = Way(0, 300, full=True), Way(0, 64), Way(4, 1020)


def steady(tokens: int, nats: float = 2.0) -> list[float]:
    return [nats] * (tokens - 1)


WAYS = (
    WayRow.of(FULL, steady(300), 1.0, 2**20),
    WayRow.of(SLIDING, steady(3000, 8.0), 2.0, 2**20),
    WayRow.of(SINKS, steady(3000, 3.0), 2.0, 3 * 2**19),
)


def fresh(over: float) -> Fresh:
    return Fresh.of(SINKS, steady(40, 2 + over), {10: [2.0] * 5}, size=5)


def test_texts_and_surprises_are_cut_where_they_should() -> None:
    assert cut([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    nats = [1.0, 2.0, 3.0]
    assert [between(nats, *ends) for ends in ((0, 3), (3, 9), (5, 9))] == [[1.0, 2.0], [3.0], []]
    assert perplexity([1.0, 3.0]) == pytest.approx(math.e**2)
    assert perplexity([]) is perplexity([math.inf]) is perplexity([math.nan]) is None


@pytest.mark.parametrize("tokens", [0, 1, 128, 129, 3000, 10_000])
def test_buckets_cover_a_history_once(tokens: int) -> None:
    edges = bucket_edges(tokens)
    assert (edges[0], edges[-1]) == (0, tokens)
    assert all(0 < end - start <= BUCKET for start, end in pairwise(edges))
    assert bucket_edges(7000) == [0, 128, 256, 512, 1024, 2048, 4096, 6144, 7000]


def test_a_row_compares_the_end_with_the_beginning() -> None:
    nats = [5.0] * 1023 + [2.0] * 976 + [3.0] * 1000  # the window is full at 1,024
    row = WayRow.of(SINKS, nats, 1.5, 77)
    assert (row.way, row.tokens, row.tokens_per_second, row.session_bytes) == ("4 + 1,020", 3000, 2000, 77)
    assert row.perplexity_early == pytest.approx(math.exp(2))
    assert row.perplexity_late == pytest.approx(math.exp(3))
    assert row.late_over_early == pytest.approx(math.e)
    assert row.perplexity_far is None
    assert row.perplexity == pytest.approx(math.exp(sum(nats) / 2999))
    assert [bucket.to for bucket in row.buckets] == [128, 256, 512, 1024, 2048, 3000]
    assert row.buckets[0].perplexity == pytest.approx(math.exp(5))
    far = WayRow.of(SINKS, [1.0] * (FAR_TOKENS - 1) + [2.0] * 10, 1.0, 1)
    assert far.perplexity_far == pytest.approx(math.exp(2)), "only what lies past a hundred thousand"
    for never_filled in (FULL, Way(4, 5000)):
        row = WayRow.of(never_filled, steady(300), 1.0, 1)
        assert row.late_over_early is row.perplexity_early is None


@pytest.mark.parametrize("tokens", [FAR_TOKENS + 256, FAR_TOKENS + 1000, 131_072, 10**6])
def test_stretches_lie_far_on_and_apart(tokens: int) -> None:
    starts = far_stretches(tokens)
    assert 1 <= len(starts) <= STRETCHES
    assert starts[0] == FAR_TOKENS
    assert all(later - earlier >= STRETCH_TOKENS for earlier, later in pairwise(starts))
    assert starts[-1] + STRETCH_TOKENS <= tokens
    assert far_stretches(FAR_TOKENS + 255) == far_stretches(100) == []
    assert far_stretches(50, far=20, size=10) == [20, 30, 40]


def test_fresh_sessions_are_compared_on_the_same_tokens() -> None:
    streamed = [9.0] * 9 + [2.0] * 5 + [9.0] * 5 + [4.0] * 5  # positions 10 to 14 and 20 to 24
    row = Fresh.of(SINKS, streamed, {10: [1.0] * 5, 20: [3.0] * 5}, size=5)
    assert row.perplexity_streamed == pytest.approx(math.exp(3))
    assert row.perplexity_fresh == pytest.approx(math.exp(2))
    assert row.streamed_over_fresh == pytest.approx(math.e)
    assert [piece.at for piece in row.stretches] == [10, 20]
    assert row.stretches[1].streamed == pytest.approx(math.exp(4))


@pytest.mark.parametrize(("over", "passed"), [(0.0, True), (0.0487, True), (0.06, False), (None, None)])
def test_a_long_session_must_predict_like_a_fresh_one(over: float | None, passed: bool | None) -> None:
    (gate,) = MemoryResults(WAYS, 512, None if over is None else fresh(over)).gates()
    assert (gate.name, gate.passed) == ("perplexity_flat", passed)
    assert ("100,256 tokens" in gate.reason) is (passed is None)


def test_neighbours_are_drawn_as_one_where_there_is_no_room_and_count_by_their_tokens() -> None:
    row = WayRow.of(SINKS, steady(131_072), 1.0, 1)
    points = thinned(row.buckets)
    assert len(points) < len(row.buckets) / 2
    assert points[0][0] == 64
    assert points[-1][0] > 100_000
    assert all(value == pytest.approx(math.exp(2)) for _, value in points)
    buckets = [Bucket(10, math.exp(1)), Bucket(30, math.exp(4))]
    assert thinned(buckets, 2.0) == [(15.0, pytest.approx(math.exp(3)))]
    assert thinned(buckets[:1]) == [(5.0, pytest.approx(math.e))]
    assert thinned([]) == []
    capped = [(5.0, pytest.approx(HIGHEST)), (20.0, HIGHEST)]
    assert thinned([Bucket(10, None), Bucket(30, 1e9)]) == capped


def test_tables_and_pictures_have_every_way_and_the_fresh_sessions() -> None:
    ways, picture, sinks, again = MemoryResults(WAYS, 512, fresh(0.0)).show()
    assert ways.cells == [
        ["full", "1.0", "300", "300", "7.39", "–", "–", "–", "–"],
        ["window 64", "1.0", "3,000", "1,500", "2,980.96", "2,980.96", "2,980.96", "1.000", "–"],
        ["4 + 1,020", "1.5", "3,000", "1,500", "20.09", "20.09", "20.09", "1.000", "–"],
    ]
    assert again.title == "1 stretches of 5 tokens far on, remembering 4 + 1,020"
    assert again.cells == [["7.39", "7.39", "1.0000"]]
    assert (picture.picture, picture.mark) == (True, (512, "trained to 512"))
    assert [series.name for series in picture.series] == ["full", "window 64", "4 + 1,020"]
    assert picture.series[0].values[-1] is None, "full attention stops early"
    assert ([series.name for series in sinks.series], sinks.at[0]) == (["4 + 1,020"], 0.064)
    assert len(list(MemoryResults(WAYS[:2], 512).show())) == 2, "no sinks, and no far stretches"
