"""What the verbs that serve have in common: from their settings to an event loop that ends cleanly."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from kakeya import logs
from kakeya.cli.command import effective_settings
from kakeya.cli.console import Screen
from kakeya.cli.grpc_options import GrpcOptions
from kakeya.cli.serve_banner import Notices
from kakeya.cli.watching import adopt_foreign_logs, metrics_endpoint
from kakeya.options import SECRETS
from kakeya.serving.config import ServerConfig

if TYPE_CHECKING:
    from kakeya.metrics import BridgeMetrics, Metrics, ProposerMetrics
    from kakeya.serving.lifecycle import FrontEnd, Served

M = TypeVar("M", bound="Metrics | ProposerMetrics | BridgeMetrics")
S = TypeVar("S", bound="Served")


def shows_settings(screen: Screen, context: typer.Context, options: GrpcOptions) -> bool:
    """Show the settings, without the secrets, if that is all that was asked for."""
    if options.print_config:
        for line in effective_settings(context, options, SECRETS):
            screen.line(line)
    return options.print_config


def prepare(options: GrpcOptions, notices: Notices) -> None:
    """Log as the flags say, and say what is dangerous about the way it listens."""
    logs.configure(options.log_level, options.log_format)
    adopt_foreign_logs()
    notices.warn()


def live(
    options: GrpcOptions,
    notices: Notices,
    metrics: M,
    serve: Callable[[str | None], Coroutine[Any, Any, None]],
) -> None:
    """Run `serve` on an event loop. It is given the URL of the metrics, if these are served.

    Raises ConfigError where metrics cannot be served, and what `serve` raises.
    """
    prepare(options, notices)
    with metrics_endpoint(options, metrics) as metrics_url:
        asyncio.run(serve(metrics_url))


def live_alone(
    screen: Screen,
    options: GrpcOptions,
    config: ServerConfig,
    metrics: M,
    make_server: "Callable[[ServerConfig], FrontEnd[S]]",
    load: "Callable[[M], S]",
    banner: "Callable[[S, str, str, str | None], Iterable[str]]",
) -> None:
    """Listen, load, serve and drain: a gRPC server without company.

    `banner` is given what is served, the address, who may call, and the URL of the metrics.
    """
    from kakeya.serving import lifecycle

    notices = Notices(screen, config, options.log_format)

    async def serve(metrics_url: str | None) -> None:
        server = make_server(config)

        def announce(served: S) -> None:
            notices.say(banner(served, server.address, notices.callers(), metrics_url))

        await lifecycle.serve([server], partial(load, metrics), announce, config.shutdown_grace_s)

    live(options, notices, metrics, serve)
