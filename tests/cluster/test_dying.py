"""Homes as processes, one of which is killed: nothing told is lost, and the SDK sees a pause alone."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya.client import AsyncClient, AsyncSession
from kakeya.cluster.keeping import HomeProcess, Keeper
from kakeya.cluster.members import FENCED_STATUS, home_in, make_secret
from kakeya.cluster.registry import Registry
from kakeya.dialing import Retry
from kakeya.errors import ConfigError
from support.clustering import FrontHere, front_at
from support.untraced import untraced_environment

PATIENT = Retry(attempts=600, first_delay=0.05, longest_delay=0.2)


@pytest.fixture
def arguments(model: Path, tmp_path: Path) -> list[str]:
    return [
        "--shared", str(tmp_path), "--model", str(model), "--bind", "127.0.0.1:0", "--http", "127.0.0.1:0",
        "--capacity", "4", "--sink", "2", "--window", "30", "--numerics", "exact", "--threads", "1",
        "--log-level", "warning",
    ]  # fmt: skip


@pytest.fixture
def keeper(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    for name, value in untraced_environment().items():
        monkeypatch.setenv(name, value)
    registry, secret = Registry(), make_secret(tmp_path / "secret")
    keeper = Keeper([*arguments, "--name", "a", "--node", "n"], secret, registry.report).start()
    yield keeper
    keeper.stop(at_once=True)


@pytest.fixture
def front(keeper: Keeper, tmp_path: Path) -> Iterator[FrontHere]:
    assert keeper.home is not None
    secret = make_secret(tmp_path / "secret")

    async def ask_again() -> list[str]:
        return [] if keeper.home is None else [keeper.home.address]

    with front_at(secret, [keeper.home.address], ask_again, hold_s=60.0) as front:
        yield front


@pytest.mark.slow
def test_a_killed_home_comes_back_and_a_former_one_ends(
    front: FrontHere, keeper: Keeper, arguments: list[str]
) -> None:
    async def scenario() -> None:
        async with AsyncClient(front.address, retry=PATIENT) as client:
            session = await client.create_session(ignore_eos=True)
            await session.append([3, 5, 7])
            whole, cut = await session.fork(), session
            assert home_in(whole.session_id) == "a"
            expected = await said(whole, 120)
            told = []
            async for token in cut.generate(120, seed=4, temperature=1.0):
                told.append(token.id)
                if len(told) == 30:
                    assert keeper.process is not None
                    keeper.process.kill()
            assert told == expected
            assert (await cut.info()).history_length == 123
            # Somebody opens the same home again: whoever was it before notices, and ends for good.
            former = keeper.process
            assert former is not None
            other = HomeProcess([*arguments, "--name", "a", "--node", "n"])
            try:
                await asyncio.to_thread(other.ready)
                await asyncio.to_thread(keeper.fenced.wait, 30)
                assert former.status == FENCED_STATUS
                assert other.status is None
            finally:
                other.bury()

    asyncio.run(scenario())


async def said(session: AsyncSession, tokens: int) -> list[int]:
    return [token.id async for token in session.generate(tokens, seed=4, temperature=1.0)]


@pytest.mark.slow
def test_a_home_that_cannot_start_says_so_at_once(arguments: list[str], tmp_path: Path) -> None:
    secret = make_secret(tmp_path / "secret")
    keeper = Keeper([*arguments, "--name", "Wrong", "--node", "n"], secret, Registry().report)
    with pytest.raises(ConfigError, match="status 2 before it served: kakeya: a home's name"):
        keeper.start()
