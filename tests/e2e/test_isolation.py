"""Sixty-four conversations at once give each exactly what it gets alone."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

import kakeya
from kakeya.client import AsyncSession

pytestmark = pytest.mark.untraced

AGENTS = 64


@dataclass
class Deed:
    """Something a session did: an append, or a generate with the tokens that came of it."""

    appended: list[int] = field(default_factory=list)
    sampling: Mapping[str, float] = field(default_factory=dict)
    kept: int = 0
    received: list[int] = field(default_factory=list)


Story = list[Deed]


async def append(session: AsyncSession, story: Story, dice: random.Random) -> None:
    tokens = [dice.randrange(1, 200) for _ in range(dice.randint(1, 40))]
    await session.append(tokens)
    story.append(Deed(appended=tokens))


async def generate(session: AsyncSession, story: Story, dice: random.Random) -> None:
    """Read to the end, or leave somewhere in the middle."""
    seeded = {"temperature": 1.0, "seed": dice.randrange(2**32)}
    sampling = seeded if dice.random() < 0.5 else {}
    length, leave_after = dice.randint(1, 24), dice.choice([None, 0, 1, 3])
    before = (await session.info()).history_length
    received: list[int] = []
    async with session.generate(length, **sampling) as stream:
        async for token in stream:
            received.append(token.id)
            if leave_after is not None and len(received) > leave_after:
                break
    await session.append([])  # waits until the server has noticed
    kept = (await session.info()).history_length - before
    assert len(received) <= kept <= length
    assert leave_after is not None or kept == length
    story.append(Deed(sampling=sampling, kept=kept, received=received))


async def live(client: kakeya.AsyncClient, seed: int) -> list[Story]:
    """A random life: appends, generates, cancels, and forks that go their own way. Its stories."""
    dice = random.Random(seed)
    session, story = await client.create_session(ignore_eos=True), Story()
    stories = [story]
    await append(session, story, dice)
    for _ in range(dice.randint(3, 6)):
        await dice.choice([append, generate, generate])(session, story, dice)
        await asyncio.sleep(dice.random() * 0.01)
    if dice.random() < 0.5:
        child, child_story = await session.fork(), list(story)
        stories.append(child_story)
        await asyncio.gather(
            generate(session, story, random.Random(seed + 1)),
            generate(child, child_story, random.Random(seed + 2)),
        )
        await child.close()
    await session.close()
    return stories


async def assert_same_alone(client: kakeya.AsyncClient, story: Sequence[Deed]) -> int:
    """Do the same deeds in a session that has the server to itself; returns the tokens compared."""
    compared = 0
    async with await client.create_session(ignore_eos=True) as session:
        for deed in story:
            if deed.appended:
                await session.append(deed.appended)
            elif deed.kept:
                alone = [token.id async for token in session.generate(deed.kept, **deed.sampling)]
                assert alone[: len(deed.received)] == deed.received
                compared += len(deed.received)
    return compared


def test_sessions_never_share_state(address: str) -> None:
    async def everyone() -> int:
        async with kakeya.AsyncClient(address) as client:
            lives = await asyncio.gather(*(live(client, seed) for seed in range(AGENTS)))
            compared = [await assert_same_alone(client, story) for stories in lives for story in stories]
            assert await client.list_sessions() == []
            return sum(compared)

    assert asyncio.run(everyone()) > 10 * AGENTS
