"""A gRPC server over proposers: CapabilityService and ProposerService, for verifiers elsewhere."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import kakeya
from kakeya.errors import Unavailable
from kakeya.grpc_server.front import GrpcFront
from kakeya.grpc_server.status import Context, statuses
from kakeya.serving.config import ServerConfig
from kakeya.serving.keys import KeyRing
from kakeya.wire import distributed_pb2 as pb, distributed_pb2_grpc

if TYPE_CHECKING:  # torch takes a second to import, and the server listens before that
    from kakeya.proposers.blocks import BlockMaker, Customer

_UNDONE_MESSAGES = 256  # of one stream; more wait in the connection
_SERVICES = tuple(pb.DESCRIPTOR.services_by_name.values())

# What goes to a verifier: a message, the error that ends the stream, or None when the verifier has ended it.
_Outgoing = pb.ProposeResponse | Exception | None


class ProposerService(
    distributed_pb2_grpc.CapabilityServiceServicer, distributed_pb2_grpc.ProposerServiceServicer
):
    """Answers UNAVAILABLE until `maker` is set, and once it drains. Every call checks the key first."""

    def __init__(self, keys: KeyRing) -> None:
        self.maker: BlockMaker | None = None
        self._keys = keys
        self._streams: set[asyncio.Queue[_Outgoing]] = set()
        self._draining = False

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        async with self._called(context) as maker:
            desk = maker.desk
            return pb.DescribeResponse(
                version=kakeya.__version__,
                proposer=desk.name,
                model_fingerprint=desk.model_fingerprint,
                tokenizer_digest=desk.tokenizer_digest,
                verifier_fingerprint=desk.verifier_fingerprint,
                block_sizes=[proposer.max_draft for proposer in desk.proposers],
                hidden_layers=desk.hidden_layers,
                max_ahead=desk.max_ahead,
                load=maker.load(),
            )

    async def Propose(self, requests: AsyncIterator[pb.ProposeRequest], context: Context) -> None:
        """Writes each block as it comes. However the call ends, its sessions end with it."""
        async with self._called(context) as maker:
            loop, outgoing = asyncio.get_running_loop(), asyncio.Queue[_Outgoing]()

            def put(item: _Outgoing) -> None:
                loop.call_soon_threadsafe(outgoing.put_nowait, item)

            customer = maker.join(put, put)
            reading = asyncio.create_task(_read(requests, customer, outgoing))
            self._streams.add(outgoing)
            try:
                while (item := await outgoing.get()) is not None:
                    if isinstance(item, Exception):
                        raise item
                    await context.write(item)
            finally:
                self._streams.discard(outgoing)
                reading.cancel()
                customer.leave()

    def drain(self) -> None:
        """End every stream now: verifiers go on without us."""
        self._draining = True
        for outgoing in self._streams:
            outgoing.put_nowait(_leaving())

    @asynccontextmanager
    async def _called(self, context: Context) -> AsyncIterator["BlockMaker"]:
        async with statuses(context):
            self._keys.owner_of(context.invocation_metadata() or ())
            if self._draining:
                raise _leaving()
            if self.maker is None:
                raise Unavailable("the proposer is still loading")
            yield self.maker


class ProposerServer(GrpcFront):
    """Use it from one event loop: `start`, `open` with what makes blocks, `refuse`, `stop`."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config, [service.full_name for service in _SERVICES])
        self._service = ProposerService(KeyRing(config.key_hashes))
        distributed_pb2_grpc.add_CapabilityServiceServicer_to_server(self._service, self._server)
        distributed_pb2_grpc.add_ProposerServiceServicer_to_server(self._service, self._server)

    async def open(self, maker: "BlockMaker") -> None:
        """Serve from now on."""
        self._service.maker = maker
        await self._serving(maker.ended)

    async def refuse(self) -> None:
        """Say NOT_SERVING from now on, and end the streams."""
        self._service.drain()
        await super().refuse()

    def interrupt(self) -> None:
        """Nothing runs that would have to be ended."""


async def _read(requests: AsyncIterator[pb.ProposeRequest], customer: "Customer", outgoing: Any) -> None:
    """Pass on what the verifier says, up to its end, and never much more than is done."""
    count = 0
    async for request in requests:
        customer.apply(request)
        count += 1
        if count % _UNDONE_MESSAGES == 0:
            await asyncio.wrap_future(customer.caught_up())
    outgoing.put_nowait(None)


def _leaving() -> Unavailable:
    return Unavailable("the proposer is shutting down")
