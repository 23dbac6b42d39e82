"""Lost replies and broken streams, made by a proxy at exact moments: nothing is done twice or lost."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from grpc import StatusCode

from kakeya import errors
from kakeya.client import AsyncClient, AsyncSession, Retry, StopReason
from kakeya.client.connection import Attempts
from kakeya.errors import HistoryMismatch, InvalidArgument, Restarting, SessionBusy, Unavailable
from support.network import BreakStream, CutLine, EndStream, FaultyProxy, Hang, LoseReply, Refuse
from support.serving import KEY

PROMPT = list(range(10, 30))
QUICK = Retry(attempts=6, first_delay=0.02, longest_delay=0.2)

Scenario = Callable[[AsyncClient, FaultyProxy], Awaitable[None]]


def drive(server: str, scenario: Scenario, retry: Retry = QUICK) -> None:
    async def run() -> None:
        async with (
            FaultyProxy(server) as proxy,
            AsyncClient(proxy.address, api_key=KEY, retry=retry) as client,
        ):
            await scenario(client, proxy)

    asyncio.run(run())


async def truth(client: AsyncClient, count: int, **options: float) -> list[int]:
    """What an unbroken generate says."""
    async with await client.create_session(ignore_eos=True) as session:
        await session.append(PROMPT)
        return [token.id async for token in session.generate(count, **options)]


async def prompted(client: AsyncClient) -> AsyncSession:
    session = await client.create_session(ignore_eos=True)
    await session.append(PROMPT)
    return session


def test_a_lost_create_makes_one_session(server: str) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        proxy.plan("CreateSession", LoseReply(), LoseReply())
        session = await client.create_session()
        assert [info.session_id for info in await client.list_sessions()] == [session.session_id]
        requests = [request for name, request in proxy.calls if name == "CreateSession"]
        assert len(requests) == 3
        assert len({request.request_id for request in requests}) == 1
        assert requests[0].request_id

    drive(server, scenario)


def test_a_lost_append_appends_once(server: str) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        session = await client.create_session()
        proxy.plan("AppendTokens", LoseReply(), Refuse())
        assert await session.append(PROMPT) == len(PROMPT)
        assert await session.append(PROMPT) == 2 * len(PROMPT)
        assert (await session.info()).history_length == 2 * len(PROMPT)

    drive(server, scenario)


def test_a_lost_append_with_expected_length_is_no_mismatch(server: str) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        session = await client.create_session()
        proxy.plan("AppendTokens", LoseReply())
        assert await session.append(PROMPT, expected_history_length=0) == len(PROMPT)

    drive(server, scenario)


def test_a_lost_fork_forks_once(server: str) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        session = await prompted(client)
        proxy.plan("ForkSession", LoseReply())
        twin = await session.fork()
        listed = [info.session_id for info in await client.list_sessions()]
        assert listed == [session.session_id, twin.session_id]

    drive(server, scenario)


def test_a_lost_close_is_closed(server: str) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        session = await prompted(client)
        proxy.plan("CloseSession", LoseReply())
        assert await session.close() is None
        assert await client.list_sessions() == []
        with pytest.raises(errors.SessionNotFound):
            await session.close()

    drive(server, scenario)


@pytest.mark.parametrize("passed, lost", [(0, 1), (1, 1), (5, 1), (5, 4), (39, 1)])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "seed": 5}], ids=["greedy", "seeded"])
def test_a_broken_stream_goes_on_unseen(
    server: str, passed: int, lost: int, sampling: dict[str, float]
) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        expected = await truth(client, 40, **sampling)
        session = await prompted(client)
        proxy.plan("Generate", BreakStream(passed, lost))
        said = [token.id async for token in session.generate(40, **sampling)]
        assert said == expected
        result = session.last_result
        assert result is not None
        assert (result.stop_reason, result.generated_token_count) == (StopReason.MAX_TOKENS, 40)
        assert (await session.info()).history_length == len(PROMPT) + 40

    drive(server, scenario)


def test_a_stream_survives_many_breaks(server: str) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        expected = await truth(client, 30)
        session = await prompted(client)
        # Eight failures, more than patience allows, but tokens come in between.
        proxy.plan("Generate", *[BreakStream(2), Refuse(), None] * 4)
        assert [token.id async for token in session.generate(30)] == expected
        assert (await session.info()).history_length == len(PROMPT) + 30

    drive(server, scenario)


def test_a_cut_line_is_mended(server: str) -> None:
    """The same with real connections that really break."""

    async def scenario() -> None:
        async with (
            CutLine(server) as line,
            AsyncClient(line.address, api_key=KEY, retry=QUICK) as client,
        ):
            expected = await truth(client, 400)
            session = await prompted(client)
            said = []
            async for token in session.generate(400):
                said.append(token.id)
                if len(said) in (3, 60, 200):
                    line.cut()
            assert said == expected
            assert (await session.info()).history_length == len(PROMPT) + 400
            assert line.connections >= 2

    asyncio.run(scenario())


def test_a_generate_that_never_arrived_is_sent_again(server: str) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        expected = await truth(client, 6)
        session = await prompted(client)
        proxy.plan("Generate", Refuse(), Refuse())
        assert [token.id async for token in session.generate(6)] == expected
        ids = {request.request_id for name, request in proxy.calls if name == "Generate"}
        assert len(ids) == 2  # the unbroken one's, and one for all three tries

    drive(server, scenario)


def test_truncation_is_told_through_a_break(server: str) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        session = await client.create_session(ignore_eos=True)
        await session.append([5] * 300)
        proxy.plan("Generate", BreakStream(3))
        assert len([token async for token in session.generate(10)]) == 10
        assert session.last_result is not None
        assert session.last_result.dropped_token_count >= 300 - 132

    drive(server, scenario)


def test_patience_ends(server: str) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        session = await prompted(client)
        proxy.plan("AppendTokens", *[Refuse()] * 3)
        with pytest.raises(errors.Unavailable) as caught:
            await session.append([1])
        assert caught.value.status is StatusCode.UNAVAILABLE
        assert proxy.names().count("AppendTokens") == 1 + 3
        proxy.plan("Generate", *[Refuse()] * 3)
        with pytest.raises(errors.Unavailable):
            await anext(session.generate(5))
        assert session.last_result is None
        assert len([token async for token in session.generate(5)]) == 5

    drive(server, scenario, Retry(attempts=3, first_delay=0.01, longest_delay=0.05))


def test_one_attempt_never_retries(server: str) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        proxy.plan("GetServerInfo", Refuse())
        with pytest.raises(errors.Unavailable):
            await client.server_info()
        assert proxy.names() == ["GetServerInfo"]

    drive(server, scenario, Retry(attempts=1))


@pytest.mark.parametrize(
    "fault, kind, message",
    [
        (Refuse(StatusCode.FAILED_PRECONDITION, "INV-1 violated: 3"), errors.InvariantViolation, "INV-1"),
        (Refuse(StatusCode.FAILED_PRECONDITION, "broken"), errors.InvariantViolation, "broken"),
        (Refuse(StatusCode.ABORTED, "which?"), errors.Conflict, "which"),
        (Refuse(StatusCode.ABORTED, "busy", "SessionBusy"), errors.SessionBusy, "busy"),
        (Refuse(StatusCode.INTERNAL, "oh", "StepFailed"), errors.StepFailed, "oh"),
        (Refuse(StatusCode.INTERNAL, "oh"), errors.RemoteError, "INTERNAL: oh"),
        (Refuse(StatusCode.UNIMPLEMENTED, ""), errors.RemoteError, "UNIMPLEMENTED"),
        (Refuse(StatusCode.RESOURCE_EXHAUSTED, "quota"), errors.ResourceExhausted, "quota"),
    ],
)
def test_other_errors_are_not_retried(
    server: str, fault: Refuse, kind: type[errors.KakeyaError], message: str
) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        proxy.plan("GetServerInfo", fault)
        with pytest.raises(kind, match=message) as caught:
            await client.server_info()
        assert type(caught.value) is kind
        assert caught.value.status is fault.code
        assert proxy.names() == ["GetServerInfo"]

    drive(server, scenario)


def test_the_broken_invariant_is_named(server: str) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        proxy.plan("GetServerInfo", Refuse(StatusCode.FAILED_PRECONDITION, "INV-2 violated: back to 3"))
        with pytest.raises(errors.InvariantViolation) as caught:
            await client.server_info()
        assert caught.value.invariant == "INV-2"
        assert str(caught.value) == "INV-2 violated: back to 3"

    drive(server, scenario)


def test_random_faults_never_change_a_history(server: str) -> None:
    """Turns under random faults say what the same turns say on a quiet line."""
    dice = random.Random(11)

    async def turns(client: AsyncClient, unsettle: Callable[[], None]) -> list[list[int]]:
        said = []
        async with await client.create_session(ignore_eos=True) as session:
            for turn in range(8):
                unsettle()
                await session.append([turn + 3] * 5)
                said.append([token.id async for token in session.generate(12)])
        return said

    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        def unsettle() -> None:
            proxy.plan("AppendTokens", *dice.choices([LoseReply(), Refuse()], k=dice.randrange(3)))
            breaks = [BreakStream(dice.randrange(6), 1 + dice.randrange(3)), Refuse()]
            proxy.plan("Generate", *dice.choices(breaks, k=dice.randrange(3)))

        assert await turns(client, unsettle) == await turns(client, lambda: None)

    drive(server, scenario)


def test_a_stream_without_an_end_is_an_error(server: str) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        session = await prompted(client)
        proxy.plan("Generate", EndStream(2))
        seen = 0
        with pytest.raises(errors.RemoteError, match="without saying how"):
            async for _token in session.generate(10):
                seen += 1
        assert seen == 2

    drive(server, scenario)


def test_closing_ends_a_call_that_waits(server: str) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        proxy.plan("GetServerInfo", Hang())
        waiting = asyncio.create_task(client.server_info())
        while not proxy.calls:
            await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(errors.Unavailable, match="closed"):
            await waiting

    drive(server, scenario)


@pytest.mark.parametrize("call", ["GetServerInfo", "Generate"])
def test_closing_ends_a_pause_between_two_tries(server: str, call: str) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        session = await prompted(client)
        proxy.plan(call, Refuse(), Refuse())
        calls = {"GetServerInfo": client.server_info, "Generate": session.generate(5).__anext__}
        waiting = asyncio.ensure_future(calls[call]())
        while call not in proxy.names():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # the refusal has come, and the next try would be in half a minute
        await client.close()
        with pytest.raises(errors.Unavailable, match="closed during the call"):
            await asyncio.wait_for(waiting, 5.0)
        assert proxy.names().count(call) == 1

    drive(server, scenario, Retry(attempts=3, first_delay=60.0, longest_delay=60.0))


def test_a_cancelled_task_is_cancelled(server: str) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        proxy.plan("GetServerInfo", Hang())
        waiting = asyncio.create_task(client.server_info())
        while not proxy.calls:
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await client.server_info()).capacity

    drive(server, scenario)


def test_a_call_that_waits_too_long_is_given_up(server: str) -> None:
    async def scenario() -> None:
        async with FaultyProxy(server) as proxy, AsyncClient(proxy.address, timeout=0.2) as client:
            proxy.plan("GetServerInfo", Hang())
            with pytest.raises(errors.DeadlineExceeded):
                await client.server_info()
            assert proxy.names() == ["GetServerInfo"]

    asyncio.run(scenario())


BUSY = Refuse(StatusCode.ABORTED, "still stopping", "SessionBusy")


@pytest.mark.parametrize("call", ["AppendTokens", "ForkSession", "Generate"])
def test_a_session_left_early_is_waited_for_until_it_is_free(server: str, call: str) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        async def again(session: AsyncSession) -> object:
            if call == "AppendTokens":
                return await session.append([3])
            if call == "ForkSession":
                return await session.fork()
            return [token async for token in session.generate(2)]

        session = await prompted(client)
        async for _token in session.generate(1000):
            break
        proxy.plan(call, BUSY, BUSY)
        assert await again(session)
        # Free again, so the next conflict is somebody else's.
        if call != "Generate":
            proxy.plan(call, BUSY)
            with pytest.raises(errors.SessionBusy):
                await again(session)

    drive(server, scenario)


def test_a_conflict_with_somebody_else_is_told_at_once(server: str) -> None:
    async def scenario(client: AsyncClient, proxy: FaultyProxy) -> None:
        session = await prompted(client)
        proxy.plan("Generate", BUSY)
        with pytest.raises(errors.SessionBusy):
            await anext(session.generate(2))
        assert proxy.names().count("Generate") == 1

    drive(server, scenario)


class Pauses(list[float]):
    """Those that were to be taken. None is."""

    async def take(self, seconds: float) -> None:
        self.append(seconds)


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


def test_pauses_double_up_to_the_longest_and_differ(pauses: Pauses) -> None:
    async def fail(attempts: Attempts) -> None:
        for _ in range(5):
            await attempts.pause_or_raise(Unavailable("away"))
        with pytest.raises(Unavailable):
            await attempts.pause_or_raise(Unavailable("away"))

    for _ in range(20):
        asyncio.run(fail(Attempts(Retry(6, 1.0, 5.0), None, pauses.take)))
    for turn, longest in enumerate([1, 2, 4, 5, 5]):
        drawn = pauses[turn::5]
        assert all(longest / 2 <= pause <= longest for pause in drawn)
        assert len(set(drawn)) > 1


def test_a_server_that_says_that_it_restarts_is_waited_for(pauses: Pauses) -> None:
    async def wait() -> None:
        attempts = Attempts(Retry(3, 0.1, 5.0), None, pauses.take)
        for _ in range(50):
            await attempts.pause_or_raise(Restarting("loading"))
        assert all(0.5 <= pause <= 1.0 for pause in pauses), "not longer and longer"
        await attempts.pause_or_raise(Unavailable("away"))
        with pytest.raises(Unavailable):
            await attempts.pause_or_raise(Unavailable("away"))
        with pytest.raises(Restarting):
            await Attempts(Retry(1), None, pauses.take).pause_or_raise(Restarting("no retry"))
        with pytest.raises(Restarting):
            await Attempts(Retry(3), 0.4, pauses.take).pause_or_raise(Restarting("no time"))

    asyncio.run(wait())


def test_pauses_leave_the_programs_random_numbers_alone(pauses: Pauses) -> None:
    before = random.getstate()
    asyncio.run(Attempts(Retry(6, 1.0, 5.0), None, pauses.take).pause_or_raise(Unavailable("away")))
    assert len(pauses) == 1
    assert random.getstate() == before


def test_no_pause_reaches_past_the_deadline(pauses: Pauses) -> None:
    async def fail() -> None:
        attempts = Attempts(Retry(6, 1.0, 5.0), 0.4, pauses.take)
        with pytest.raises(Unavailable):
            await attempts.pause_or_raise(Unavailable("away"))

    asyncio.run(fail())
    assert pauses == []


def test_a_deadline_runs_down_to_zero() -> None:
    assert Attempts(Retry(), None).time_left() is None
    assert Attempts(Retry(), -5.0).time_left() == 0.0
    left = Attempts(Retry(), 100.0).time_left()
    assert left is not None
    assert 99.0 < left <= 100.0


def test_progress_renews_patience(pauses: Pauses) -> None:
    async def fail() -> None:
        attempts = Attempts(Retry(2, 1.0, 5.0), None, pauses.take)
        for _ in range(4):
            await attempts.pause_or_raise(Unavailable("away"))
            attempts.progressed()

    asyncio.run(fail())
    assert len(pauses) == 4


@pytest.mark.parametrize(
    "error, passes, waits",
    [
        (SessionBusy("b"), True, True),
        (SessionBusy("b"), False, False),
        (HistoryMismatch("h"), True, False),
        (InvalidArgument("i"), True, False),
    ],
)
def test_only_a_conflict_that_passes_is_waited_for(
    pauses: Pauses, error: Exception, passes: bool, waits: bool
) -> None:
    async def fail() -> bool:
        attempts = Attempts(Retry(), None, pauses.take)
        try:
            await attempts.pause_or_raise(error, conflict_passes=passes)  # type: ignore[arg-type]
        except type(error):
            return False
        assert not attempts.after_a_break
        return True

    assert asyncio.run(fail()) is waits
    assert bool(pauses) is waits
