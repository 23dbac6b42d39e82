"""Sessions of the client on a real server: turns, sampling, forks."""

import pytest

from kakeya.client import AsyncClient, AsyncSession, StopReason
from kakeya.errors import InvalidArgument, SessionNotFound, StateMismatch
from support.serving import drive

PROMPT = list(range(10, 30))


async def say(session: AsyncSession, count: int = 12, **options: float) -> list[int]:
    await session.append(PROMPT)
    return [token.id async for token in session.generate(count, **options)]


def test_a_turn(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with await client.create_session(label="turn", ignore_eos=True) as session:
            assert session.last_result is None
            assert await session.append(PROMPT) == len(PROMPT)
            stream = session.generate(max_tokens=8)
            tokens = [token async for token in stream]
            assert len(tokens) == 8
            assert all(token.logprob is None and token.top_logprobs == () for token in tokens)
            result = session.last_result
            assert result is not None
            assert result is stream.result
            assert (result.stop_reason, result.generated_token_count) == (StopReason.MAX_TOKENS, 8)
            assert 0 < result.prefill_duration_seconds <= result.total_duration_seconds
            info = await session.info()
            assert (info.history_length, info.client_label, info.state) == (len(PROMPT) + 8, "turn", "idle")
            assert info.session_id == session.session_id
            assert 0 < info.kv_live_bytes < info.kv_capacity_bytes

    drive(server, scenario)


def test_the_seed_decides(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        said = []
        for seed in (1, 1, 2):
            async with await client.create_session(ignore_eos=True) as session:
                said.append(await say(session, temperature=1.5, seed=seed, top_k=50, top_p=0.99))
        assert said[0] == said[1] != said[2]

    drive(server, scenario)


def test_logprobs(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with await client.create_session(ignore_eos=True) as session:
            await session.append(PROMPT)
            tokens = [token async for token in session.generate(3, logprobs=4)]
        for token in tokens:
            assert token.logprob is not None
            assert len(token.top_logprobs) == 4
            # Greedy: the token is the likeliest one.
            assert (token.top_logprobs[0].id, token.top_logprobs[0].logprob) == (token.id, token.logprob)

    drive(server, scenario)


def test_logit_bias_and_eos_token_ids_reach_the_server(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with await client.create_session(eos_token_ids=[17]) as session:
            await session.append(PROMPT)
            assert [token.id async for token in session.generate(5, logit_bias={17: 1000.0})] == [17]
            assert session.last_result is not None
            assert session.last_result.stop_reason is StopReason.EOS

    drive(server, scenario)


def test_a_fork_goes_its_own_way(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with await client.create_session(ignore_eos=True) as session:
            await session.append(PROMPT)
            twin = await session.fork()
            assert twin.session_id != session.session_id
            own = [token.id async for token in session.generate(6)]
            assert (await twin.info()).history_length == len(PROMPT)
            assert [token.id async for token in twin.generate(6)] == own
            assert await twin.close() == len(PROMPT) + 6

    drive(server, scenario)


def test_a_session_moves_in_a_file(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with await client.create_session(ignore_eos=True) as session:
            await say(session)
            file = await session.export()
            async with await client.import_session(file, label="moved") as copy:
                info = await copy.info()
                assert (info.client_label, info.history_length) == ("moved", len(PROMPT) + 12)
                assert await say(copy) == await say(session)
            for bad in (b"", b"x" * 100, file[:-1], file[:60] + b"x" + file[61:]):
                with pytest.raises(StateMismatch):
                    await client.import_session(bad)
            with pytest.raises(InvalidArgument, match="at most"):
                await client.import_session(bytes(2**28 + 2**22))
            assert len(await client.list_sessions()) == 1
        with pytest.raises(SessionNotFound):
            await session.export()

    drive(server, scenario)
