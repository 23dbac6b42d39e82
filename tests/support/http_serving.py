"""A real HTTP server over a tiny model: in this process, on the event loop of the test servers."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from kakeya.config import EngineConfig, RuntimeConfig
from kakeya.http_server import HttpServer
from kakeya.metrics import Metrics
from kakeya.runtime import Runtime
from kakeya.serving.admission import Admission
from kakeya.serving.commons import Commons
from kakeya.serving.config import AdmissionConfig, HttpConfig
from support.serving import ENGINE, on_loop

ANY_PORT = HttpConfig(bind="127.0.0.1:0")


def start(
    config: HttpConfig = ANY_PORT,
    admission: AdmissionConfig = AdmissionConfig(),  # noqa: B008 (frozen)
    metrics: Metrics | None = None,
) -> HttpServer:
    """A server that listens and has no runtime yet."""

    async def started() -> HttpServer:
        count = metrics.admission if metrics is not None else None
        server = HttpServer(config, Commons(Admission(admission, count)), metrics)
        await server.start()
        return server

    return on_loop(started())


@contextmanager
def serving_http(
    model: Path,
    config: HttpConfig = ANY_PORT,
    engine: EngineConfig = ENGINE,
    sessions: RuntimeConfig = RuntimeConfig(),  # noqa: B008 (frozen)
    admission: AdmissionConfig = AdmissionConfig(),  # noqa: B008 (frozen)
) -> Iterator[tuple[HttpServer, Runtime]]:
    """A server with its runtime and metrics, drained without grace at the end."""
    metrics = Metrics()
    runtime = Runtime.open(str(model), engine, sessions, metrics)
    server = start(config, admission, metrics)
    on_loop(server.open(runtime))
    try:
        yield server, runtime
    finally:
        on_loop(server.drain(0))


@contextmanager
def client_of(server: HttpServer, key: str = "") -> Iterator[httpx.Client]:
    """A client on connections of its own."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # Nothing is encrypted, and to load certificates takes longer than most tests.
    with httpx.Client(
        base_url=server.url, headers=headers, timeout=30, trust_env=False, verify=False
    ) as client:
        yield client


def raw(server: HttpServer, *parts: bytes, pause: float = 0.0, timeout: float = 10.0) -> bytes:
    """All that the server answers to these bytes until it closes the connection."""
    with connection_to(server, timeout) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def connection_to(server: HttpServer, timeout: float = 10.0) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout)


def eventually(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
