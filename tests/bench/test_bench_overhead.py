"""`bench overhead`: the same streams through every way in, and servers that misbehave."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.bench import direct, line_process, overhead, streams
from kakeya.bench.direct import DirectEngine
from kakeya.bench.machine import Bystanders
from kakeya.bench.overhead import OverheadBench, run
from kakeya.bench.overhead_page import overhead_page
from kakeya.bench.overhead_results import ENGINE, GRPC, HTTP, REQUEST, TURN, Timing
from kakeya.bench.processes import resident_bytes_of
from kakeya.bench.report import Report
from kakeya.bench.server_process import ServerProcess
from kakeya.bench.streams import Job, endless_prompts, through_engine, through_grpc, through_http
from kakeya.client import AsyncClient
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError, PeerFailed, RemoteError
from kakeya.runtime import Runtime

JOB = Job(prompts=[[5, 9, 22], [13, 7]], tokens=4)


@pytest.mark.usefixtures("on_shared_server")
def test_all_sides_take_turns(chat_model: Path, tiny_engine: EngineConfig) -> None:
    bench = OverheadBench(str(chat_model), tiny_engine, streams=2, tokens=3, history=6, repeats=2)
    announced: list[str] = []
    checkpoints: list[Report] = []
    report = run(bench, lambda done, work: announced.append(work), checkpoints.append)
    assert announced == [
        "starting",
        *("engine turn", "gRPC turn", "engine request", "gRPC request", "HTTP request"),
        *("gRPC turn", "engine request", "gRPC request", "HTTP request", "engine turn"),
    ]
    rows = report.results["front_ends"]
    assert [(row["front_end"], row["work"]) for row in rows] == [
        ("gRPC", "turn"),
        ("gRPC", "request"),
        ("HTTP", "request"),
    ]
    assert all(len(row["tokens_per_second"]["samples"]) == 2 for row in rows)
    assert all(row["kept"] > 0 for row in rows)
    assert report.results["absent"] == {}
    assert [partial.partial for partial in checkpoints] == [True, True]
    assert len(report.gates) == 3
    assert 'aria-label="Speed beside the engine"' in overhead_page(report)


async def refused() -> Timing:
    raise RemoteError("answered 404")


async def answered_well() -> Timing:
    return Timing(1, 1.0)


def test_http_that_does_not_answer_is_absent_with_the_reason() -> None:
    sides = {(GRPC, REQUEST): answered_well, (HTTP, REQUEST): refused}
    assert asyncio.run(overhead._warm_up(sides)) == {HTTP: "answered 404"}
    assert list(sides) == [(GRPC, REQUEST)]
    timings = {(GRPC, REQUEST): [Timing(1, 1.0)], (ENGINE, REQUEST): [Timing(1, 1.0)]}
    results = overhead._results(timings, {HTTP: "answered 404"}, Bystanders([]))
    report = Report("overhead", {}, {"cpu": "any", "os": "any"}, results)
    assert "<td>answered 404</td>" in overhead_page(report)


def test_grpc_that_does_not_answer_is_an_error() -> None:
    with pytest.raises(RemoteError, match="answered 404"):
        asyncio.run(overhead._warm_up({(GRPC, TURN): refused}))


def test_the_engine_gives_every_token_and_keeps_no_session(open_tiny: Callable[..., Runtime]) -> None:
    runtime = open_tiny()
    for work in (TURN, REQUEST):
        timing = through_engine(runtime, JOB, work)
        assert timing.tokens == 8
        assert timing.speed == timing.tokens / timing.seconds > 0
        assert runtime.list_sessions()[0] == []


def test_grpc_gives_every_token_and_keeps_no_session(tiny_server: ServerProcess) -> None:
    async def story() -> None:
        async with AsyncClient(tiny_server.address) as client:
            for work in (TURN, REQUEST):
                assert (await through_grpc(client, JOB, work)).tokens == 8
            assert await client.list_sessions() == []

    asyncio.run(story())


def test_http_gives_every_token(tiny_server: ServerProcess) -> None:
    async def story() -> None:
        async with AsyncClient(tiny_server.address) as client:
            model = (await client.server_info()).model_id
            prompts = await endless_prompts(client, list(range(1, 200)), count=2, history=5, tokens=4)
        assert tiny_server.http_address is not None
        assert (await through_http(tiny_server.http_address, Job(prompts, 4), model)).tokens == 8

    asyncio.run(story())


def test_fewer_tokens_are_no_measurement() -> None:
    with pytest.raises(RemoteError, match=r"\[3, 4\] tokens instead of 4"):
        JOB.timing([4, 3], 1.0)


def test_prompts_that_end_early_are_passed_over(
    tiny_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter([4, 2, 0, 4, 4, 4])

    async def length(*_: object) -> int:
        return next(lengths)

    monkeypatch.setattr(streams, "_natural_length", length)
    text = list(range(1, 400))

    async def found(tokens: int) -> list[list[int]]:
        async with AsyncClient(tiny_server.address) as client:
            return await endless_prompts(client, text, count=3, history=2, tokens=tokens)

    assert asyncio.run(found(4)) == [[1, 2], [88, 89], [117, 118]]
    lengths = iter([1] * 1000)
    with pytest.raises(ConfigError, match="0 prompts go on for 4 tokens"):
        asyncio.run(found(4))


def test_an_end_is_not_counted_as_going_on(tiny_server: ServerProcess) -> None:
    """After token 41 the test model says one token and then its end."""

    async def lengths() -> list[int]:
        async with AsyncClient(tiny_server.address) as client:
            return [await streams._natural_length(client, [start], 2) for start in (40, 41)]

    assert asyncio.run(lengths()) == [2, 1]


def chunked(*events: str, head: str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n") -> bytes:
    """Events as a server sends them, cut in the middle of the text."""
    text = "".join(f"data: {event}\n\n" for event in events).encode()
    middle = len(text) // 2
    parts = [part for part in (text[:middle], text[middle:]) if part]
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return head.encode() + body + b"0\r\n\r\n"


USAGE = json.dumps({"choices": [], "usage": {"completion_tokens": 4}})
TEXT = json.dumps({"choices": [{"text": "a"}], "usage": None})


def answered(answer: bytes) -> int:
    """What a completion counts when the server gives this answer."""

    async def story() -> int:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            timing = await through_http(address, Job([[1]], 4), "m")
            return timing.tokens

    return asyncio.run(story())


def test_events_are_put_together_across_chunks() -> None:
    assert answered(chunked(TEXT, TEXT, USAGE, "[DONE]")) == 4


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno", "answered 404: no"),
        (chunked(TEXT, USAGE), "ended without its usage"),
        (chunked(TEXT, "[DONE]"), "ended without its usage"),
        (chunked(json.dumps({"error": {"message": "too much"}})), "the HTTP stream failed: too much"),
        (chunked("{not json"), "broke off"),
        (chunked(TEXT, USAGE, "[DONE]")[:-30], "broke off"),
        (b"", "broke off"),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(answer: bytes, message: str) -> None:
    with pytest.raises(RemoteError, match=message):
        answered(answer)


def test_no_http_server_is_an_error() -> None:
    with pytest.raises(RemoteError, match="no HTTP connection"):
        asyncio.run(through_http("127.0.0.1:1", JOB, "m"))


def test_an_engine_process_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct.sys, "executable", "ls")
    with pytest.raises(PeerFailed, match="cannot access"):
        DirectEngine("m", EngineConfig(), JOB)


def test_an_engine_process_that_does_not_leave_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = tmp_path / "stubborn"
    stubborn.write_text("""#!/bin/sh\necho '"ready"'\nexec sleep 60\n""")
    stubborn.chmod(0o755)
    monkeypatch.setattr(direct.sys, "executable", str(stubborn))
    monkeypatch.setattr(line_process, "PATIENCE_SECONDS", 0.1)
    with DirectEngine("m", EngineConfig(), JOB) as engine:
        assert resident_bytes_of(engine.pid) is not None
    assert resident_bytes_of(engine.pid) is None


def test_an_engine_process_that_died_says_so(chat_model: Path, tiny_engine: EngineConfig) -> None:
    with DirectEngine(str(chat_model), replace(tiny_engine, capacity=2), JOB) as engine:
        assert engine.measure(TURN).tokens == 8
        engine._process.kill()
        engine._process.wait()
        with pytest.raises(PeerFailed, match="it said nothing"):
            engine.measure(TURN)


@pytest.mark.parametrize("name", ["streams", "tokens", "history", "repeats"])
def test_bad_settings_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
        OverheadBench("m", EngineConfig(), **{name: 0})
