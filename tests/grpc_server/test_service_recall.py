"""Recall over the wire: pieces of a history that a client names, through a plain stub and through the SDK."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kakeya.client import AsyncClient, Client, TokenRange
from kakeya.errors import InvalidArgument
from kakeya.grpc_server import Server
from kakeya.runtime import Runtime
from kakeya.wire import runtime_pb2 as pb
from support.serving import ENGINE, serving

LONG = [5 + i % 90 for i in range(300)]
PAGES = (TokenRange(60, 64), TokenRange(80, 84))


@pytest.fixture(scope="module")
def live(model: Path) -> Iterator[tuple[Server, Runtime]]:
    with serving(model, engine=replace(ENGINE, cache=replace(ENGINE.cache, recall=8))) as live:
        yield live


@pytest.fixture
def talked(stub: Any) -> str:
    """A session with recall that has answered a long prompt, and a new message in it."""
    session_id: str = stub.CreateSession(pb.CreateSessionRequest(ignore_eos=True, recall_tokens=8)).session_id
    stub.AppendTokens(pb.AppendTokensRequest(session_id=session_id, token_ids=LONG))
    list(stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=2)))
    stub.AppendTokens(pb.AppendTokensRequest(session_id=session_id, token_ids=[7, 8]))
    return session_id


def wired(ranges: tuple[TokenRange, ...]) -> list[pb.TokenRange]:
    return [pb.TokenRange(start=each.start, end=each.end) for each in ranges]


def test_a_client_names_what_the_next_turn_sees(stub: Any, talked: str) -> None:
    reply = stub.RecallTokens(pb.RecallTokensRequest(session_id=talked, ranges=wired(PAGES)))
    assert list(reply.ranges) == wired(PAGES)
    *_, last = stub.Generate(pb.GenerateRequest(session_id=talked, max_tokens=3))
    assert list(last.done.recalled) == wired(PAGES)
    assert last.done.recall_duration_seconds > 0
    info = stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=talked))
    assert (info.recall_tokens, list(info.recalled)) == (8, wired(PAGES))
    assert info.recall_duration_seconds == last.done.recall_duration_seconds
    assert info.cache_invariant_inv4_violations == 0


def test_a_repeated_request_id_names_nothing_twice(stub: Any, talked: str) -> None:
    first = pb.RecallTokensRequest(session_id=talked, ranges=wired(PAGES), request_id="one")
    assert stub.RecallTokens(first) == stub.RecallTokens(first)
    again = pb.RecallTokensRequest(session_id=talked, ranges=wired(PAGES[:1]), request_id="one")
    assert list(stub.RecallTokens(again).ranges) == wired(PAGES)


def test_bad_ranges_are_refused_by_name(stub: Any, talked: str, runtime: Runtime) -> None:
    plain = stub.CreateSession(pb.CreateSessionRequest()).session_id
    for session_id, ranges, message in (
        (talked, [(0, 999)], "outside the history of 304 tokens"),
        (talked, [(60, 66), (64, 68)], "overlap"),
        (talked, [(60, 70)], "recall_tokens is 8"),
        (plain, [(0, 1)], "no slots for recall"),
    ):
        request = pb.RecallTokensRequest(
            session_id=session_id, ranges=[pb.TokenRange(start=a, end=b) for a, b in ranges]
        )
        with pytest.raises(grpc.RpcError, match=message) as refused:
            stub.RecallTokens(request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError, match="no session") as refused:
        stub.RecallTokens(pb.RecallTokensRequest(session_id="of another"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError, match="from 0 to 8"):
        stub.CreateSession(pb.CreateSessionRequest(recall_tokens=9))
    assert runtime.info(talked).recalled == ()


def test_the_server_says_how_much_it_can_recall(stub: Any) -> None:
    info = stub.GetServerInfo(pb.GetServerInfoRequest())
    assert info.recall_tokens == 8
    assert "recall" in info.features


def test_the_sdk_names_and_remembers(server: Server, runtime: Runtime) -> None:
    async def scenario() -> None:
        async with (
            AsyncClient(server.address) as client,
            await client.create_session(ignore_eos=True, recall_tokens=8) as session,
        ):
            assert (await client.server_info()).recall_tokens == 8
            await session.append(LONG)
            assert await session.recall([(90, 92)], remember=True) == (TokenRange(90, 92),)
            assert await session.recall([PAGES[0], (80, 82)]) == (
                PAGES[0],
                TokenRange(80, 82),
                TokenRange(90, 92),
            )
            assert len([token async for token in session.generate(3)]) == 3
            assert session.last_result is not None
            recalled = session.last_result.recalled
            assert recalled == (PAGES[0], TokenRange(80, 82), TokenRange(90, 92))
            info = await session.info()
            assert (info.recalled, info.remembered) == (recalled, (TokenRange(90, 92),))
            (listed,) = await client.list_sessions()
            assert listed.recalled == recalled
            with pytest.raises(InvalidArgument, match="start cannot be -1"):
                await session.recall([(-1, 3)])

    asyncio.run(scenario())


def test_the_plain_client(server: Server, runtime: Runtime) -> None:
    with Client(server.address) as client, client.create_session(recall_tokens=8) as session:
        session.append(LONG)
        assert session.recall(PAGES) == PAGES
        list(session.generate(2))
        assert session.info().recalled == PAGES


def test_a_fork_has_recalled_the_same(stub: Any, talked: str) -> None:
    stub.RecallTokens(pb.RecallTokensRequest(session_id=talked, ranges=wired(PAGES)))
    list(stub.Generate(pb.GenerateRequest(session_id=talked, max_tokens=3)))
    fork = stub.ForkSession(pb.ForkSessionRequest(session_id=talked)).session_id
    info = stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=fork))
    assert (info.recall_tokens, list(info.recalled)) == (8, wired(PAGES))
