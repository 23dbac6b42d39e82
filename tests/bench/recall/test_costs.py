from kakeya.bench.recall.costs import Spelled
from kakeya.engine.constraint import allows


def test_a_spelled_text_comes_token_by_token() -> None:
    spelled = Spelled([9, 0, 300])
    masks = spelled.masks([9, 0])
    assert [allows(mask, token) for mask, token in zip(masks, [9, 0, 300], strict=True)] == [True] * 3
    assert sum(bin(byte).count("1") for byte in masks[0]) == 1
    spelled.advance([9, 0])
    assert not spelled.is_complete
    spelled.advance([300])
    assert spelled.is_complete
    assert spelled.masks(()) == [b""]
