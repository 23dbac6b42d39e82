"""`bench overhead`: what it concludes, the same streams through every way in, and servers that misbehave."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kakeya.bench import overhead, processes
from kakeya.bench.overhead import (
    ENGINE,
    GRPC,
    HTTP,
    REQUEST,
    TURN,
    DirectEngine,
    FrontEnd,
    Job,
    Overhead,
    OverheadResults,
    endless_prompts,
    through_engine,
    through_grpc,
    through_http,
)
from kakeya.bench.page import report_page
from kakeya.bench.processes import ServerProcess, resident_bytes
from kakeya.bench.report import Gate, Report, as_json, from_json
from kakeya.client import AsyncClient
from kakeya.errors import ConfigError, PeerFailed, RemoteError
from kakeya.options import EngineOptions
from kakeya.runtime import Runtime

counted: list[int] = []


class Counted(Job):
    """A job that tells what its streams gave."""

    def speed(self, counts: Sequence[int], seconds: float) -> float:
        counted.extend(counts)
        return super().speed(counts, seconds)


JOB = Counted(prompts=[[5, 9, 22], [13, 7]], tokens=4)
SPEEDS = {
    (ENGINE, TURN): [100.0, 200.0, 50.0],
    (GRPC, TURN): [80.0, 100.0, 20.0],
    (ENGINE, REQUEST): [50.0],
    (GRPC, REQUEST): [50.0],
}


def results(**changes: Any) -> OverheadResults:
    base = {"front_ends": overhead._rows(SPEEDS), "absent": {HTTP: "404"}, "bystanders_share": 0.01}
    return OverheadResults(**(base | changes))


def verdicts(results: OverheadResults, limit: float = 0.95) -> dict[str, Gate]:
    return {gate.name: gate for gate in Overhead(limit=limit).gates(results)}


def test_what_is_kept_is_the_ratio_of_the_medians() -> None:
    rows: dict[tuple[str, str], FrontEnd] = {(row.front_end, row.work): row for row in results().front_ends}
    assert rows[GRPC, TURN].tokens_per_second.samples == (80, 100, 20)
    assert rows[GRPC, TURN].kept == pytest.approx(0.8)
    assert rows[GRPC, REQUEST].kept == 1.0
    assert rows[HTTP, REQUEST].kept is None
    assert rows[HTTP, REQUEST].engine_tokens_per_second.median == 50
    assert from_json(OverheadResults, as_json(results())) == results()


def test_each_front_end_has_its_gate() -> None:
    gates = verdicts(results())
    assert gates["gRPC over the engine, turn"].passed is False
    assert "gRPC over the engine, request" not in gates, "shown, not judged"
    assert gates["HTTP over the engine, request"].passed is None
    assert gates["HTTP over the engine, request"].reason == "404"
    assert verdicts(results(), limit=0.75)["gRPC over the engine, turn"].passed is True
    unknown = verdicts(results(absent={}))["HTTP over the engine, request"]
    assert unknown.reason == "not measured in this run"


def test_a_busy_machine_is_not_judged_but_named() -> None:
    gates = verdicts(results(bystanders_share=0.2))
    assert gates["gRPC over the engine, turn"].passed is None
    assert "20%" in gates["gRPC over the engine, turn"].reason
    assert gates["share of the machine that others used"].passed is False


def test_a_system_that_does_not_tell_is_judged_all_the_same() -> None:
    gates = verdicts(results(bystanders_share=None), limit=0.75)
    assert gates["gRPC over the engine, turn"].passed is True
    assert gates["share of the machine that others used"].passed is None


@pytest.mark.usefixtures("on_shared_server")
def test_all_sides_take_turns(tiny: dict[str, Any], measure: Callable[..., Any]) -> None:
    measured = measure(Overhead(**tiny, streams=2, tokens=3, history=6, repeats=2))
    assert measured.work == [
        *("engine turn", "gRPC turn", "engine request", "gRPC request", "HTTP request"),
        *("gRPC turn", "engine request", "gRPC request", "HTTP request", "engine turn"),
    ]
    rows = measured.results.front_ends
    assert [(row.front_end, row.work) for row in rows] == [(GRPC, TURN), (GRPC, REQUEST), (HTTP, REQUEST)]
    assert all(len(row.tokens_per_second.samples) == 2 for row in rows)
    assert all(row.kept > 0 for row in rows)
    assert measured.results.absent == {}
    assert len(measured.checkpoints) == 2
    assert len(measured.gates) == 3
    assert 0 <= measured.results.bystanders_share <= 1


@pytest.mark.usefixtures("on_shared_server")
def test_an_end_asked_for_keeps_the_whole_repetitions(
    tiny: dict[str, Any], measure: Callable[..., Any]
) -> None:
    begun: list[str] = []

    def interrupt(work: str) -> None:
        begun.append(work)
        if len(begun) == 7:
            os.kill(os.getpid(), signal.SIGINT)

    measured = measure(Overhead(**tiny, streams=1, tokens=3, history=6, repeats=20), interrupt)
    assert measured.results.abort_reason == "SIGINT"
    assert {len(row.tokens_per_second.samples) for row in measured.results.front_ends} == {1}


async def refused() -> float:
    raise RemoteError("answered 404")


async def answered_well() -> float:
    return 1.0


def test_http_that_does_not_answer_is_absent_with_the_reason() -> None:
    sides: Any = {(GRPC, REQUEST): answered_well, (HTTP, REQUEST): refused}
    assert asyncio.run(overhead._warm_up(sides)) == {HTTP: "answered 404"}
    assert list(sides) == [(GRPC, REQUEST)]
    shown = Overhead.show(results(absent={HTTP: "answered 404"}))
    page = report_page("t", Report("overhead", {}, {}), shown)
    assert "<td>answered 404</td>" in page
    assert 'aria-label="Speed beside the engine"' in page


def test_grpc_that_does_not_answer_is_an_error() -> None:
    with pytest.raises(RemoteError, match="answered 404"):
        asyncio.run(overhead._warm_up({(GRPC, TURN): refused}))


def test_the_engine_gives_every_token_and_keeps_no_session(open_tiny: Callable[..., Runtime]) -> None:
    runtime = open_tiny()
    for work in (TURN, REQUEST):
        counted.clear()
        assert through_engine(runtime, JOB, work) > 0
        assert counted == [4, 4]
        assert runtime.list_sessions()[0] == []


def test_grpc_gives_every_token_and_keeps_no_session(tiny_server: ServerProcess) -> None:
    async def story() -> None:
        async with AsyncClient(tiny_server.address) as client:
            for work in (TURN, REQUEST):
                counted.clear()
                assert await through_grpc(client, JOB, work) > 0
                assert counted == [4, 4]
            assert await client.list_sessions() == []

    asyncio.run(story())


def test_http_gives_every_token(tiny_server: ServerProcess) -> None:
    async def story() -> None:
        async with AsyncClient(tiny_server.address) as client:
            model = (await client.server_info()).model_id
            prompts = await endless_prompts(client, list(range(1, 200)), count=2, history=5, tokens=4)
        counted.clear()
        assert await through_http(str(tiny_server.http_address), Counted(prompts, 4), model) > 0
        assert counted == [4, 4]

    asyncio.run(story())


def test_a_speed_is_all_tokens_over_the_time_and_fewer_are_no_measurement() -> None:
    assert JOB.speed([4, 4], 2.0) == 4.0
    with pytest.raises(RemoteError, match=r"\[3, 4\] tokens instead of 4"):
        JOB.speed([4, 3], 1.0)


def test_prompts_that_end_early_are_passed_over(
    tiny_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter([4, 2, 0, 4, 4, 4])

    async def length(*_: object) -> int:
        return next(lengths)

    monkeypatch.setattr(overhead, "_natural_length", length)
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
            return [await overhead._natural_length(client, [start], 2) for start in (40, 41)]

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
            counted.clear()
            await through_http(address, Counted([[1]], 4), "m")
            return sum(counted)

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


def engine_process(**tiny: Any) -> DirectEngine:
    return DirectEngine(EngineOptions(**tiny), 2, JOB)


def test_an_engine_process_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "ls")
    with pytest.raises(PeerFailed, match="cannot access"):
        engine_process()


def test_an_engine_process_that_does_not_leave_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = tmp_path / "stubborn"
    stubborn.write_text("""#!/bin/sh\necho '"ready"'\nexec sleep 60\n""")
    stubborn.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stubborn))
    monkeypatch.setattr(processes, "PATIENCE_SECONDS", 0.1)
    with engine_process() as engine:
        assert resident_bytes(engine.pid) is not None
    assert resident_bytes(engine.pid) is None


def test_an_engine_process_that_died_says_so(tiny: dict[str, Any]) -> None:
    with engine_process(**tiny) as engine:
        assert engine.measure(TURN) > 0
        engine.kill()
        with pytest.raises(PeerFailed, match="it said nothing"):
            engine.measure(TURN)


@pytest.mark.parametrize("name", ["streams", "tokens", "history", "repeats"])
def test_bad_settings_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
        Overhead(**{name: 0})
