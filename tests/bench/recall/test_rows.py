import pytest

from kakeya.bench.recall.rows import Asked, Harm, RecallRow, Share, least_share, share_of


def test_a_share_has_wilsons_interval() -> None:
    share = Share(9, 10)
    assert (share.share, share.low, share.high) == (
        0.9,
        pytest.approx(0.5958, abs=1e-3),
        pytest.approx(0.9821, abs=1e-3),
    )
    assert str(share) == "9/10 (60% to 98%)"
    assert (Share(0, 10).low, Share(10, 10).high) == (0.0, 1.0)
    assert (Share(0, 0).low, Share(0, 0).high, str(Share(0, 0))) == (None, None, "–")


def test_a_row_tells_finding_and_answering_apart() -> None:
    asked = (
        Asked(True, True, "a"),
        Asked(True, False, "b"),
        Asked(False, True, "c"),
        Asked(None, False, "d"),
    )
    row = RecallRow("recall", "one fact", 1500, asked)
    assert (row.found, row.right_given_found, row.right) == (Share(2, 3), Share(1, 2), Share(2, 4))
    assert share_of([row, row], "recall", ["one fact"], "right") == 0.5
    assert share_of([row], "bounded", ["one fact"], "right") is None


def test_the_worst_distance_is_not_made_good_by_others() -> None:
    near = RecallRow("recall", "one fact", 1500, (Asked(True, True, "a"), Asked(True, False, "b")))
    far = RecallRow("recall", "one fact", 9000, (Asked(True, True, "a"),) * 20)
    assert share_of([near, far], "recall", ["one fact"], "right") == 21 / 22
    assert least_share([near, far], "recall", ["one fact"], "right") == 0.5
    assert least_share([near], "bounded", ["one fact"], "right") is None


def test_harm_is_a_ratio_of_perplexities() -> None:
    assert Harm(10, 2.0, 2.0).ratio == 1.0
    assert Harm(10, 2.1, 2.0).ratio == pytest.approx(1.105, abs=1e-3)
