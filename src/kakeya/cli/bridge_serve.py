"""`kakeya bridge serve`: runs presets by name for callers elsewhere."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kakeya import logs
from kakeya.cli.command import effective_settings
from kakeya.cli.console import Screen
from kakeya.cli.grpc_options import GrpcOptions, limits, listening
from kakeya.cli.watching import adopt_foreign_logs, metrics_endpoint
from kakeya.errors import ConfigError
from kakeya.options import SECRETS
from kakeya.serving.config import ServerConfig

if TYPE_CHECKING:
    from kakeya.bridge.runs import Runs
    from kakeya.metrics import BridgeMetrics

_runs = partial(typer.Option, rich_help_panel="What runs")


@dataclass(frozen=True)
class BridgeOptions(GrpcOptions):
    """What `kakeya bridge serve` was asked for: one field per flag."""

    manifest: Annotated[
        list[Path] | None, _runs(help="A TOML file with more presets than the package's. Repeatable.")
    ] = None
    runs_dir: Annotated[
        Path | None,
        _runs(help="Where runs and their reports are kept.", show_default="in the user's state directory"),
    ] = None
    bind: Annotated[str, listening(help="HOST:PORT.")] = "127.0.0.1:50071"
    shutdown_grace_s: Annotated[
        float,
        listening(help="Seconds that a run gets to write its report when it is ended, before it is killed."),
    ] = ServerConfig.shutdown_grace_s
    keep_runs: Annotated[int, limits(help="How many runs are kept; the oldest are deleted.")] = 50

    def __post_init__(self) -> None:
        if self.keep_runs < 1:
            raise ConfigError(f"keep-runs must be at least 1, got {self.keep_runs}")


def serve(context: typer.Context, options: BridgeOptions) -> None:
    """Check every setting and every preset, then listen, serve and end what runs."""
    screen = Screen()
    if options.print_config:
        for line in effective_settings(context, options, SECRETS):
            screen.line(line)
        return
    config, load = options.server_config(), _loader(options)
    from kakeya.cli.serve_banner import Notices
    from kakeya.metrics import BridgeMetrics

    logs.configure(options.log_level, options.log_format)
    adopt_foreign_logs()
    notices = Notices(screen, config, options.log_format)
    notices.warn()
    metrics = BridgeMetrics()
    with metrics_endpoint(options, metrics) as metrics_url:

        def announce(runs: "Runs", address: str) -> None:
            notices.say(_banner(runs, address, notices.callers(), metrics_url))

        asyncio.run(_live(config, partial(load, metrics), announce))


async def _live(
    config: ServerConfig, load: "Callable[[], Runs]", announce: "Callable[[Runs, str], None]"
) -> None:
    """Start the server on this loop and live until a signal."""
    from kakeya.bridge.server import BridgeServer
    from kakeya.serving import lifecycle

    server = BridgeServer(config)
    await lifecycle.serve(
        [server], load, lambda runs: announce(runs, server.address), config.shutdown_grace_s
    )


def _loader(options: BridgeOptions) -> "Callable[[BridgeMetrics], Runs]":
    """Check every preset; returns what opens the directory. Raises ConfigError."""
    from kakeya.cli.presets import checked_presets

    presets = checked_presets(options.manifest or ())

    def load(metrics: "BridgeMetrics") -> "Runs":
        from kakeya.bridge.archive import Archive
        from kakeya.bridge.runs import Runs

        archive = Archive(options.runs_dir or _default_directory(), options.keep_runs)
        return Runs(presets, archive, options.shutdown_grace_s, metrics)

    return load


def _default_directory() -> Path:
    import platformdirs

    return Path(platformdirs.user_state_dir("kakeya")) / "bridge"


def _banner(runs: "Runs", address: str, callers: str, metrics_url: str | None) -> Iterator[str]:
    import kakeya

    yield f"kakeya {kakeya.__version__} bridges benchmarks on {address}"
    yield f"  presets   {', '.join(runs.presets)}"
    yield f"  runs      one at a time, kept in {runs.directory}"
    yield f"  callers   {callers}"
    if metrics_url is not None:
        yield f"  metrics   {metrics_url}"
