"""Many agents, each with a channel and a session of its own, all windows full, all at once."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

import kakeya

pytestmark = pytest.mark.untraced

AGENTS = 256
WINDOW_FULL = 40
TOKENS = 12


def prompt(agent: int) -> list[int]:
    return [(agent * 31 + place * 7) % 199 + 1 for place in range(WINDOW_FULL)]


async def answer(client: kakeya.AsyncClient, agent: int, barrier: asyncio.Barrier | None = None) -> list[int]:
    async with await client.create_session(ignore_eos=True) as session:
        await session.append(prompt(agent))
        if barrier is not None:
            await barrier.wait()
        return [token.id async for token in session.generate(TOKENS, temperature=1.0, seed=agent)]


async def agent_with_its_own_channel(address: str, agent: int, barrier: asyncio.Barrier) -> list[int]:
    async with kakeya.AsyncClient(address) as client:
        return await answer(client, agent, barrier)


def test_everyone_gets_what_it_would_get_alone(
    serve_tiny: Callable[[int], AbstractContextManager[str]],
) -> None:
    async def everyone(address: str) -> None:
        barrier = asyncio.Barrier(AGENTS)
        agents = (agent_with_its_own_channel(address, agent, barrier) for agent in range(AGENTS))
        together = await asyncio.gather(*agents)
        async with kakeya.AsyncClient(address) as client:
            alone = [await answer(client, agent) for agent in range(0, AGENTS, 8)]
            assert await client.list_sessions() == []
        assert together[::8] == alone
        assert len({tuple(tokens) for tokens in together}) > AGENTS // 2

    with serve_tiny(AGENTS) as address:
        asyncio.run(everyone(address))
