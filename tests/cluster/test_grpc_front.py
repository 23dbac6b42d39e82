"""One address over two homes: sessions are where there is room, and found again wherever they go."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from kakeya.client import AsyncClient, AsyncSession
from kakeya.cluster.calling import Draining, HomeCalls
from kakeya.cluster.homes import Link
from kakeya.cluster.members import home_in
from kakeya.dialing import Retry
from kakeya.errors import InvalidArgument, SessionNotFound
from kakeya.wire import runtime_pb2
from support.clustering import SECRET, FrontHere, Town, alone, front_of, town_of
from support.serving import connected

PROMPTS = [[3, 5, number + 7] for number in range(6)]


def played(front: FrontHere, scenario: Callable[[AsyncClient], Awaitable[None]], **options: object) -> None:
    async def play() -> None:
        async with AsyncClient(front.address, **options) as client:  # type: ignore[arg-type]
            await scenario(client)

    asyncio.run(play())


async def started(client: AsyncClient, prompt: list[int]) -> AsyncSession:
    session = await client.create_session(ignore_eos=True)
    await session.append(prompt)
    return session


async def said(session: AsyncSession, tokens: int, seed: int = 0) -> list[int]:
    return [token.id async for token in session.generate(tokens, seed=seed, temperature=1.0)]


def test_sessions_are_spread_and_say_what_they_say_alone(front: FrontHere, model: Path) -> None:
    async def scenario(client: AsyncClient) -> None:
        sessions = [await started(client, prompt) for prompt in PROMPTS]
        homes = [home_in(session.session_id) for session in sessions]
        assert sorted(homes) == ["a"] * 3 + ["b"] * 3
        answers = await asyncio.gather(*(said(session, 40, 3) for session in sessions))
        assert answers == [alone(model, prompt, (40, 3)) for prompt in PROMPTS]
        fork = await sessions[0].fork()
        assert home_in(fork.session_id) == homes[0]
        info = await client.server_info()
        assert info.capacity == 8
        assert "cluster" in info.features
        listed = [each.session_id for each in await client.list_sessions()]
        assert sorted(listed) == sorted([fork.session_id, *(each.session_id for each in sessions)])
        await fork.close()
        with pytest.raises(SessionNotFound):
            await fork.info()

    played(front, scenario)


def test_a_list_is_paged_over_all_homes(front: FrontHere) -> None:
    async def scenario(client: AsyncClient) -> None:
        made = {(await client.create_session()).session_id for _ in range(5)}
        with connected(front.address) as stub:
            found, token = [], None
            while token != "":
                page = stub.ListSessions(runtime_pb2.ListSessionsRequest(page_size=2, page_token=token or ""))
                assert len(page.sessions) <= 2
                found += [each.session_id for each in page.sessions]
                token = page.next_page_token
        assert len(found) == 5
        assert set(found) == made

    played(front, scenario)


def test_a_client_chooses_its_model(town: Town) -> None:
    town.settle("second", model="other")

    async def at(front: FrontHere, model: str | None) -> tuple[str, str]:
        async with AsyncClient(front.address, model=model) as client:
            session = await client.create_session()
            return (await client.server_info()).model_id, home_in(session.session_id)

    async def all_three(front: FrontHere) -> None:
        assert await at(front, "other") == ("other", "second")
        assert (await at(front, "tiny"))[0] == (await at(front, None))[0] == "tiny"
        with pytest.raises(InvalidArgument, match="no model 'third' in this cluster; there are: other, tiny"):
            await at(front, "third")

    with front_of(town) as front:
        asyncio.run(all_three(front))


def test_a_list_is_by_age_and_moves_change_nothing(front: FrontHere, town: Town) -> None:
    async def scenario(client: AsyncClient) -> None:
        made = [(await client.create_session()).session_id for _ in range(6)]
        with connected(front.address) as stub:

            def page(token: str = "") -> runtime_pb2.ListSessionsResponse:
                return stub.ListSessions(runtime_pb2.ListSessionsRequest(page_size=2, page_token=token))

            first = page()
            for session_id in (made[1], made[4]):  # one that was listed, and one that was not
                here = home_in(session_id)
                await asyncio.to_thread(move, town, session_id, here, "b" if here == "a" else "a")
            town.homes["a"].stop()
            await asyncio.to_thread(town.settle, "a")  # ages are stored
            await client.create_session()
            second = page(first.next_page_token)
            third = page(second.next_page_token)
            last = page(third.next_page_token)
            listed = [each.session_id for shown in (first, second, third) for each in shown.sessions]
            assert listed == made
            assert (len(last.sessions), last.next_page_token) == (1, "")
            for token in ("a:", "zzz"):
                with pytest.raises(grpc.RpcError, match="page_token must be one"):
                    page("!" + token)
            with pytest.raises(grpc.RpcError, match="page_size must be a whole number from 1 to 1000"):
                stub.ListSessions(runtime_pb2.ListSessionsRequest(page_size=1001))

    played(front, scenario)


def test_a_list_without_a_home_that_is_away_is_none(town: Town) -> None:
    with front_of(town, hold_s=0.5) as front, connected(front.address) as stub:
        assert list(stub.ListSessions(runtime_pb2.ListSessionsRequest()).sessions) == []
        town.homes.pop("b").stop()
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as refused:
                stub.ListSessions(runtime_pb2.ListSessionsRequest())
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_session_moves_unseen_between_turns(front: FrontHere, town: Town, model: Path) -> None:
    async def scenario(client: AsyncClient) -> None:
        session = await started(client, PROMPTS[0])
        first = await said(session, 40, 1)
        here = home_in(session.session_id)
        there = "b" if here == "a" else "a"
        for source, target in ((here, there), (there, here), (here, there)):
            await asyncio.to_thread(move, town, session.session_id, source, target)
            assert town.homes[target].runtime.home.has_session(session.session_id)
            assert not town.homes[source].runtime.home.has_session(session.session_id)
            first += await said(session, 10, 2)
        assert first == alone(model, PROMPTS[0], (40, 1), (10, 2), (10, 2), (10, 2))
        assert len(await client.list_sessions()) == 1

    played(front, scenario)


def move(town: Town, session_id: str, source: str, target: str) -> int | None:
    homes = {home.name: home for home in town.beat().homes}
    with HomeCalls(homes[source].address, SECRET) as calls:
        return calls.move(session_id, homes[target])


def test_a_front_end_that_knows_nothing_finds_a_moved_session(town: Town) -> None:
    with front_of(town) as first:

        async def begin(client: AsyncClient) -> None:
            session = await started(client, PROMPTS[0])
            names.append(session.session_id)

        names: list[str] = []
        played(first, begin)
    here = home_in(names[0])
    there = "b" if here == "a" else "a"
    assert move(town, names[0], here, there)
    # The one that remembers where it went is followed by one that does not.
    town.homes[here].stop()
    town.settle(here)
    with front_of(town) as second:

        async def go_on(client: AsyncClient) -> None:
            assert (await client.session(names[0]).info()).history_length == 3
            with pytest.raises(SessionNotFound):
                await client.session("a.unknown").info()
            with pytest.raises(SessionNotFound):
                await client.session("nowhere.unknown").info()

        played(second, go_on)


def test_a_drain_waits_for_what_runs_and_leaves_nothing(front: FrontHere, town: Town, model: Path) -> None:
    async def scenario(client: AsyncClient) -> None:
        sessions = [await started(client, prompt) for prompt in PROMPTS]
        talking = [asyncio.create_task(said(session, 150, 5)) for session in sessions]
        await asyncio.sleep(0.2)
        town.registry.drain("a")
        drained = await asyncio.to_thread(Draining(town.registry.view, SECRET).run, "a")
        assert drained.sessions == 3
        assert drained.bytes > 0
        assert drained.held == 0
        assert town.homes["a"].runtime.home.session_ids() == []
        answers = await asyncio.gather(*talking)
        assert answers == [alone(model, prompt, (150, 5)) for prompt in PROMPTS]
        made = [await client.create_session() for _ in range(3)]
        assert {home_in(each.session_id) for each in made} == {"b"}
        lengths = [(await session.info()).history_length for session in sessions]
        assert lengths == [153] * 6

    played(front, scenario)


def test_a_drain_ends_when_its_home_came_back_at_another_node(town: Town) -> None:
    town.homes["a"].runtime.create_session()
    town.homes.pop("a").stop()
    town.registry.drain("a")
    back = threading.Timer(1.0, town.settle, ("a", "elsewhere"))
    back.start()
    drained = Draining(town.registry.view, SECRET).run("a")
    back.join()
    assert drained.sessions == 0
    assert len(town.homes["a"].runtime.home.session_ids()) == 1


def test_a_drain_waits_for_a_home_that_is_away(town: Town) -> None:
    with HomeCalls(town.homes["a"].server.address, SECRET) as calls:
        assert calls.movable() == {}
    town.homes["a"].runtime.create_session()
    town.homes.pop("a").stop()
    town.registry.drain("a")
    back = threading.Timer(1.0, town.settle, ("a",))
    back.start()
    assert Draining(town.registry.view, SECRET).run("a").sessions == 1
    back.join()
    assert len(town.homes["b"].runtime.home.session_ids()) == 1


def test_a_home_that_is_followed_by_another_stores_nothing_and_its_sessions_go_on(
    front: FrontHere, town: Town, model: Path
) -> None:
    async def scenario(client: AsyncClient) -> None:
        session = await started(client, PROMPTS[1])
        name = home_in(session.session_id)
        first = await said(session, 20, 1)
        former = town.homes[name]
        later = await asyncio.to_thread(town.settle, name)
        assert later.runtime.home.epoch == former.runtime.home.epoch + 1
        # A caller that still reaches the former one is told to come again, and nothing has changed.
        with connected(former.server.address) as stub:
            request = runtime_pb2.AppendTokensRequest(session_id=session.session_id, token_ids=[9])
            with pytest.raises(grpc.RpcError) as refused:
                stub.AppendTokens(
                    request, metadata=[("kakeya-cluster-secret", SECRET), ("kakeya-owner", "local")]
                )
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        first += await said(session, 20, 1)
        assert first == alone(model, PROMPTS[1], (20, 1), (20, 1))
        assert former.fenced or await asyncio.to_thread(_waits, former.fenced)
        await asyncio.to_thread(former.stop)

    played(front, scenario, retry=Retry(attempts=100, first_delay=0.05, longest_delay=0.2))


def _waits(fenced: list[str]) -> bool:
    import time

    for _ in range(40):
        if fenced:
            return True
        time.sleep(0.05)
    return False


def test_a_fork_that_finds_its_home_full_is_made_at_another(model: Path, tmp_path: Path) -> None:
    """Only where it fits, and with a request id that is repeated, once."""
    with town_of(model, tmp_path, "a") as town, front_of(town) as front:
        town.homes["a"].runtime._keeping._tiers._patience = 0.1  # type: ignore[attr-defined]

        async def scenario(client: AsyncClient) -> None:
            session = await started(client, PROMPTS[0])
            first = await said(session, 20, 1)
            talking = [await started(client, prompt) for prompt in PROMPTS[1:4]]
            streams = [asyncio.create_task(said(each, 100_000)) for each in talking]
            await asyncio.to_thread(town.settle, "wide", "", 60)
            await known(front, "wide")
            asked = runtime_pb2.ForkSessionRequest(session_id=session.session_id, request_id="again")
            with connected(front.address) as stub:
                with pytest.raises(grpc.RpcError, match="all 4 sessions are in use"):
                    await asyncio.to_thread(stub.ForkSession, asked)
                await asyncio.to_thread(town.settle, "b")
                await known(front, "b")
                forks = [await asyncio.to_thread(stub.ForkSession, asked) for _ in range(2)]
            assert forks[0] == forks[1]
            assert (home_in(forks[0].session_id), forks[0].history_length) == ("b", 23)
            assert town.homes["b"].runtime.home.session_ids() == [forks[0].session_id]
            twin = client.session(forks[0].session_id)
            await refused_forks(front, session.session_id, talking[0].session_id)
            answers = [await said(twin, 20, 2), await said(session, 20, 2)]
            assert answers[0] == answers[1]
            assert first + answers[0] == alone(model, PROMPTS[0], (20, 1), (20, 2))
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)

        played(front, scenario)


async def refused_forks(front: FrontHere, resting: str, working: str) -> None:
    """What the home says that gives the state or the one that would take it is told."""
    reach_beside = front.homes.reach_beside

    async def unfit(name: str, owner: str, request_id: str) -> Link:
        return await front.homes.reach("wide")

    with connected(front.address) as stub:
        asked = runtime_pb2.ForkSessionRequest(session_id=resting)
        front.homes.reach_beside = unfit  # type: ignore[method-assign]
        with pytest.raises(grpc.RpcError, match="another cache geometry"):
            await asyncio.to_thread(stub.ForkSession, asked)
        front.homes.reach_beside = reach_beside  # type: ignore[method-assign]
        again = runtime_pb2.ForkSessionRequest(session_id=working, request_id="again")
        with pytest.raises(grpc.RpcError, match="generating") as refused:
            await asyncio.to_thread(stub.ForkSession, again)
        assert refused.value.code() is grpc.StatusCode.ABORTED
        unnamed = await asyncio.to_thread(stub.ForkSession, asked)
        assert home_in(unnamed.session_id) == "b"


async def known(front: FrontHere, name: str) -> None:
    """Until the front end has heard of a home."""
    while name not in front.homes.homes:
        await asyncio.sleep(0.05)
