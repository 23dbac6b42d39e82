"""A gRPC server over one runtime: it listens, then serves, then drains."""

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kakeya.config import ServerConfig
from kakeya.errors import ConfigError
from kakeya.grpc_server.service import RuntimeService
from kakeya.grpc_server.tls import server_credentials
from kakeya.serving import lifecycle
from kakeya.serving.commons import Commons
from kakeya.serving.keys import KeyRing
from kakeya.serving.workers import Workers
from kakeya.wire import runtime_pb2, runtime_pb2_grpc

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

SERVICE_NAME: str = runtime_pb2.DESCRIPTOR.services_by_name["RuntimeService"].full_name

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Server:
    """Use it from one event loop: `start`, `open` with a runtime, `drain`.

    The health service says SERVING between `open` and `refuse` only, and only while the engine lives. It may
    share the `commons` with another front end.
    """

    def __init__(self, config: ServerConfig, commons: Commons | None = None) -> None:
        self._config = config
        self._workers = Workers()
        self._commons = commons or Commons()
        self._service = RuntimeService(KeyRing(config.key_hashes), self._workers, self._commons)
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=_options(config), maximum_concurrent_rpcs=config.max_concurrent_rpcs
        )
        self._port = config.port
        self._watch: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Where it listens: the real port, when port 0 was asked for."""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"{host}:{self._port}"

    async def start(self) -> None:
        """Listen. Calls are answered UNAVAILABLE for now. Raises ConfigError when that cannot be."""
        runtime_pb2_grpc.add_RuntimeServiceServicer_to_server(self._service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        await self._say(_NOT_SERVING)
        self._port = self._listen()
        await self._server.start()

    async def open(self, runtime: "Runtime") -> None:
        """Serve from now on."""
        self._commons.admission.open(runtime.config.capacity)
        self._service.runtime = runtime
        await self._say(_SERVING)
        self._watch = asyncio.create_task(self._refuse_when_dead(runtime))

    async def refuse(self) -> None:
        """Say NOT_SERVING from now on, also to those that wait to be admitted."""
        self._commons.admission.close()
        await self._health.enter_graceful_shutdown()

    def interrupt(self) -> None:
        """End every generate now; its client is told UNAVAILABLE."""
        self._service.interrupt()

    async def stop(self, grace_s: float) -> None:
        """Stop listening; calls that still run get the grace."""
        if self._watch is not None:
            self._watch.cancel()
        await self._server.stop(grace_s)
        self._workers.close()

    async def drain(self, grace_s: float | None = None) -> bool:
        """Drain this server and its runtime, and close them. True when nothing had to be interrupted."""
        grace = self._config.shutdown_grace_s if grace_s is None else grace_s
        return await lifecycle.drain((self,), self._service.runtime, grace)

    async def _refuse_when_dead(self, runtime: "Runtime") -> None:
        if await asyncio.wrap_future(runtime.ended) is not None:
            await self._say(_NOT_SERVING)

    async def _say(self, status: Any) -> None:
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    def _listen(self) -> int:
        tls = self._config.tls
        try:
            if tls is None:
                return self._server.add_insecure_port(self.address)
            return self._server.add_secure_port(self.address, server_credentials(tls))
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {self.address}: {error}") from error


# gRPC cancels calls at random when more than a thousand wait to be picked up, and any that waits for half a
# minute. Refusing is our business, and says why: see `max_concurrent_rpcs`.
_MAX_PENDING = 1_000_000
_MAX_PENDING_S = 3600


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.server.max_pending_requests", _MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
        ("grpc.server_max_unrequested_time_in_server", _MAX_PENDING_S),
        # Two servers on one port would share its connections without a word.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", round(config.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(config.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients may ping as often as we do, and a little more.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", round(config.keepalive_s * 500)),
    ]
