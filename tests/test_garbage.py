"""What a start makes is not looked through by the collector: not while it is made, and not later."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from kakeya.garbage import uncollected


class Loop:
    """Garbage that only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Nothing is frozen while a test runs; what was, such as all tests that were collected, is so again."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    gc.enable()
    gc.unfreeze()
    if was_frozen:
        gc.freeze()


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def test_nothing_is_collected_inside_or_looked_through_later() -> None:
    before = collections()
    with uncollected():
        kept = [Loop() for _ in range(10 * gc.get_threshold()[0])]
        assert collections() == before
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(kept)
    dropped = weakref.ref(kept.pop())
    gc.collect()
    assert dropped() is not None
    gc.unfreeze()
    gc.collect()
    assert dropped() is None


def test_what_comes_later_is_collected() -> None:
    with uncollected():
        pass
    loop = Loop()
    dropped = weakref.ref(loop)
    del loop
    gc.collect()
    assert dropped() is None


def test_a_start_that_fails_leaves_everything_as_it_was() -> None:
    with pytest.raises(ValueError, match="no"), uncollected():
        raise ValueError("no")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()
