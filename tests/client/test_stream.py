"""Streams of tokens: read, left, cancelled and timed out."""

import asyncio

import pytest

from kakeya.client import AsyncClient, StopReason
from support.serving import drive

PROMPT = list(range(10, 30))
LONG = 20_000


def test_leaving_early_lets_the_next_call_in(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with await client.create_session(ignore_eos=True) as session:
            await session.append(PROMPT)
            for _ in range(3):
                async for _token in session.generate(LONG):
                    break
                assert session.last_result is None
                length = await session.append([7])
                assert len(PROMPT) < length < LONG
                async for _token in session.generate(LONG):
                    break
                assert len([token async for token in session.generate(2)]) == 2

    drive(server, scenario)


def test_cancel_tells_exactly_what_became_history(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with await client.create_session(ignore_eos=True) as session:
            await session.append(PROMPT)
            stream = session.generate(LONG)
            said = []
            async for token in stream:
                said.append(token.id)
                if len(said) == 5:
                    stream.cancel()
            assert 5 <= len(said) < LONG
            assert stream.result is not None
            assert stream.result.stop_reason is StopReason.CANCELLED
            assert stream.result.generated_token_count == len(said)
            assert (await session.info()).history_length == len(PROMPT) + len(said)

    drive(server, scenario)


def test_cancel_before_the_first_token_starts_nothing(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with await client.create_session() as session:
            await session.append(PROMPT)
            stream = session.generate(LONG)
            stream.cancel()
            assert [token async for token in stream] == []
            assert session.last_result is not None
            assert session.last_result.stop_reason is StopReason.CANCELLED
            assert await session.append([]) == len(PROMPT)

    drive(server, scenario)


def test_a_cancelled_task_ends_the_work(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with await client.create_session(ignore_eos=True) as session:
            await session.append(PROMPT)
            started = asyncio.Event()

            async def read() -> None:
                async for _token in session.generate(LONG):
                    started.set()

            task = asyncio.create_task(read())
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await session.append([]) < LONG

    drive(server, scenario)


def test_a_stream_as_context_manager(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with await client.create_session(ignore_eos=True) as session:
            await session.append(PROMPT)
            async with session.generate(LONG) as stream:
                await anext(stream)
            assert await session.append([]) < LONG

    drive(server, scenario)


def test_a_session_stays_usable_after_its_time_ran_out(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with await client.create_session(ignore_eos=True) as session:
            await session.append(PROMPT)
            with pytest.raises(TimeoutError):
                async for _token in session.generate(LONG, timeout=0.2):
                    pass
            assert session.last_result is None
            assert len([token async for token in session.generate(3)]) == 3

    drive(server, scenario)


def test_a_stream_can_be_left_while_another_task_reads_it(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with await client.create_session(ignore_eos=True) as session:
            await session.append(PROMPT)
            stream = session.generate(LONG)
            started = asyncio.Event()

            async def read() -> int:
                count = 0
                async for _token in stream:
                    count += 1
                    started.set()
                return count

            reading = asyncio.create_task(read())
            await started.wait()
            await stream.aclose()
            assert 0 < await reading < LONG
            assert await session.append([3]) < LONG

    drive(server, scenario)
