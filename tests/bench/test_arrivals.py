"""Schedules of chats, what came of each over plain sockets, and of all together."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from kakeya.bench.arrivals import (
    UNFINISHED,
    Arrival,
    Bounds,
    Mix,
    Outcome,
    Step,
    Texts,
    measured,
    play,
    play_sessions,
    schedule,
)
from kakeya.client import AsyncClient, Retry
from support.fakes import scripted_http, sse

MIX = Mix((4, 9), (2, 3))
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
HELLO = Arrival(0.0, [{"role": "user", "content": "hello"}], 3)


def piece(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


WHOLE = [
    {"choices": [{"delta": {"role": "assistant", "content": None}}]},
    piece("so"),
    piece(""),
    piece("what"),
]
WHOLE += [{"choices": [], "usage": USAGE}]


def texts() -> Texts:
    """Words as tokens."""
    return Texts(str.split, " ".join, 0)  # type: ignore[arg-type]


def test_a_schedule_follows_from_the_seed() -> None:
    first, again = (schedule(MIX, 3.0, 20.0, texts(), 0) for _ in range(2))
    assert first == again != schedule(MIX, 3.0, 20.0, texts(), 1)
    assert len(first) == 60
    times = [each.at_s for each in first]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] <= 20
    # Poisson arrivals come in clusters.
    assert min(later - earlier for earlier, later in pairwise(times)) < 0.05
    assert {len(each.messages[0]["content"].split()) for each in first} == {4, 9}
    assert {each.max_tokens for each in first} == {2, 3}
    assert len(schedule(MIX, 0.1, 1.0, texts(), 0)) == 1


def test_no_two_chats_begin_alike_but_for_the_system_prompt() -> None:
    passages = texts()
    alone = schedule(MIX, 3.0, 5.0, passages, 0)
    common = schedule(replace(MIX, system="be brief"), 3.0, 5.0, passages, 0)
    said = [each.messages[-1]["content"].split()[0] for each in (*alone, *common)]
    assert len(set(said)) == 30
    assert all(each.messages[0] == {"role": "system", "content": "be brief"} for each in common)
    assert [each.at_s for each in common] == [each.at_s for each in alone]


BOUNDS = Bounds(2.0, 0.06)
GOOD = Outcome([0.5, 0.51, 0.52], 0.53, 3, 10, 4, None)


@pytest.mark.parametrize(
    ("outcome", "first", "good"),
    [
        (GOOD, 0.5, True),
        (replace(GOOD, pieces_s=[2.0, 2.01]), 2.0, True),
        (replace(GOOD, pieces_s=[2.1, 2.11]), 2.1, False),
        (replace(GOOD, pieces_s=[0.1]), 0.1, True),
        (replace(GOOD, pieces_s=[0.1, 0.3, 0.31]), 0.1, False),
        # One gap of thirty may be long, two may not.
        (replace(GOOD, pieces_s=[0.1, *(0.9 + 0.01 * n for n in range(30))]), 0.1, True),
        (replace(GOOD, pieces_s=[0.1, 0.8, *(1.5 + 0.01 * n for n in range(29))]), 0.1, False),
        # An answer that is empty ends in good time or does not.
        (Outcome([], 0.4, failure=None), 0.4, True),
        (Outcome([], 2.4, failure=None), 2.4, False),
        (replace(GOOD, failure=UNFINISHED), 0.5, False),
        (Outcome([], 9.0), 9.0, False),
        (Outcome([], 0.1, failure="answered 500"), None, False),
    ],
)
def test_a_good_chat_keeps_both_bounds_and_ends(outcome: Outcome, first: float | None, good: bool) -> None:
    assert outcome.first_token_s == first
    assert BOUNDS.hold(outcome) is good


def test_the_figures_of_a_step() -> None:
    late, lost = Outcome([3.0, 3.2], 4.0, 2), Outcome([], 0.1, failure="answered 500")
    step = Step("any", "none", 1.0, 10.0, 20.0, None, **measured([GOOD, GOOD, late, lost], BOUNDS))
    assert (step.sent, step.finished, step.good, step.errors) == (4, 2, 2, 1)
    assert step.failures == {UNFINISHED: 1, "answered 500": 1}
    assert (step.goodput, step.good_share, step.tokens_per_s, step.tokens_each) == (0.5, 0.5, 0.4, 2)
    assert (step.first_token_p50_s, step.first_token_p95_s) == pytest.approx((0.5, 2.75))
    assert (step.gap_p50_s, step.gap_p95_s) == pytest.approx((0.01, 0.162))
    assert step.cached_share == 0.4
    assert replace(step, prompt_tokens=0).cached_share is None


def played(address: str, *arrivals: Arrival, until_s: float = 5.0) -> list[Outcome]:
    return asyncio.run(play(address, "any", arrivals, until_s))


def test_what_grpc_refuses_is_a_failure_of_that_chat() -> None:
    async def ask() -> list[Outcome]:
        async with AsyncClient("127.0.0.1:1", retry=Retry(1)) as client:
            return await play_sessions(client, 2, [HELLO, HELLO], 5.0)

    for outcome in asyncio.run(ask()):
        assert outcome.failure is not None
        assert outcome.failure.startswith("the call failed: ")
        assert outcome.tokens == 0


def test_a_chat_is_asked_for_and_read_to_its_end() -> None:
    heard: list[Any] = []

    def script(path: str, body: Any) -> tuple[int, str]:
        heard.append((path, body))
        return 200, sse(WHOLE)

    with scripted_http(script) as address:
        (outcome,) = played(address, HELLO)
    assert outcome.failure is None
    assert (outcome.tokens, outcome.prompt_tokens, outcome.cached_tokens) == (3, 9, 4)
    assert len(outcome.pieces_s) == 2
    assert 0 < outcome.pieces_s[0] <= outcome.pieces_s[1] <= outcome.ended_s
    ((path, body),) = heard
    assert path == "/v1/chat/completions"
    assert (body["messages"], body["max_tokens"]) == (HELLO.messages, 3)
    assert (body["stream"], body["temperature"], body["stream_options"]) == (True, 0, {"include_usage": True})


@pytest.mark.parametrize(
    ("status", "text", "failure"),
    [
        (429, "full", "answered 429: full"),
        (500, "x" * 300, "answered 500: " + "x" * 200),
        (200, sse([piece("so"), {"error": {"message": "lost"}}]), "the stream failed: lost"),
        (200, sse([piece("so")]), "the stream ended without its usage"),
        (200, "data: {broken\n\n", "the stream broke off: JSONDecodeError"),
        (200, sse([{"unheard": 1}]), "the stream broke off: KeyError"),
    ],
)
def test_what_goes_wrong_is_told_and_nobody_else_suffers(status: int, text: str, failure: str) -> None:
    with scripted_http(lambda path, body: (status, text)) as address:
        outcomes = played(address, HELLO, HELLO)
    assert [outcome.failure for outcome in outcomes] == [failure] * 2
    assert played("127.0.0.1:1", HELLO)[0].failure == "the stream broke off: ConnectionRefusedError"


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def against(serve: Serve, *arrivals: Arrival, until_s: float = 5.0) -> list[Outcome]:
    """What comes of chats with a server that does what it likes with connections."""

    async def story() -> list[Outcome]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        try:
            return await play(f"{host}:{port}", "any", arrivals, until_s)
        finally:
            server.close()

    return asyncio.run(story())


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def test_events_are_put_together_across_chunks() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        body = sse(WHOLE).encode()
        for part in (body[:90], body[90:100], body[100:]):
            writer.write(chunk(part))
            await writer.drain()
            await asyncio.sleep(0.05)
        writer.write(chunk(b""))
        writer.close()

    (outcome,) = against(serve, HELLO)
    assert (outcome.failure, outcome.tokens, len(outcome.pieces_s)) == (None, 3, 2)


def test_chats_are_sent_when_they_are_due_whatever_the_server_does() -> None:
    asked: list[float] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.append(time.perf_counter())
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + f"data: {json.dumps(piece('so'))}\n\n".encode())
        await reader.read()  # until the client has gone
        writer.close()

    began = time.perf_counter()
    outcomes = against(serve, *(replace(HELLO, at_s=at) for at in (0.0, 0.2, 0.4)), until_s=0.7)
    assert [at - began for at in asked] == pytest.approx([0.0, 0.2, 0.4], abs=0.15)
    assert {outcome.failure for outcome in outcomes} == {UNFINISHED}
    assert [outcome.tokens for outcome in outcomes] == [1, 1, 1]
    assert [outcome.ended_s for outcome in outcomes] == pytest.approx([0.7, 0.5, 0.3], abs=0.15)
