"""A gRPC server over one runtime: it listens, then serves, then drains."""

from typing import TYPE_CHECKING

from kakeya.grpc_server.front import GrpcFront
from kakeya.grpc_server.service import RuntimeService
from kakeya.serving import lifecycle
from kakeya.serving.commons import Commons
from kakeya.serving.config import ServerConfig
from kakeya.serving.keys import KeyRing
from kakeya.serving.workers import Workers
from kakeya.wire import runtime_pb2, runtime_pb2_grpc

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

SERVICE_NAME: str = runtime_pb2.DESCRIPTOR.services_by_name["RuntimeService"].full_name


class Server(GrpcFront):
    """Use it from one event loop: `start`, `open` with a runtime, `drain`.

    The health service says SERVING between `open` and `refuse` only, and only while the engine lives. It may
    share the `commons` with another front end.
    """

    def __init__(self, config: ServerConfig, commons: Commons | None = None) -> None:
        super().__init__(config, (SERVICE_NAME,))
        self._workers = Workers()
        self._commons = commons or Commons()
        keys = KeyRing(config.key_hashes, config.front_hash)
        self._service = RuntimeService(keys, self._workers, self._commons)
        runtime_pb2_grpc.add_RuntimeServiceServicer_to_server(self._service, self._server)

    async def open(self, runtime: "Runtime") -> None:
        """Serve from now on."""
        self._commons.admission.open(runtime.config.capacity)
        self._service.runtime = runtime
        await self._serving(runtime.ended)

    async def refuse(self) -> None:
        """Say NOT_SERVING from now on, also to those that wait to be admitted."""
        self._commons.admission.close()
        await super().refuse()

    def interrupt(self) -> None:
        """End every generate now; its client is told UNAVAILABLE."""
        self._service.interrupt()

    async def stop(self, grace_s: float) -> None:
        """Stop listening; calls that still run get the grace."""
        await super().stop(grace_s)
        self._workers.close()

    async def drain(self, grace_s: float | None = None) -> bool:
        """Drain this server and its runtime, and close them. True when nothing had to be interrupted."""
        grace = self._config.shutdown_grace_s if grace_s is None else grace_s
        return await lifecycle.drain((self,), self._service.runtime, grace)
