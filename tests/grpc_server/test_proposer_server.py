"""CapabilityService and ProposerService: keys, health, limits and the drain are those of every server."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kakeya import __version__
from kakeya.grpc_server.proposer_server import ProposerServer
from kakeya.metrics import ProposerMetrics
from kakeya.proposers.blocks import BlockMaker
from kakeya.proposers.ngram import LookUp
from kakeya.serving.config import ServerConfig
from kakeya.serving.keys import hash_key
from kakeya.wire import distributed_pb2 as pb, distributed_pb2_grpc
from support.proposing import Looker, desk, proposing, until
from support.serving import ANY_PORT, channel_to, on_loop

Code = grpc.StatusCode
KEY = (("authorization", "Bearer the-key"),)
GUARDED = ServerConfig(bind="127.0.0.1:0", key_hashes=(hash_key("the-key"),))


def describe(channel: grpc.Channel, **call: Any) -> pb.DescribeResponse:
    stub = distributed_pb2_grpc.CapabilityServiceStub(channel)
    return stub.Describe(pb.DescribeRequest(), timeout=10, **call)  # type: ignore[no-any-return]


def opening(*messages: pb.ProposeRequest, then: threading.Event | None = None) -> Iterator[pb.ProposeRequest]:
    """Messages, and then nothing until the event, if there is one."""
    yield from messages
    if then is not None:
        then.wait(10)


def first_commit(tokens: list[int], wanted: int) -> list[pb.ProposeRequest]:
    return [
        pb.ProposeRequest(session_id=1, open=pb.Open()),
        pb.ProposeRequest(session_id=1, commit=pb.Commit(epoch=1, token_ids=tokens, wanted=wanted)),
    ]


def test_it_says_what_it_is() -> None:
    bound = desk(LookUp(4), Looker(), capacity=3, model_fingerprint="m", verifier_fingerprint="v")
    with proposing(bound) as address, channel_to(address) as channel:
        said = describe(channel)
    assert (said.version, said.proposer, said.max_ahead) == (__version__, "ngram+looker", 32)
    assert (said.model_fingerprint, said.verifier_fingerprint) == ("m", "v")
    assert said.tokenizer_digest == "same ids"
    assert (list(said.block_sizes), list(said.hidden_layers)) == ([4, 3], [0, 1])
    assert (said.load.sessions, said.load.capacity) == (0, 3)


def test_blocks_come_over_the_stream_and_sessions_end_with_it() -> None:
    metrics, over = ProposerMetrics(), threading.Event()
    with proposing(desk(LookUp(4)), metrics=metrics) as address, channel_to(address) as channel:
        messages = first_commit([7, 8, 9, 3, 7, 8, 9], 2)
        messages += [pb.ProposeRequest(session_id=n, open=pb.Open()) for n in range(2, 400)]
        call = distributed_pb2_grpc.ProposerServiceStub(channel).Propose(opening(*messages, then=over))
        said = next(call)
        assert (said.session_id, said.block.position) == (1, 7)
        assert list(said.block.token_ids) == [3, 7]
        sample = metrics.registry.get_sample_value
        until(lambda: sample("kakeya_proposer_sessions") == 399)
        assert sample("kakeya_proposer_streams") == 1
        over.set()
        assert list(call) == [], "who ends the stream is answered by its end"
        until(lambda: sample("kakeya_proposer_sessions") == sample("kakeya_proposer_streams") == 0)


def test_a_stream_that_makes_no_sense_gets_a_status() -> None:
    with proposing(desk(LookUp(4))) as address, channel_to(address) as channel:
        wrong, hold = pb.ProposeRequest(session_id=3, rollback=pb.Rollback()), threading.Event()
        call = distributed_pb2_grpc.ProposerServiceStub(channel).Propose(opening(wrong, then=hold))
        with pytest.raises(grpc.RpcError) as refused:
            next(call)
        hold.set()
    assert refused.value.code() is Code.INVALID_ARGUMENT
    assert "no session 3" in refused.value.details()
    assert dict(refused.value.trailing_metadata())["kakeya-error"] == "InvalidArgument"


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer another"),)])
def test_every_call_needs_a_known_key(metadata: Any) -> None:
    with proposing(desk(LookUp(4)), GUARDED) as address, channel_to(address) as channel:
        stub = distributed_pb2_grpc.ProposerServiceStub(channel)
        for call in (
            lambda: describe(channel, metadata=metadata),
            lambda: next(stub.Propose(iter(()), metadata=metadata)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() is Code.UNAUTHENTICATED
        assert describe(channel, metadata=KEY).version == __version__


def test_health_follows_its_life_and_a_drain_ends_streams() -> None:
    async def started() -> ProposerServer:
        server = ProposerServer(ANY_PORT)
        await server.start()
        return server

    server, maker = on_loop(started()), BlockMaker(desk(LookUp(4))).start()
    with channel_to(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        def status(name: str = "kakeya.v1.ProposerService") -> int:
            return health.Check(health_pb2.HealthCheckRequest(service=name)).status

        assert status() == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as early:
            describe(channel)
        assert (early.value.code(), early.value.details()) == (
            Code.UNAVAILABLE,
            "the proposer is still loading",
        )
        on_loop(server.open(maker))
        for name in ("", "kakeya.v1.ProposerService", "kakeya.v1.CapabilityService"):
            assert status(name) == health_pb2.HealthCheckResponse.SERVING
        hold = threading.Event()
        call = distributed_pb2_grpc.ProposerServiceStub(channel).Propose(
            opening(*first_commit([1], 1), then=hold)
        )
        until(lambda: maker.load().sessions == 1)
        server.interrupt()
        began = time.monotonic()
        on_loop(server.refuse())
        with pytest.raises(grpc.RpcError) as ended:
            next(call)
        hold.set()
        assert (ended.value.code(), ended.value.details()) == (
            Code.UNAVAILABLE,
            "the proposer is shutting down",
        )
        assert time.monotonic() - began < 20, "nobody waits for a stream that never ends by itself"
        assert status() == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as late:
            describe(channel)
        assert late.value.code() is Code.UNAVAILABLE
    on_loop(server.stop(0.2))
    maker.close()
