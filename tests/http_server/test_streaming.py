"""Several streams as one: everything in order, errors told once, nothing left running."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from kakeya.http_server.streaming import merged
from support.loops import on_a_loop


class Source:
    """Counts up, with a pause, and remembers whether it was closed."""

    def __init__(self, count: int, fails: bool = False) -> None:
        self._count = count
        self._fails = fails
        self.given = 0
        self.is_closed = False

    async def numbers(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self._count):
                await asyncio.sleep(0)
                self.given += 1
                yield number
            if self._fails:
                raise ValueError("broken")
        finally:
            self.is_closed = True


@pytest.mark.parametrize("counts", [[3], [3, 0, 5], [0], []])
@on_a_loop
async def test_every_source_comes_whole_and_in_order(counts: list[int]) -> None:
    items = [item async for item in merged([Source(count).numbers() for count in counts])]
    for number, count in enumerate(counts):
        assert [value for source, value in items if source == number] == list(range(count))


@pytest.mark.parametrize("others", [0, 2])
@on_a_loop
async def test_the_first_error_ends_all(others: int) -> None:
    sources = [Source(2, fails=True), *(Source(10**6) for _ in range(others))]
    with pytest.raises(ValueError, match="broken"):
        async for _ in merged([source.numbers() for source in sources]):
            pass
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
@on_a_loop
async def test_whoever_leaves_leaves_nothing_behind(count: int) -> None:
    sources = [Source(10**6) for _ in range(count)]
    stream = merged([source.numbers() for source in sources])
    async for number, value in stream:
        if value == 5 and number == 0:
            break
    await stream.aclose()
    assert all(source.is_closed for source in sources)
    assert len(asyncio.all_tasks()) == 1


@on_a_loop
async def test_a_slow_reader_slows_the_sources() -> None:
    sources = [Source(10**6) for _ in range(3)]
    stream = merged([source.numbers() for source in sources])
    await anext(stream)
    await asyncio.sleep(0.05)
    assert max(source.given for source in sources) <= 2
    await stream.aclose()
