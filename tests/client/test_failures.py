"""Every row of the error table that a client can cause, by its exception and its status."""

from collections.abc import Awaitable, Callable

import pytest
from grpc import StatusCode

from kakeya import errors
from kakeya.client import AsyncClient, Retry
from support.serving import CAPACITY, OTHER_KEY, drive, free_port

PROMPT = list(range(10, 30))
LONG = 20_000


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


@pytest.mark.parametrize("server", ["server"], indirect=True)  # in a cluster sessions sleep
def test_no_slab_has_its_class_and_status(server: str) -> None:
    test_every_error_has_its_class_and_status(
        server, no_slab, errors.ResourceExhausted, StatusCode.RESOURCE_EXHAUSTED
    )
