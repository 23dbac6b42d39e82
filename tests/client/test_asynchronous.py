"""The asynchronous client against a real server: attaching, listing, the server's own facts, closing."""

import asyncio
from contextlib import suppress

import pytest

import kakeya
from kakeya import errors
from kakeya.client import AsyncClient
from support.serving import CAPACITY, KEY, OTHER_KEY, drive

PROMPT = list(range(10, 30))
LONG = 20_000


def test_attaching_by_id(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        session = await client.create_session()
        await session.append(PROMPT)
        attached = client.session(session.session_id)
        assert await attached.append([5], expected_history_length=len(PROMPT)) == len(PROMPT) + 1
        assert await attached.close() == len(PROMPT) + 1

    drive(server, scenario)


@pytest.mark.parametrize("server", ["server"], indirect=True)  # a cluster lists home after home
def test_listing_shows_only_the_callers_own(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        made = [await client.create_session(label=f"number {i}") for i in range(3)]
        listed = await client.list_sessions()
        assert [info.session_id for info in listed] == [session.session_id for session in made]
        assert [info.client_label for info in listed] == ["number 0", "number 1", "number 2"]
        async with AsyncClient(server, api_key=OTHER_KEY) as other:
            assert await other.list_sessions() == []

    drive(server, scenario)


@pytest.mark.parametrize("server", ["server"], indirect=True)  # a cluster lists home after home
def test_listing_follows_the_pages(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kakeya.client.asynchronous._PAGE", 2)

    async def scenario(client: AsyncClient) -> None:
        made = [await client.create_session() for _ in range(5)]
        listed = await client.list_sessions()
        assert [info.session_id for info in listed] == [session.session_id for session in made]

    drive(server, scenario)


def test_server_info(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        info = await client.server_info()
        assert info.version == kakeya.__version__
        assert (info.layers, info.kv_heads, info.head_dim) == (2, 2, 16)
        assert (info.sink, info.window, info.capacity) == (4, 128, CAPACITY)
        assert info.eos_token_ids == (0,)
        assert info.kv_bytes_per_session > 0
        assert info.model_fingerprint
        assert isinstance(info.features, tuple)

    drive(server, scenario)


def test_a_closed_client_says_so(server: str) -> None:
    async def scenario() -> None:
        client = AsyncClient(server, api_key=KEY)
        session = await client.create_session()
        await client.close()
        await client.close()
        for call in (client.server_info, session.info, session.export, session.generate(1).__anext__):
            with pytest.raises(RuntimeError, match="this client is closed"):
                await call()

    asyncio.run(scenario())


def test_whoever_asks_a_closed_client_for_ever_keeps_nobody_waiting() -> None:
    async def scenario() -> None:
        client = AsyncClient("127.0.0.1:1")
        await client.close()

        async def ask_for_ever() -> None:
            while True:
                with suppress(Exception):
                    await client.create_session()

        asking = asyncio.create_task(ask_for_ever())
        await asyncio.sleep(0.01)
        asking.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 5.0))


def test_closing_ends_the_calls_that_run(server: str) -> None:
    async def scenario() -> None:
        client = AsyncClient(server, api_key=KEY)
        session = await client.create_session(ignore_eos=True)
        await session.append(PROMPT)
        started = asyncio.Event()

        async def read() -> None:
            async for _token in session.generate(LONG):
                started.set()

        reading = asyncio.create_task(read())
        await started.wait()
        await client.close()
        with pytest.raises(errors.Unavailable, match="closed"):
            await reading

    asyncio.run(scenario())
