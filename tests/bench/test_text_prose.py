from kakeya.bench.text import prose, stretch


def test_text_begins_again_when_it_ends() -> None:
    assert stretch([1, 2, 3], 0, 7) == [1, 2, 3, 1, 2, 3, 1]
    assert stretch([1, 2, 3], 5, 3) == [3, 1, 2]


def test_prose_is_long_plain_english() -> None:
    assert len(prose()) > 12_000
    assert prose().isascii()
