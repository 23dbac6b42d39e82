"""`kakeya serve`: the gRPC server, from flags to a clean exit."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import typer

from kakeya import tracing
from kakeya.cli.command import ENVIRONMENT_PREFIX, command_of, effective_settings
from kakeya.cli.console import FetchBar, Screen
from kakeya.cli.memory import fitting_capacity
from kakeya.cli.serve_options import SECRETS, ServeOptions
from kakeya.config import ServerConfig
from kakeya.errors import ConfigError

if TYPE_CHECKING:
    from kakeya.metrics import Metrics
    from kakeya.runtime import Runtime


def register(app: typer.Typer) -> None:
    app.command(
        "serve",
        help="Serve sessions over gRPC. Every flag has a KAKEYA_ environment twin; the flag wins.",
        context_settings={"auto_envvar_prefix": ENVIRONMENT_PREFIX},
    )(command_of(ServeOptions, serve))


def serve(context: typer.Context, options: ServeOptions) -> None:
    """Check every setting, then listen, load, serve and drain."""
    screen = Screen()
    if options.print_config:
        for line in effective_settings(context, options, SECRETS):
            screen.line(line)
        return
    server, load = options.server_config(), _loader(screen, options)
    # Later, for these take their time to import, and help should not wait for them.
    from kakeya import logs
    from kakeya.cli.serve_banner import Banner
    from kakeya.metrics import Metrics

    logs.configure(options.log_level, options.log_format)
    _adopt_foreign_logs()
    banner = Banner(screen, server, options.log_format)
    banner.warn()
    metrics = Metrics()
    with _metrics_endpoint(options, metrics) as metrics_url:
        show = partial(banner.show, metrics_url=metrics_url)
        asyncio.run(_live(server, lambda: load(metrics), show))


async def _live(config: ServerConfig, load: "Callable[[], Runtime]", show: Callable[..., None]) -> None:
    """Start the front ends on this loop and live until a signal."""
    from kakeya.grpc_server import Server
    from kakeya.serving import lifecycle

    front = Server(config)

    def announce(runtime: "Runtime") -> None:
        show(runtime.describe(), front.address)

    await lifecycle.serve([front], load, announce, config.shutdown_grace_s)


def _loader(screen: Screen, options: ServeOptions) -> "Callable[[Metrics], Runtime]":
    """What loads the runtime, once every setting it needs is known to be right. Raises ConfigError."""
    engine, sessions, budget = options.engine_config(), options.runtime_config(), options.budget()
    traces = tracing.from_environment(options.model)

    def load(metrics: "Metrics") -> "Runtime":
        from kakeya.models.catalogue import resolve

        with FetchBar(screen) as progress:
            path = resolve(options.model, progress)
        from kakeya.engine.slab import SlabGeometry, available_memory
        from kakeya.models.checkpoint import open_checkpoint
        from kakeya.runtime import Runtime

        model = open_checkpoint(path).config
        geometry = SlabGeometry(
            model.num_layers, model.num_kv_heads, model.head_dim, engine.cache, engine.dtype
        )
        capacity = fitting_capacity(
            options.capacity,
            budget,
            bytes_per_token=geometry.bytes_per_token,
            slots=engine.cache.slots,
            available=available_memory(),
        )
        return Runtime.open(options.model, replace(engine, capacity=capacity), sessions, metrics, traces)

    return load


def _adopt_foreign_logs() -> None:
    """What gRPC and asyncio have to say goes where our own lines go, in the same form."""
    ours = logging.getLogger("kakeya")
    for name in ("grpc", "asyncio"):
        theirs = logging.getLogger(name)
        theirs.handlers[:] = ours.handlers
        theirs.propagate = False


@contextmanager
def _metrics_endpoint(options: ServeOptions, metrics: "Metrics") -> Iterator[str | None]:
    """Serves the metrics meanwhile, if a port was given; their address. Raises ConfigError."""
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
