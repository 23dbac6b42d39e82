"""Where a server listens, what it bears, and what it tells tools."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kakeya.config import ServerConfig, is_loopback
from kakeya.errors import ConfigError
from kakeya.grpc_server import Server
from kakeya.grpc_server.server import SERVICE_NAME
from kakeya.runtime import Runtime
from kakeya.wire import runtime_pb2 as pb
from support import serving
from support.serving import new_session

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
