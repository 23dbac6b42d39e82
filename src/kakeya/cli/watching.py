"""What can be watched of a server process: its log, with those of its libraries, and its metrics."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kakeya.cli.grpc_options import GrpcOptions
from kakeya.errors import ConfigError

if TYPE_CHECKING:
    from kakeya.metrics import BridgeMetrics, Metrics, ProposerMetrics


def adopt_foreign_logs() -> None:
    """Write the log lines of gRPC, uvicorn and asyncio where ours go, in the same form."""
    ours = logging.getLogger("kakeya")
    for name in ("grpc", "asyncio", "uvicorn"):
        theirs = logging.getLogger(name)
        theirs.handlers[:] = ours.handlers
        theirs.propagate = False


@contextmanager
def metrics_endpoint(
    options: GrpcOptions, metrics: "Metrics | ProposerMetrics | BridgeMetrics"
) -> Iterator[str | None]:
    """Serve the metrics while the body runs, if a port was given; yields their URL. Raises ConfigError."""
    if options.metrics_port is None:
        yield None
        return
    from prometheus_client import start_http_server

    host, port = options.metrics_host, options.metrics_port
    try:
        endpoint, thread = start_http_server(port, host, metrics.registry)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot serve metrics on {host}:{port}: {error}") from error
    try:
        yield f"http://{host}:{endpoint.server_port}/metrics"
    finally:
        endpoint.shutdown()
        endpoint.server_close()
        thread.join()
