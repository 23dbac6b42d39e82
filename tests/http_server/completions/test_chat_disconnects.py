"""Clients that leave, engines that fail, servers that stop: nothing stays behind."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kakeya.errors import InvariantViolation
from kakeya.http_server import HttpServer
from kakeya.runtime import Runtime
from kakeya.serving.config import AdmissionConfig
from support.http_clients import CHAT, TEXT, Talker, user
from support.http_serving import ANY_PORT, client_of, connection_to, eventually, serving_http
from support.serving import ENGINE, on_loop
from support.tiny import sequence_of

LONG = {"messages": [user("Hello")], "max_tokens": 2**30, "logit_bias": {"0": -100}}


@pytest.fixture
def rude(model: Path) -> Iterator[tuple[HttpServer, Runtime]]:
    admission = AdmissionConfig(max_concurrent=3)
    with serving_http(model, engine=replace(ENGINE, capacity=3), admission=admission) as live:
        yield live


def nothing_is_left(server: HttpServer, runtime: Runtime) -> bool:
    idle = [info.state for info in runtime.list_sessions(owner="local")[0]]
    return (
        server.state.admission.running == 0
        and not server.state.streams
        and runtime.free_slabs == runtime.describe().capacity
        and idle == []
    )


def send(server: HttpServer, runtime: Runtime, path: str, fields: dict[str, Any]) -> socket.socket:
    body = json.dumps({"model": runtime.describe().model, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection = connection_to(server)
    connection.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    return connection


@pytest.mark.parametrize(
    "path, fields",
    [
        (CHAT, LONG),
        (CHAT, {**LONG, "stream": True}),
        (CHAT, {**LONG, "stream": True, "n": 3}),
        (TEXT, {"prompt": ["a", "b", "c", "d"], "max_tokens": 2**30, "logit_bias": {"0": -100}}),
        (TEXT, {"prompt": "a", "max_tokens": 2**30, "logit_bias": {"0": -100}, "stream": True}),
        (TEXT, {"prompt": [5] * 30000, "max_tokens": 0, "echo": True, "logprobs": 1}),
    ],
)
def test_a_client_that_leaves_takes_everything_with_it(
    rude: tuple[HttpServer, Runtime], path: str, fields: dict[str, Any]
) -> None:
    server, runtime = rude
    connection = send(server, runtime, path, fields)
    eventually(lambda: runtime.free_slabs < 3)
    if fields.get("stream"):
        connection.recv(4096)
    connection.close()
    eventually(lambda: nothing_is_left(server, runtime))


def test_two_hundred_rude_clients(rude: tuple[HttpServer, Runtime]) -> None:
    server, runtime = rude
    tasks = on_loop(_task_count())
    for number in range(200):
        fields = {**LONG, "stream": number % 2 == 0, "n": 1 + number % 3}
        connection = send(server, runtime, CHAT, fields)
        if number % 4 == 0:
            connection.recv(1)
        connection.close()
    eventually(lambda: nothing_is_left(server, runtime))
    eventually(lambda: on_loop(_task_count()) <= tasks)
    with client_of(server) as client:
        assert Talker(client, runtime.describe().model).chat([user("Still there?")], max_tokens=2)["choices"]


async def _task_count() -> int:
    return len(asyncio.all_tasks())


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_is_told_and_leaves_nothing(
    rude: tuple[HttpServer, Runtime], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    server, runtime = rude

    def fail(*args: object) -> None:
        raise RuntimeError("a secret of the machine")

    monkeypatch.setattr(runtime._engine._backend, "run", fail)
    with client_of(server) as client:
        talker = Talker(client, runtime.describe().model)
        if stream:
            with talker.streaming(messages=[user("Hello")]) as events:
                told = list(events)
            error = json.loads(told[-1])["error"]
        else:
            status, error = talker.refusal(messages=[user("Hello")])
            assert status == 500
    assert error["type"] == "server_error"
    eventually(lambda: nothing_is_left(server, runtime))


def test_a_session_that_somebody_closes_ends_its_stream(rude: tuple[HttpServer, Runtime]) -> None:
    server, runtime = rude
    with client_of(server) as client:
        talker = Talker(client, runtime.describe().model)
        with talker.streaming(**LONG) as events:
            for _ in range(3):
                next(events)
            [info] = runtime.list_sessions(owner="local")[0]
            runtime.close_session(info.session_id, owner="local")
            told = list(events)
    assert json.loads(told[-1])["error"]["code"] == "session_not_found"
    eventually(lambda: nothing_is_left(server, runtime))


def test_a_session_that_breaks_ends_its_stream(rude: tuple[HttpServer, Runtime]) -> None:
    server, runtime = rude
    with client_of(server) as client, Talker(client, runtime.describe().model).streaming(**LONG) as events:
        for _ in range(3):
            next(events)
        [info] = runtime.list_sessions(owner="local")[0]
        sequence = sequence_of(runtime, info.session_id)
        broken = InvariantViolation("INV-1", "broken by the test")
        runtime._engine._inbox.ask(lambda: sequence.fail(broken))
        told = list(events)
    assert json.loads(told[-1])["error"]["code"] == "invariant_violation"
    eventually(lambda: nothing_is_left(server, runtime))


def test_a_server_that_stops_tells_its_streams(model: Path) -> None:
    told: list[str] = []
    with serving_http(model) as (server, runtime), client_of(server) as client:
        talker = Talker(client, runtime.describe().model)

        def listen() -> None:
            with talker.streaming(**LONG) as events:
                told.extend(events)

        listener = threading.Thread(target=listen)
        listener.start()
        eventually(lambda: server.state.streams)
        on_loop(server.drain(0.5))
        listener.join(10)
    assert json.loads(told[-1])["error"]["code"] == "unavailable"


def test_nothing_new_begins_in_a_server_that_stops(model: Path) -> None:
    with serving_http(model, ANY_PORT) as (server, runtime):
        on_loop(server.refuse())
        with client_of(server) as client:
            talker = Talker(client, runtime.describe().model)
            for path, fields in ((CHAT, {"messages": [user("Hello")]}), (TEXT, {"prompt": "x"})):
                status, error = talker.refusal(path, **fields)
                assert (status, error["code"]) == (503, "unavailable")


@pytest.mark.parametrize("stream", [False, True])
def test_choices_for_which_there_is_no_room_leave_nothing(
    rude: tuple[HttpServer, Runtime], stream: bool
) -> None:
    server, runtime = rude
    named = runtime.create_session(owner="local")
    with client_of(server) as client:
        status, error = Talker(client, runtime.describe().model).refusal(**LONG, n=3, stream=stream)
    assert (status, error["code"]) == (429, "rate_limit_exceeded")
    runtime.close_session(named, owner="local")
    eventually(lambda: nothing_is_left(server, runtime))
