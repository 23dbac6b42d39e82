"""The ladder of shapes."""

from kakeya.engine.mlx.shapes import padded


def test_the_ladder_never_pads_by_more_than_half_and_stays_short() -> None:
    rungs = [padded(count) for count in range(1, 513)]
    assert all(count <= rung <= count * 1.5 for count, rung in enumerate(rungs, 1))
    assert sorted(set(rungs)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert padded(0) == 0
