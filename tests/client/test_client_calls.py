"""The asynchronous client against a real server."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from grpc import StatusCode

import kakeya
from kakeya import errors
from kakeya.client import AsyncClient, AsyncSession, Retry, StopReason
from support.served import CAPACITY, KEY, OTHER_KEY, free_port

PROMPT = list(range(10, 30))
LONG = 20_000


def drive(server: str, scenario: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with AsyncClient(server, api_key=KEY) as client:
            await scenario(client)

    asyncio.run(run())


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


def test_attaching_by_id(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        session = await client.create_session()
        await session.append(PROMPT)
        attached = client.session(session.session_id)
        assert await attached.append([5], expected_history_length=len(PROMPT)) == len(PROMPT) + 1
        assert await attached.close() == len(PROMPT) + 1

    drive(server, scenario)


def test_listing_shows_only_the_callers_own(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        made = [await client.create_session(label=f"number {i}") for i in range(3)]
        listed = await client.list_sessions()
        assert [info.session_id for info in listed] == [session.session_id for session in made]
        assert [info.client_label for info in listed] == ["number 0", "number 1", "number 2"]
        async with AsyncClient(server, api_key=OTHER_KEY) as other:
            assert await other.list_sessions() == []

    drive(server, scenario)


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


# Every row of the error table that a client can cause, by its exception and its status.


async def unknown_session(client: AsyncClient) -> None:
    await client.session("nonsense").info()


async def closed_session(client: AsyncClient) -> None:
    session = await client.create_session()
    await session.close()
    await session.append(PROMPT)


async def somebody_elses_session(client: AsyncClient) -> None:
    session = await client.create_session()
    async with AsyncClient(client._connection._target, api_key=OTHER_KEY) as other:
        await other.session(session.session_id).append(PROMPT)


async def token_outside_the_vocabulary(client: AsyncClient) -> None:
    await (await client.create_session()).append([10**6])


async def generate_on_nothing(client: AsyncClient) -> None:
    await anext((await client.create_session()).generate(5))


async def bad_temperature(client: AsyncClient) -> None:
    session = await client.create_session()
    await session.append(PROMPT)
    await anext(session.generate(5, temperature=-1.0))


async def busy(client: AsyncClient) -> None:
    session = await client.create_session(ignore_eos=True)
    await session.append(PROMPT)
    async with session.generate(LONG) as stream:
        await anext(stream)
        await session.append([1])


async def wrong_length(client: AsyncClient) -> None:
    await (await client.create_session()).append(PROMPT, expected_history_length=3)


async def no_slab(client: AsyncClient) -> None:
    for _ in range(CAPACITY + 1):
        await client.create_session()


async def wrong_key(client: AsyncClient) -> None:
    async with AsyncClient(client._connection._target, api_key="guess") as other:
        await other.server_info()


async def no_key(client: AsyncClient) -> None:
    async with AsyncClient(client._connection._target) as other:
        await other.create_session()


async def nobody_listens(client: AsyncClient) -> None:
    async with AsyncClient(f"127.0.0.1:{free_port()}", retry=Retry(attempts=2, first_delay=0.01)) as other:
        await other.server_info()


async def too_little_time(client: AsyncClient) -> None:
    session = await client.create_session(ignore_eos=True)
    await session.append(PROMPT)
    async for _token in session.generate(LONG, timeout=0.3):
        pass


@pytest.mark.parametrize(
    "cause, kind, status",
    [
        (unknown_session, errors.SessionNotFound, StatusCode.NOT_FOUND),
        (closed_session, errors.SessionNotFound, StatusCode.NOT_FOUND),
        (somebody_elses_session, errors.SessionNotFound, StatusCode.NOT_FOUND),
        (token_outside_the_vocabulary, errors.InvalidArgument, StatusCode.INVALID_ARGUMENT),
        (generate_on_nothing, errors.InvalidArgument, StatusCode.INVALID_ARGUMENT),
        (bad_temperature, errors.InvalidArgument, StatusCode.INVALID_ARGUMENT),
        (busy, errors.SessionBusy, StatusCode.ABORTED),
        (wrong_length, errors.HistoryMismatch, StatusCode.ABORTED),
        (no_slab, errors.ResourceExhausted, StatusCode.RESOURCE_EXHAUSTED),
        (wrong_key, errors.Unauthenticated, StatusCode.UNAUTHENTICATED),
        (no_key, errors.Unauthenticated, StatusCode.UNAUTHENTICATED),
        (nobody_listens, errors.Unavailable, StatusCode.UNAVAILABLE),
        (too_little_time, errors.DeadlineExceeded, StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_every_error_has_its_class_and_status(
    server: str,
    cause: Callable[[AsyncClient], Awaitable[None]],
    kind: type[errors.KakeyaError],
    status: StatusCode,
) -> None:
    with pytest.raises(kind) as caught:
        drive(server, cause)
    assert type(caught.value) is kind
    assert caught.value.status is status
    assert str(caught.value)


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


@pytest.mark.parametrize(
    "options, named",
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 5, "seed": 2**64}, "seed"),
        ({"max_tokens": 5, "temperature": "hot"}, "temperature"),
        ({"max_tokens": 5, "logit_bias": {-4: 1.0}}, "logit_bias"),
    ],
)
def test_what_does_not_fit_the_wire_is_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=named):
        AsyncClient().session("any").generate(**options)  # type: ignore[arg-type]


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        AsyncClient().session("any").generate(5, temprature=1.0)  # type: ignore[call-arg]


def test_a_closed_client_says_so(server: str) -> None:
    async def scenario() -> None:
        client = AsyncClient(server, api_key=KEY)
        await client.server_info()
        await client.close()
        await client.close()
        with pytest.raises(errors.Unavailable, match="closed"):
            await client.server_info()

    asyncio.run(scenario())


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
