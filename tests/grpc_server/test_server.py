"""The life of a gRPC server: where it listens, what it bears, how it drains, and when its device is lost."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kakeya import loading
from kakeya.errors import ConfigError
from kakeya.grpc_server import Server
from kakeya.grpc_server.server import SERVICE_NAME
from kakeya.runtime import Runtime
from kakeya.serving.config import ServerConfig, is_loopback
from kakeya.wire import runtime_pb2 as pb
from support import serving
from support.engines import REASON, device_of, open_breakable
from support.serving import new_session, token_ids

Code = grpc.StatusCode
Health = health_pb2.HealthCheckResponse
PROMPT = [5, 6, 7]


def health_of(server: Server, service: str = SERVICE_NAME) -> int:
    with serving.channel_to(server.address) as channel:
        return (
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service)).status
        )


@pytest.mark.parametrize("service", ["", "kakeya.v1.RuntimeService"])
def test_health_follows_the_runtime(model: Path, service: str) -> None:
    server = serving.start()
    assert health_of(server, service) == Health.NOT_SERVING
    serving.on_loop(server.open(Runtime.open(str(model), serving.ENGINE)))
    assert health_of(server, service) == Health.SERVING
    serving.on_loop(server.drain(0))


def test_reflection_lists_the_services(server: Server) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with serving.channel_to(server.address) as channel:
        (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
    names = {service.name for service in answer.list_services_response.service}
    assert {"kakeya.v1.RuntimeService", "grpc.health.v1.Health"} <= names


def test_a_port_in_use_is_refused(server: Server) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {server.address}"):
        serving.start(ServerConfig(bind=server.address))


def test_ipv6_is_spoken() -> None:
    server = serving.start(ServerConfig(bind="[::1]:0"))
    assert server.address.startswith("[::1]:")
    assert not server.address.endswith(":0")
    assert health_of(server) == Health.NOT_SERVING
    serving.on_loop(server.drain(0))


def test_a_message_that_is_too_long_is_refused(model: Path) -> None:
    config = ServerConfig(bind="127.0.0.1:0", max_message_bytes=1024)
    with serving.serving(model, config) as (server, _), serving.connected(server.address) as stub:
        session_id = new_session(stub, PROMPT)
        with pytest.raises(grpc.RpcError) as refused:
            stub.AppendTokens(pb.AppendTokensRequest(session_id=session_id, token_ids=[300] * 600))
        assert refused.value.code() is Code.RESOURCE_EXHAUSTED
        info = stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session_id))
        assert info.history_length == 3
        # Answers may be longer: a tokenizer is.
        assert len(stub.GetTokenizer(pb.GetTokenizerRequest()).tokenizer_json) > 1024


def test_calls_beyond_the_limit_are_refused(model: Path) -> None:
    config = ServerConfig(bind="127.0.0.1:0", max_concurrent_rpcs=2)
    with serving.serving(model, config) as (server, _), serving.connected(server.address) as stub:
        sessions = [new_session(stub, PROMPT) for _ in range(2)]
        running = [
            stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=1_000_000))
            for session_id in sessions
        ]
        for call in running:
            next(call)
        with pytest.raises(grpc.RpcError) as refused:
            stub.GetServerInfo(pb.GetServerInfoRequest())
        assert refused.value.code() is Code.RESOURCE_EXHAUSTED
        for call in running:
            call.cancel()


@pytest.mark.parametrize(
    "bind, host, port",
    [("127.0.0.1:0", "127.0.0.1", 0), ("[::1]:80", "::1", 80), ("localhost:65535", "localhost", 65535)],
)
def test_an_address_is_host_and_port(bind: str, host: str, port: int) -> None:
    config = ServerConfig(bind=bind)
    assert (config.host, config.port) == (host, port)


@pytest.mark.parametrize(
    "bind", ["", "50051", "localhost", "localhost:", ":50051", "::1:80", "a:99999", "a:-1"]
)
@pytest.mark.parametrize("insecure", [False, True])
def test_what_is_no_address_is_refused(bind: str, insecure: bool) -> None:
    with pytest.raises(ConfigError, match="bind must be HOST:PORT"):
        ServerConfig(bind=bind, insecure=insecure)


@pytest.mark.parametrize(
    "host, local",
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.0.1", False),
        ("example.org", False),
    ],
)
def test_loopback_is_this_machine_alone(host: str, local: bool) -> None:
    assert is_loopback(host) is local


@pytest.mark.parametrize(
    "change, words",
    [
        ({"max_concurrent_rpcs": 0}, "max_concurrent_rpcs must be a whole number"),
        ({"max_message_bytes": 10}, "max_message_bytes must be a whole number from 1024"),
        ({"keepalive_s": 0.5}, "keepalive_s must be a number of seconds from 1 "),
        ({"keepalive_timeout_s": 0}, "keepalive_timeout_s"),
        ({"shutdown_grace_s": -1}, "shutdown_grace_s"),
        ({"shutdown_grace_s": float("nan")}, "shutdown_grace_s"),
    ],
)
def test_a_bad_setting_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**change)


# Draining.


class Reading:
    """A generate that a thread reads to its end."""

    def __init__(self, stub: Any, session_id: str, count: int) -> None:
        self.tokens: list[int] = []
        self.ending: object = None
        self._call = stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=count))
        self.tokens.append(next(self._call).token.id)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for event in self._call:
                if event.WhichOneof("event") == "token":
                    self.tokens.append(event.token.id)
                else:
                    self.ending = event.done.stop_reason
        except grpc.RpcError as error:
            self.ending = error.code()

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


def start(model: Path) -> tuple[Any, Runtime]:
    runtime = Runtime.open(str(model), serving.ENGINE)
    server = serving.start()
    serving.on_loop(server.open(runtime))
    return server, runtime


def test_a_drain_lets_finish_what_can(model: Path) -> None:
    server, _ = start(model)
    with serving.connected(server.address) as stub:
        reading = Reading(stub, new_session(stub, PROMPT), 300)
        assert serving.on_loop(server.drain(20)) is True
        reading.join()
    assert reading.ending == pb.MAX_TOKENS
    assert len(reading.tokens) == 300


def test_a_drain_tells_the_others_and_keeps_to_its_grace(model: Path) -> None:
    server, _ = start(model)
    with serving.connected(server.address) as stub:
        endless = Reading(stub, new_session(stub, PROMPT), 10_000_000)
        short = Reading(stub, new_session(stub, PROMPT), 50)
        began = time.monotonic()
        assert serving.on_loop(server.drain(1.0)) is False
        assert time.monotonic() - began < 10
        endless.join()
        short.join()
        assert endless.ending is Code.UNAVAILABLE
        assert (short.ending, len(short.tokens)) == (pb.MAX_TOKENS, 50)
        with pytest.raises(grpc.RpcError) as gone:
            new_session(stub, timeout=5)
        assert gone.value.code() is Code.UNAVAILABLE


def test_a_draining_server_takes_no_new_work_but_answers(model: Path) -> None:
    server, _ = start(model)
    with serving.connected(server.address) as stub:
        session_id = new_session(stub, PROMPT)
        endless = Reading(stub, new_session(stub, PROMPT), 10_000_000)
        drain = threading.Thread(target=lambda: serving.on_loop(server.drain(2.0)))
        drain.start()
        time.sleep(0.3)
        for method, request in (
            (stub.CreateSession, pb.CreateSessionRequest()),
            (stub.AppendTokens, pb.AppendTokensRequest(session_id=session_id, token_ids=[1])),
            (stub.Generate, pb.GenerateRequest(session_id=session_id, max_tokens=1)),
            (stub.ForkSession, pb.ForkSessionRequest(session_id=session_id)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                list(method(request))
            assert refused.value.code() is Code.UNAVAILABLE
            assert dict(refused.value.trailing_metadata())["kakeya-error"] == "Restarting"
        info = stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session_id))
        assert info.history_length == 3
        stub.CloseSession(pb.CloseSessionRequest(session_id=session_id))
        drain.join(20)
        endless.join()


def test_a_client_that_does_not_read_cannot_hold_up_a_drain(model: Path) -> None:
    server, _ = start(model)
    with serving.connected(server.address) as stub:
        stalled = stub.Generate(
            pb.GenerateRequest(session_id=new_session(stub, PROMPT), max_tokens=10_000_000)
        )
        next(stalled)
        began = time.monotonic()
        serving.on_loop(server.drain(1.0))
        assert time.monotonic() - began < 10
        with pytest.raises(grpc.RpcError):
            token_ids(stalled)


def test_nothing_is_left_behind(model: Path) -> None:
    """The threads of the engine and of the calls end with the server."""
    before = set(threading.enumerate())
    server, _ = start(model)
    with serving.connected(server.address) as stub:
        new_session(stub, PROMPT)
    assert {"kakeya-engine"} <= {thread.name for thread in set(threading.enumerate()) - before}
    serving.on_loop(server.drain(0))
    deadline = time.monotonic() + 5
    while ours := [t.name for t in set(threading.enumerate()) - before if t.name.startswith("kakeya")]:
        assert time.monotonic() < deadline, ours
        time.sleep(0.01)


def test_a_signal_while_loading_ends_at_once() -> None:
    program = (
        "import asyncio, time\nfrom kakeya.serving import lifecycle\n"
        "from kakeya.serving.config import ServerConfig\nfrom kakeya.grpc_server import Server\n"
        "def load():\n    print('loading', flush=True)\n    time.sleep(60)\n"
        "async def main():\n    server = Server(ServerConfig(bind='127.0.0.1:0'))\n"
        "    await lifecycle.serve([server], load, print, 5)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - began < 10


# A device that fails for good.


@pytest.fixture
def breakable(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Runtime]]:
    monkeypatch.setattr(loading, "open_backend", open_breakable)
    with serving.serving(model) as live:
        yield live


def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refusal:
        list(call)
    return refusal.value.code(), refusal.value.details()


def test_clients_of_a_lost_device_are_told_and_the_health_turns(breakable: tuple[Server, Runtime]) -> None:
    server, runtime = breakable
    with serving.channel_to(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watched = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=20)
        assert next(watched).status == Health.SERVING
        with serving.connected(server.address) as stub:
            sessions = [new_session(stub, PROMPT) for _ in range(2)]
            running = [
                stub.Generate(pb.GenerateRequest(session_id=each, max_tokens=2**30), timeout=20)
                for each in sessions
            ]
            for call in running:
                next(call)
            device_of(runtime).breaks_at = "result"
            told = (grpc.StatusCode.UNAVAILABLE, REASON)
            assert [refused(call) for call in running] == [told] * 2
            assert next(watched).status == Health.NOT_SERVING
            assert health.Check(health_pb2.HealthCheckRequest()).status == Health.NOT_SERVING
            info = pb.GetSessionInfoRequest(session_id=sessions[0])
            with pytest.raises(grpc.RpcError) as refusal:
                stub.GetSessionInfo(info, timeout=20)
            assert (refusal.value.code(), refusal.value.details()) == told
            assert refused(stub.Generate(pb.GenerateRequest(session_id=sessions[0], max_tokens=1))) == told
        watched.cancel()
