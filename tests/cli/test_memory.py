"""The arithmetic of memory: budgets, and how many sessions they hold."""

from collections.abc import Callable

import pytest

from kakeya.cli.memory import MOST_BY_DEFAULT, Budget, fitting_capacity
from kakeya.errors import ConfigError


@pytest.mark.parametrize(
    "text, expected",
    [
        ("1000000", 10**6), ("8GB", 8 * 10**9), ("1.5 MB", 1_500_000), ("512MiB", 2**29),
        ("2gib", 2**31), ("25%", 2_500_000_000), ("100 %", 10**10), ("64 kB", 64_000),
    ],
)  # fmt: skip
def test_a_budget_is_bytes_or_a_share(text: str, expected: int) -> None:
    assert Budget.parse(text).bytes_of(10**10) == expected


def capacity(
    asked: int | None,
    budget: str,
    available: int = 10**9,
    bytes_per_token: int = 1000,
    beside: Callable[[int], int] = lambda sessions: 0,
) -> int:
    return fitting_capacity(
        asked,
        Budget.parse(budget),
        bytes_per_token=bytes_per_token,
        slots=1000,
        available=available,
        beside=beside,
    )


def test_capacity_is_what_the_budget_holds() -> None:
    assert capacity(None, "50%") == 500
    assert capacity(None, "20MB") == 20
    assert capacity(7, "20MB") == 7
    assert capacity(20, "20MB") == 20
    assert capacity(None, "50%", bytes_per_token=1) == MOST_BY_DEFAULT
    assert capacity(5000, "50%", bytes_per_token=1) == 5000


def test_shared_prefixes_take_their_part_of_the_budget() -> None:
    assert capacity(None, "90MB", beside=lambda sessions: sessions * 10**6 // 8) == 80
    assert capacity(None, "90MB", beside=lambda sessions: 10 * 10**6) == 80
    with pytest.raises(ConfigError, match=r"81 sessions = 81.0 MB, beside 10.0 MB for shared"):
        capacity(81, "90MB", beside=lambda sessions: 10 * 10**6)
    with pytest.raises(ConfigError, match="room for 0"):
        capacity(None, "90MB", beside=lambda sessions: 100 * 10**6)


def test_more_than_fits_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError) as refused:
        capacity(600, "50%")
    assert str(refused.value) == (
        "capacity 600 does not fit: 1,000 bytes per token x 1,000 slots = 1,000,000 bytes per session, "
        "x 600 sessions = 600.0 MB, beside 0 bytes for shared prefixes, recall and a proposer, "
        "and the memory budget is 500.0 MB (50% of 1.0 GB free): room for 500. "
        "Lower --capacity or --window, or raise --memory-budget"
    )
    with pytest.raises(ConfigError, match="capacity 1 does not fit.*room for 0"):
        capacity(None, "10kB")
    with pytest.raises(ConfigError, match="a memory budget of 2.0 GB is more than the 1.0 GB free"):
        capacity(1, "2GB")
