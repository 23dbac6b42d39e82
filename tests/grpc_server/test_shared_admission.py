"""Generates over gRPC pass the admission that both servers share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kakeya.config import AdmissionConfig
from kakeya.grpc_server import Server
from kakeya.runtime import Runtime
from kakeya.serving.admission import Admission
from kakeya.serving.commons import Commons
from kakeya.types import AdmissionPolicy
from kakeya.wire import runtime_pb2 as pb
from support import serving
from support.http_serving import eventually
from support.serving import new_session, token_ids

ENDLESS = 10_000_000


@contextmanager
def admitting(model: Path, **settings: Any) -> Iterator[tuple[Any, Admission]]:
    """A stub, and the admission of its server."""

    async def started() -> Server:
        server = Server(serving.ANY_PORT, Commons(admission))
        await server.start()
        await server.open(runtime)
        return server

    admission = Admission(AdmissionConfig(**settings))
    runtime = Runtime.open(str(model), serving.ENGINE)
    server = serving.on_loop(started())
    try:
        with serving.connected(server.address) as stub:
            yield stub, admission
    finally:
        serving.on_loop(server.drain(0))


def generate(stub: Any, count: int, **call: Any) -> Any:
    session_id = new_session(stub, [5, 6, 7])
    return stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=count), **call)


def test_a_full_house_rejects_and_a_place_is_given_back_on_every_way_out(model: Path) -> None:
    with admitting(model, max_concurrent=1, policy=AdmissionPolicy.REJECT) as (stub, admission):
        endless = generate(stub, ENDLESS)
        next(endless)
        with pytest.raises(grpc.RpcError) as refused:
            next(generate(stub, 1))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "all 1 places" in refused.value.details()
        endless.cancel()
        eventually(lambda: admission.running == 0)
        assert len(token_ids(generate(stub, 3))) == 3
        with pytest.raises(grpc.RpcError):
            next(stub.Generate(pb.GenerateRequest(session_id="nobody", max_tokens=1)))
        eventually(lambda: admission.running == 0)


def test_a_queue_is_waited_in_and_left(model: Path) -> None:
    with admitting(model, max_concurrent=1) as (stub, admission):
        endless = generate(stub, ENDLESS)
        next(endless)
        with pytest.raises(grpc.RpcError) as late:
            next(generate(stub, 1, timeout=0.3))
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        eventually(lambda: admission.waiting == 0)
        waiting = generate(stub, 3)
        eventually(lambda: admission.waiting == 1)
        endless.cancel()
        assert len(token_ids(waiting)) == 3
        eventually(lambda: admission.running == 0)


def test_a_drain_tells_who_waits(model: Path) -> None:
    with admitting(model, max_concurrent=1) as (stub, admission):
        endless = generate(stub, ENDLESS)
        next(endless)
        waiting = generate(stub, 3)
        eventually(lambda: admission.waiting == 1)

        async def close() -> None:
            admission.close()

        serving.on_loop(close())
        with pytest.raises(grpc.RpcError) as told:
            next(waiting)
        assert told.value.code() is grpc.StatusCode.UNAVAILABLE
        endless.cancel()
