"""A server is killed and started again: its clients see a pause."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from kakeya.client import AsyncClient, AsyncSession
from kakeya.types import StopReason
from support.serving import MortalServer, write_model

PROMPT, COUNT, EARLY = list(range(10, 30)), 1500, 20
FLAGS = ("--window", "60", "--threads", "1", "--numerics", "exact", "--proposer", "none")


async def begun(client: AsyncClient) -> AsyncSession:
    session = await client.create_session(ignore_eos=True)
    await session.append(PROMPT)
    return session


async def said_by(client: AsyncClient) -> list[int]:
    """What an uninterrupted session says."""
    return [token.id async for token in (await begun(client)).generate(COUNT)]


def respond(server: MortalServer, **fields: Any) -> dict[str, Any]:
    asked = {"temperature": 0, "max_output_tokens": 5} | fields
    answer = httpx.post(f"http://{server.http}/v1/responses", json=asked, timeout=30, trust_env=False)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


@pytest.mark.slow
def test_a_running_agent_only_sees_a_pause(tmp_path: Path) -> None:
    async def scenario(server: MortalServer) -> None:
        async with AsyncClient(server.address) as client:
            session = await begun(client)
            stream, said, restart = session.generate(COUNT), [], None
            async for token in stream:
                said.append(token.id)
                if len(said) == EARLY:
                    await asyncio.to_thread(server.kill)
                    restart = asyncio.create_task(asyncio.to_thread(server.start))
            assert restart is not None
            await restart
            assert stream.result is not None
            assert stream.result.stop_reason is StopReason.MAX_TOKENS
            assert said == await said_by(client)
        # Another program knows nothing but the id.
        async with AsyncClient(server.address) as other:
            assert (await other.session(session.session_id).info()).history_length == len(PROMPT) + COUNT
            assert await other.session(session.session_id).append([5]) == len(PROMPT) + COUNT + 1

    with MortalServer(write_model(tmp_path / "model"), tmp_path / "state", *FLAGS) as server:
        first = respond(server, input="Hello")
        asyncio.run(scenario(server))
        second = respond(server, input="Again", previous_response_id=first["id"])
        assert second["usage"]["total_tokens"] > first["usage"]["total_tokens"]
        assert second["previous_response_id"] == first["id"]
