"""`kakeya bridge serve`: runs presets by name for callers elsewhere."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kakeya.cli.console import Screen
from kakeya.cli.fronts import live_alone, shows_settings
from kakeya.cli.grpc_options import GrpcOptions, limits, listening
from kakeya.errors import ConfigError
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
    if shows_settings(screen, context, options):
        return
    config, load = options.server_config(), _loader(options)
    # Imported here because they take a while to import, and help should not wait for them.
    from kakeya.bridge.server import BridgeServer
    from kakeya.metrics import BridgeMetrics

    live_alone(screen, options, config, BridgeMetrics(), BridgeServer, load, _banner)


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
