"""`bench overhead`: what it concludes, the same streams through every way in, and servers that misbehave."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kakeya.bench import overhead
from kakeya.bench.overhead import ENGINE, GRPC, HTTP, REQUEST, TURN, Job, Overhead, OverheadResults
from kakeya.bench.page import report_page
from kakeya.bench.processes import ServerProcess
from kakeya.bench.report import Report, as_json, from_json
from kakeya.client import AsyncClient
from kakeya.errors import ConfigError, PeerFailed, RemoteError
from kakeya.options import EngineOptions
from kakeya.runtime import Runtime

counted: list[int] = []


class Counted(Job):
    """A job that tells what its streams gave."""

    def speed(self, counts: Sequence[int], seconds: float) -> float:
        counted[:] = counts
        return super().speed(counts, seconds)


JOB = Counted(prompts=[[5, 9, 22], [13, 7]], tokens=4)
SPEEDS = {
    (ENGINE, TURN): [100.0, 200.0, 50.0],
    (GRPC, TURN): [80.0, 100.0, 20.0],
    (ENGINE, REQUEST): [50.0],
    (GRPC, REQUEST): [50.0],
}
RESULTS = OverheadResults(overhead._rows(SPEEDS), {HTTP: "404"}, bystanders_share=0.01)
TURNS, REQUESTS = "gRPC over the engine, turn", "HTTP over the engine, request"
OTHERS = "share of the machine that others used"


def test_what_is_kept_is_the_ratio_of_the_medians() -> None:
    kept = {(row.front_end, row.work): row.kept for row in RESULTS.front_ends}
    assert kept == {(GRPC, TURN): pytest.approx(0.8), (GRPC, REQUEST): 1.0, (HTTP, REQUEST): None}
    assert RESULTS.front_ends[0].tokens_per_second.samples == (80, 100, 20)
    assert RESULTS.front_ends[2].engine_tokens_per_second.median == 50
    assert from_json(OverheadResults, as_json(RESULTS)) == RESULTS
    page = report_page("t", Report("overhead", {}, {}), Overhead.show(RESULTS))
    assert "<td>404</td>" in page
    assert 'aria-label="Speed beside the engine"' in page


@pytest.mark.parametrize(
    ("share", "limit", "turns", "others"),
    [
        (0.01, 0.95, False, True),
        (0.01, 0.75, True, True),
        (0.2, 0.75, None, False),
        (None, 0.75, True, None),
    ],
)
def test_gates(share: float | None, limit: float, turns: bool | None, others: bool | None) -> None:
    results = OverheadResults(RESULTS.front_ends, RESULTS.absent, bystanders_share=share)
    gates = {gate.name: gate for gate in Overhead(limit=limit).gates(results)}
    assert {name: gate.passed for name, gate in gates.items()} == {
        TURNS: turns,
        REQUESTS: None,
        OTHERS: others,
    }, "a request over gRPC is shown, not judged"
    assert gates[REQUESTS].reason == ("404" if others is not False else gates[TURNS].reason)
    assert "20%" in gates[TURNS].reason or others is not False


@pytest.mark.usefixtures("on_shared_server")
def test_all_sides_take_turns(tiny: dict[str, Any], measure: Callable[..., Any]) -> None:
    measured = measure(Overhead(**tiny, streams=2, tokens=3, history=6, repeats=2))
    assert measured.work == [
        *("engine turn", "gRPC turn", "engine request", "gRPC request", "HTTP request"),
        *("gRPC turn", "engine request", "gRPC request", "HTTP request", "engine turn"),
    ]
    rows = measured.results.front_ends
    assert [(row.front_end, row.work) for row in rows] == [(GRPC, TURN), (GRPC, REQUEST), (HTTP, REQUEST)]
    assert all(len(row.tokens_per_second.samples) == 2 and row.kept > 0 for row in rows)
    assert measured.results.absent == {}
    assert (len(measured.checkpoints), len(measured.gates)) == (2, 3)
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


def test_only_http_may_be_absent() -> None:
    async def refused() -> float:
        raise RemoteError("answered 404")

    async def answered() -> float:
        return 1.0

    sides: Any = {(GRPC, REQUEST): answered, (HTTP, REQUEST): refused}
    assert asyncio.run(overhead._warm_up(sides)) == {HTTP: "answered 404"}
    assert list(sides) == [(GRPC, REQUEST)]
    with pytest.raises(RemoteError, match="answered 404"):
        asyncio.run(overhead._warm_up({(GRPC, TURN): refused}))
    missing = OverheadResults(RESULTS.front_ends)
    assert {gate.reason for gate in Overhead().gates(missing)} >= {"not measured in this run"}


def with_client(server: ServerProcess, work: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
    async def story() -> Any:
        async with AsyncClient(server.address) as client:
            return await work(client)

    return asyncio.run(story())


@pytest.mark.parametrize("work", [TURN, REQUEST])
def test_every_side_gives_every_token_and_keeps_no_session(
    open_tiny: Callable[..., Runtime], tiny_server: ServerProcess, work: str
) -> None:
    runtime = open_tiny()
    assert overhead.through_engine(runtime, JOB, work) > 0
    assert counted == [4, 4]
    assert runtime.list_sessions()[0] == []

    async def by_grpc(client: AsyncClient) -> list[Any]:
        counted.clear()
        assert await overhead.through_grpc(client, JOB, work) > 0
        return await client.list_sessions()

    assert with_client(tiny_server, by_grpc) == []
    assert counted == [4, 4]


def test_http_gives_every_token(tiny_server: ServerProcess) -> None:
    async def by_http(client: AsyncClient) -> float:
        prompts = await overhead.endless_prompts(client, list(range(1, 200)), count=2, history=5, tokens=4)
        counted.clear()
        model = (await client.server_info()).model_id
        return await overhead.through_http(tiny_server.http_address, Counted(prompts, 4), model)

    assert with_client(tiny_server, by_http) > 0
    assert counted == [4, 4]


def test_a_speed_is_all_tokens_over_the_time_and_fewer_are_no_measurement() -> None:
    assert JOB.speed([4, 4], 2.0) == 4.0
    with pytest.raises(RemoteError, match=r"\[3, 4\] tokens instead of 4"):
        JOB.speed([4, 3], 1.0)


def test_prompts_that_end_early_are_passed_over(
    tiny_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(client: AsyncClient) -> Awaitable[list[list[int]]]:
        return overhead.endless_prompts(client, list(range(1, 400)), count=3, history=2, tokens=4)

    async def length(*_: object) -> int:
        return next(lengths)

    # After token 41 the test model says one token and then its end, which is not counted as going on.
    natural = [with_client(tiny_server, lambda c, t=t: overhead._natural_length(c, [t], 2)) for t in (40, 41)]
    assert natural == [2, 1]
    monkeypatch.setattr(overhead, "_natural_length", length)
    lengths = iter([4, 2, 0, 4, 4, 4])
    assert with_client(tiny_server, found) == [[1, 2], [88, 89], [117, 118]]
    lengths = iter([1] * 1000)
    with pytest.raises(ConfigError, match="0 prompts go on for 4 tokens"):
        with_client(tiny_server, found)


def chunked(*events: str) -> bytes:
    """Events as a server sends them, cut in the middle of the text."""
    text = "".join(f"data: {event}\n\n" for event in events).encode()
    middle = len(text) // 2
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (text[:middle], text[middle:]))
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


USAGE = json.dumps({"choices": [], "usage": {"completion_tokens": 4}})
TEXT = json.dumps({"choices": [{"text": "a"}], "usage": None})
WHOLE = chunked(TEXT, TEXT, USAGE, "[DONE]")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (WHOLE, None),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno", "answered 404: no"),
        (chunked(TEXT, USAGE), "ended without its usage"),
        (chunked(TEXT, "[DONE]"), "ended without its usage"),
        (chunked(json.dumps({"error": {"message": "too much"}})), "the HTTP stream failed: too much"),
        (chunked("{not json"), "broke off"),
        (WHOLE[:-30], "broke off"),
        (b"", "broke off"),
    ],
)
def test_a_stream_is_whole_or_an_error(answer: bytes, message: str | None) -> None:
    async def asked() -> float:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return await overhead.through_http(address, Job([[1]], 4), "m")

    if message is None:
        assert asyncio.run(asked()) > 0
    else:
        with pytest.raises(RemoteError, match=message):
            asyncio.run(asked())


def test_no_http_server_is_an_error() -> None:
    with pytest.raises(RemoteError, match="no HTTP connection"):
        asyncio.run(overhead.through_http("127.0.0.1:1", JOB, "m"))


def test_an_engine_process_that_cannot_start_or_died_says_so(tiny: dict[str, Any], tmp_path: Path) -> None:
    with overhead.DirectEngine(EngineOptions(**tiny), 2, JOB) as engine:
        assert asyncio.run(engine.measure(TURN)) > 0
        engine.kill()
        with pytest.raises(PeerFailed, match="it said nothing"):
            asyncio.run(engine.measure(TURN))
    with pytest.raises(PeerFailed, match="absent"):
        overhead.DirectEngine(EngineOptions(model=str(tmp_path / "absent")), 2, JOB)


@pytest.mark.parametrize("name", ["streams", "tokens", "history", "repeats"])
def test_bad_settings_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
        Overhead(**{name: 0})
