"""An owner's quotas hold over all homes together."""

import asyncio
from pathlib import Path

import pytest

from kakeya.client import AsyncClient
from kakeya.config import Quotas
from kakeya.errors import ResourceExhausted
from kakeya.sessions.limits import Limits
from kakeya.types import OwnerUsage
from support.clustering import Town, front_of, town_of


def test_sessions_at_other_homes_count(model: Path, tmp_path: Path) -> None:
    async def scenario(address: str, town: Town) -> None:
        async with (
            AsyncClient(address, api_key="mine") as mine,
            AsyncClient(address, api_key="other") as other,
        ):
            made = []
            for _ in range(3):
                made.append(await mine.create_session())
                await asyncio.to_thread(town.beat)
                await asyncio.to_thread(town.beat)  # now everybody knows
            for _ in range(4):
                with pytest.raises(ResourceExhausted, match="max_sessions quota of 3"):
                    await mine.create_session()
            await other.create_session()
            await made[0].close()
            await asyncio.to_thread(town.beat)
            await asyncio.to_thread(town.beat)
            await mine.create_session()

    quotas = Quotas(max_sessions=3)
    with town_of(model, tmp_path, "a", "b", quotas=quotas) as town, front_of(town, "mine", "other") as front:
        asyncio.run(scenario(front.address, town))


def test_what_is_used_elsewhere_counts_here() -> None:
    now = [0.0]
    limits = Limits(Quotas(max_sessions=2, max_concurrent_requests=2, tokens_per_minute=60), lambda: now[0])
    limits.count_elsewhere({"me": OwnerUsage(sessions=1, requests=1, tokens=50)})
    with limits.new_session("me"):
        pass
    with pytest.raises(ResourceExhausted, match="max_sessions"), limits.new_session("me"):
        pass
    with pytest.raises(ResourceExhausted, match="tokens_per_minute"), limits.appending("me", 11):
        pass
    limits.start_request("me")
    with pytest.raises(ResourceExhausted, match="max_concurrent_requests"):
        limits.start_request("me")
    limits.end_request("me", 5)
    assert limits.usage() == {"me": OwnerUsage(sessions=1, requests=0, tokens=5)}
    limits.count_elsewhere({})  # nothing there any more; what was spent stays spent
    with pytest.raises(ResourceExhausted, match="tokens_per_minute"), limits.appending("me", 11):
        pass
    now[0] = 60.0
    with limits.appending("me", 11), limits.new_session("me"):
        pass
