"""A gRPC front end: it listens, says whether it serves, and stops. What it serves is added to it."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kakeya.errors import ConfigError
from kakeya.grpc_server.tls import server_credentials
from kakeya.serving.config import ServerConfig

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class GrpcFront:
    """Health, reflection, TLS and limits, the same for every server. Use it from one event loop.

    The health service says SERVING from `_serving` to `refuse` only, and only while what is served lives.
    """

    def __init__(self, config: ServerConfig, service_names: Sequence[str]) -> None:
        self._config = config
        self._names = service_names
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
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        await self._say(_NOT_SERVING)
        self._port = self._listen()
        await self._server.start()

    async def refuse(self) -> None:
        """Say NOT_SERVING from now on."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Stop listening; calls that still run get the grace."""
        if self._watch is not None:
            self._watch.cancel()
        await self._server.stop(grace_s)

    async def _serving(self, ended: "Future[str | None]") -> None:
        """Say SERVING until what is served dies."""
        await self._say(_SERVING)
        self._watch = asyncio.create_task(self._refuse_when_dead(ended))

    async def _refuse_when_dead(self, ended: "Future[str | None]") -> None:
        if await asyncio.wrap_future(ended) is not None:
            await self._say(_NOT_SERVING)

    async def _say(self, status: Any) -> None:
        for name in ("", *self._names):
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
