"""An HTTP server over one runtime: it listens, then serves, then drains."""

import asyncio
import contextlib
import socket
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from kakeya.errors import ConfigError
from kakeya.http_server.app import create_app
from kakeya.http_server.loaded import load
from kakeya.http_server.protocol import BoundedProtocol, ProtocolConfig
from kakeya.http_server.state import HttpState
from kakeya.serving import lifecycle
from kakeya.serving.commons import Commons
from kakeya.serving.config import HttpConfig
from kakeya.serving.tls import server_context

if TYPE_CHECKING:
    from kakeya.metrics import Metrics
    from kakeya.runtime import Runtime


# What a request gets to clean up after its connection was broken.
_LAST_WORK_S = 1.0


class HttpServer:
    """Use it from one event loop: `start`, `open` with a runtime, `drain`.

    /readyz answers 200 between `open` and `refuse` only, and only while the engine lives.
    """

    def __init__(
        self, config: HttpConfig, commons: Commons | None = None, metrics: "Metrics | None" = None
    ) -> None:
        self._config = config
        self.state = HttpState(config, commons or Commons(), metrics)
        self._uvicorn: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None
        self._port = config.port

    @property
    def address(self) -> str:
        """Where it listens: the real port, when port 0 was asked for."""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"{host}:{self._port}"

    @property
    def url(self) -> str:
        """Its address for a browser or an OpenAI client, without a slash at the end."""
        return f"{'http' if self._config.tls is None else 'https'}://{self.address}"

    async def start(self) -> None:
        """Listen. Requests that need the model are answered 503. Raises ConfigError when that cannot be."""
        self._uvicorn = _Uvicorn(_uvicorn_config(self._app(), self._config))
        listener = self._listen()
        self._port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._uvicorn.serve([listener]), name="kakeya-http")
        await self._uvicorn.is_listening.wait()

    async def open(self, runtime: "Runtime") -> None:
        """Serve from now on."""
        self.state.admission.open(runtime.config.capacity)
        self.state.loaded = await load(self.state, runtime)

    async def refuse(self) -> None:
        """Answer requests for new work 503 from now on, those in the queue included."""
        self.state.is_draining = True
        self.state.admission.close()

    def interrupt(self) -> None:
        """End every generate now; its client is told that the server shuts down."""
        self.state.interrupt()

    async def stop(self, grace_s: float) -> None:
        """Stop listening; connections that still have something to say get the grace."""
        if self._uvicorn is not None and self._serving is not None:
            self._uvicorn.should_exit = True
            done, _ = await asyncio.wait((self._serving,), timeout=grace_s)
            if not done:
                self._uvicorn.hang_up()
                await asyncio.wait((self._serving,), timeout=_LAST_WORK_S)
                self._uvicorn.force_exit = True
            await self._serving
        if self.state.loaded is not None:
            self.state.loaded.responses.close()
            await self.state.loaded.archive.settle()
        self.state.workers.close()

    async def drain(self, grace_s: float) -> bool:
        """Drain this server and its runtime, and close them. True when nothing had to be interrupted."""
        runtime = None if self.state.loaded is None else self.state.loaded.runtime
        return await lifecycle.drain((self,), runtime, grace_s)

    def _app(self) -> ASGIApp:
        return create_app(self.state)

    def _listen(self) -> socket.socket:
        host, port = self._config.host, self._config.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self.address}: {error.strerror or error}; "
                "choose another place with --http HOST:PORT, or do without HTTP with --http off"
            ) from error
        # Connections inherit it. asyncio sets it only on sockets that name TCP, as this one does not; without
        # it an answer's body waits up to 40 ms for the client to acknowledge the headers.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener


class _Uvicorn(uvicorn.Server):
    """uvicorn in a loop that is not its own: signals are somebody else's business."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    def hang_up(self) -> None:
        """Break every connection. Its request sees a client that has gone."""
        connections: Sequence[BoundedProtocol] = tuple(self.server_state.connections)  # type: ignore[arg-type]
        for connection in connections:
            connection.transport.abort()


def _uvicorn_config(app: ASGIApp, config: HttpConfig) -> ProtocolConfig:
    context = None if config.tls is None else server_context(config.tls)
    settings = ProtocolConfig(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=config.keepalive_s,  # type: ignore[arg-type]
        ssl_context_factory=None if context is None else lambda *_: context,
    )
    settings.bounds = config
    return settings
