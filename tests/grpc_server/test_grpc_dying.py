"""A device that fails for good, seen over gRPC: clients are told, and so is who watches the health."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kakeya import loading
from kakeya.grpc_server import Server
from kakeya.grpc_server.server import SERVICE_NAME
from kakeya.runtime import Runtime
from kakeya.wire import runtime_pb2 as pb
from support import serving
from support.breaking import REASON, device_of, open_breakable
from support.serving import new_session

PROMPT = [5, 6, 7]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def breakable(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Runtime]]:
    monkeypatch.setattr(loading, "open_backend", open_breakable)
    with serving.serving(model) as live:
        yield live


def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refusal:
        list(call)
    return refusal.value.code(), refusal.value.details()


def test_clients_are_told_and_the_health_turns(breakable: tuple[Server, Runtime]) -> None:
    server, runtime = breakable
    with serving.channel_to(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watched = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=20)
        assert next(watched).status == SERVING
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
            assert next(watched).status == NOT_SERVING
            assert health.Check(health_pb2.HealthCheckRequest()).status == NOT_SERVING
            info = pb.GetSessionInfoRequest(session_id=sessions[0])
            with pytest.raises(grpc.RpcError) as refusal:
                stub.GetSessionInfo(info, timeout=20)
            assert (refusal.value.code(), refusal.value.details()) == told
            assert refused(stub.Generate(pb.GenerateRequest(session_id=sessions[0], max_tokens=1))) == told
        watched.cancel()
