"""Proposers elsewhere: real servers on this process's loop, peers that lie, and the side of the verifier."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from kakeya.config import Calling, EngineConfig
from kakeya.engine.proposer import Proposer
from kakeya.grpc_server.proposer_server import ProposerServer
from kakeya.metrics import ProposerMetrics
from kakeya.proposers.blocks import BlockMaker, Desk
from kakeya.proposers.model import SmallModel
from kakeya.proposers.peers import Peers, Verifier
from kakeya.proposers.remote import RemoteProposer
from kakeya.serving.config import ServerConfig
from kakeya.wire import distributed_pb2 as pb, distributed_pb2_grpc
from support import tiny
from support.serving import ANY_PORT, on_loop

VERIFIER = Verifier("tiny", "same ids", "tiny")
Answer = Callable[[pb.ProposeRequest], Sequence[pb.ProposeResponse | bytes]]


def small_model(directory: Path, config: EngineConfig, max_draft: int = 4) -> SmallModel:
    """Slots for what is guessed ahead, as `kakeya propose` has them."""
    roomy = tiny.engine_config(
        sink=config.cache.sink, window=config.cache.window, spare=64, numerics=config.numerics, threads=1
    )
    return SmallModel(tiny.make_backend(tiny.load(directory, roomy), roomy), max_draft, at_once=16)


def desk(*proposers: Proposer, capacity: int = 4, **changes: Any) -> Desk:
    settings = {"max_ahead": 32, "vocab_size": tiny.VOCAB, "tokenizer_digest": VERIFIER.tokenizer_digest}
    return Desk(proposers, capacity, **(settings | changes))


@contextmanager
def proposing(
    desk: Desk, config: ServerConfig = ANY_PORT, metrics: ProposerMetrics | None = None
) -> Iterator[str]:
    """The address of a server over these proposers."""

    async def started() -> ProposerServer:
        server = ProposerServer(config)
        await server.start()
        return server

    server, maker = on_loop(started()), BlockMaker(desk, metrics).start()
    on_loop(server.open(maker))
    try:
        yield server.address
    finally:
        on_loop(server.refuse())
        on_loop(server.stop(0.2))
        maker.close()


@contextmanager
def remote(*addresses: str, ahead: int = 16, **calling: Any) -> Iterator[RemoteProposer]:
    """The verifier's side."""
    proposer = RemoteProposer(Peers(addresses, VERIFIER, Calling(**calling)), tiny.VOCAB, 4, ahead)
    try:
        yield proposer
    finally:
        proposer.close()


def until(holds: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for something that must come true."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.002)


class Impostor(distributed_pb2_grpc.ProposerServiceServicer, distributed_pb2_grpc.CapabilityServiceServicer):
    """Says whatever `answer` makes of each message; bytes go out as they are. `heard` is what it was told."""

    def __init__(self, answer: Answer, described: pb.DescribeResponse | None = None) -> None:
        self._answer = answer
        self.described = described or pb.DescribeResponse(tokenizer_digest=VERIFIER.tokenizer_digest)
        self.heard: list[pb.ProposeRequest] = []
        self.seconds_away = 0.0
        self.streams = 0

    def Describe(self, request: Any, context: Any) -> pb.DescribeResponse:  # noqa: N802 - the name on the wire
        time.sleep(self.seconds_away)
        return self.described

    def Propose(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        self.streams += 1
        for request in requests:
            self.heard.append(request)
            yield from self._answer(request)

    @contextmanager
    def listening(self) -> Iterator[str]:
        server = grpc.server(ThreadPoolExecutor(4))
        distributed_pb2_grpc.add_CapabilityServiceServicer_to_server(self, server)
        handler = grpc.stream_stream_rpc_method_handler(
            self.Propose,
            request_deserializer=pb.ProposeRequest.FromString,
            response_serializer=lambda said: said if isinstance(said, bytes) else said.SerializeToString(),
        )
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("kakeya.v1.ProposerService", {"Propose": handler})]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def block(session_id: int, epoch: int, position: int, tokens: Sequence[int]) -> pb.ProposeResponse:
    said = pb.Block(epoch=epoch, position=position, token_ids=tokens)
    return pb.ProposeResponse(session_id=session_id, block=said)


class Looker:
    """A proposer that wants hidden states, and guesses how many it has seen."""

    name = "looker"
    is_free = False
    max_draft = 3
    hidden_layers = (0, 1)

    def new_state(self) -> "Seen":
        return Seen()

    def restore(self, tensors: Mapping[str, Any]) -> "Seen":
        return Seen()

    def propose(self, requests: Sequence[Any]) -> Sequence[Sequence[int]]:
        return [[request.state.rows % tiny.VOCAB] * request.limit for request in requests]

    def observe(self, state: "Seen", start: int, hidden: Mapping[int, Any]) -> None:
        assert set(hidden) == {0, 1}
        assert start >= state.rows, "each position once, in order"
        state.rows = start + len(hidden[0])


class Seen:
    """How many positions were shown."""

    def __init__(self, rows: int = 0) -> None:
        self.rows = rows

    def fork(self) -> "Seen":
        return Seen(self.rows)

    def rollback(self, length: int) -> None:
        self.rows = min(self.rows, length)

    def export(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        pass
