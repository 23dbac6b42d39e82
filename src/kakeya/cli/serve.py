"""`kakeya serve`: the gRPC and the HTTP server, from flags to a clean exit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kakeya import tracing
from kakeya.cli.command import ENVIRONMENT_PREFIX, command_of
from kakeya.cli.console import FetchBar, Screen
from kakeya.cli.fronts import live, shows_settings
from kakeya.cli.memory import MOST_BY_DEFAULT, fitting_capacity
from kakeya.cli.serve_banner import Banner
from kakeya.cli.serve_options import ServeOptions
from kakeya.config import EngineConfig
from kakeya.garbage import uncollected
from kakeya.serving.config import AdmissionConfig, HttpConfig, ServerConfig

if TYPE_CHECKING:
    from kakeya.grpc_server import Server
    from kakeya.http_server import HttpServer
    from kakeya.metrics import Metrics
    from kakeya.models.checkpoint import Checkpoint
    from kakeya.runtime import Runtime
    from kakeya.serving.commons import Commons

    MakeServer = Callable[[ServerConfig, Commons], Server]


def register(app: typer.Typer) -> None:
    app.command(
        "serve",
        help="Serve sessions over gRPC and HTTP. Every flag has a KAKEYA_ environment twin; the flag wins.",
        context_settings={"auto_envvar_prefix": ENVIRONMENT_PREFIX},
    )(command_of(ServeOptions, serve))


@dataclass(frozen=True)
class Settings:
    """What both servers were asked to be."""

    grpc: ServerConfig
    http: HttpConfig | None
    admission: AdmissionConfig


def serve(context: typer.Context, options: ServeOptions) -> None:
    """Check every setting, then listen, load, serve and drain."""
    screen = Screen()
    if shows_settings(screen, context, options):
        return
    if options.cluster is not None:
        from kakeya.cli.cluster_front import serve_cluster

        serve_cluster(screen, options, options.cluster)
        return
    run(screen, options)


def run(
    screen: Screen,
    options: ServeOptions,
    make_server: "MakeServer | None" = None,
    opened: "Callable[[Server, HttpServer | None], None]" = lambda *_: None,
) -> None:
    """Check every setting, then listen, load, serve and drain. `opened` is told when it serves."""
    settings = Settings(options.server_config(), options.http_config(), options.admission_config())
    load = _loader(screen, options)
    # Imported here because it takes a while to import, and help should not wait for it.
    from kakeya.metrics import Metrics

    state = options.runtime_config().state
    banner = Banner(screen, settings.grpc, settings.http, options.log_format, state)
    metrics = Metrics()

    async def serve(metrics_url: str | None) -> None:
        show = partial(banner.show, metrics_url=metrics_url)
        await _live(settings, metrics, partial(load, metrics), show, make_server, opened)

    live(options, banner, metrics, serve)


async def _live(
    settings: Settings,
    metrics: "Metrics",
    load: "Callable[[], Runtime]",
    show: Callable[..., None],
    make_server: "MakeServer | None",
    opened: "Callable[[Server, HttpServer | None], None]",
) -> None:
    """Start the front ends on this loop and live until a signal."""
    from kakeya.grpc_server import Server
    from kakeya.serving import lifecycle
    from kakeya.serving.admission import Admission
    from kakeya.serving.commons import Commons

    commons = Commons(Admission(settings.admission, metrics.admission))
    grpc = (make_server or Server)(settings.grpc, commons)
    http = _http_server(settings, commons, metrics)
    fronts: list[lifecycle.FrontEnd[Runtime]] = [grpc] if http is None else [grpc, http]

    def announce(runtime: "Runtime") -> None:
        show(runtime.describe(), grpc.address, http_url=None if http is None else http.url)
        opened(grpc, http)

    await lifecycle.serve(fronts, load, announce, settings.grpc.shutdown_grace_s)


def _http_server(settings: Settings, commons: "Commons", metrics: "Metrics") -> "HttpServer | None":
    if settings.http is None:
        return None
    from kakeya.http_server import HttpServer

    return HttpServer(settings.http, commons, metrics)


def planned_capacity(options: ServeOptions, checkpoint: "Checkpoint", engine: EngineConfig) -> int:
    """How many sessions to make room for, beside the model and its proposers. The backend must be chosen.

    Raises ConfigError with the arithmetic when they do not fit.
    """
    from kakeya.engine.backends import room_for_sessions
    from kakeya.engine.slab import prefix_cache_bytes, slab_geometry, undo_bytes
    from kakeya.proposers.opening import device_drafter_shape, proposer_memory

    most = options.capacity or MOST_BY_DEFAULT
    drafter = device_drafter_shape(checkpoint, engine, options.model)
    geometry = slab_geometry(checkpoint.config, engine, drafter.layers if drafter is not None else 0)
    room = room_for_sessions(checkpoint, engine, most, drafter)
    # Proposers' buffers grow with the sessions, too: plan them for no more than fit without them.
    at_most = replace(engine, capacity=max(1, min(most, room // geometry.slab_bytes)))
    proposer_weights, draft_state = proposer_memory(at_most, checkpoint, options.model)

    def beside(sessions: int) -> int:
        config = replace(engine, capacity=sessions)
        shared = prefix_cache_bytes(config, geometry) + undo_bytes(config, geometry)
        return shared + sessions * draft_state

    return fitting_capacity(
        options.capacity,
        options.budget(engine.backend),
        bytes_per_token=geometry.bytes_per_token,
        slots=engine.cache.slots,
        available=room - proposer_weights,
        beside=beside,
    )


def _loader(screen: Screen, options: ServeOptions) -> "Callable[[Metrics], Runtime]":
    """Check every setting that loading needs; returns what loads the runtime. Raises ConfigError."""
    asked, sessions = options.engine_config(), options.runtime_config()
    options.budget()
    known = options.warm_prefixes()
    traces = tracing.from_environment(options.model)

    @uncollected()
    def opened(path: Path, metrics: "Metrics") -> "Runtime":
        from kakeya.engine.backends import chosen_backend
        from kakeya.loading import give_back_memory
        from kakeya.models.checkpoint import open_checkpoint
        from kakeya.runtime import Runtime

        checkpoint, engine = open_checkpoint(path), chosen_backend(asked)
        engine = replace(engine, capacity=planned_capacity(options, checkpoint, engine))
        runtime = Runtime.open(checkpoint, engine, sessions, metrics, traces, name=options.model)
        for prefix in known:
            runtime.warm(prefix.token_ids(runtime.tokenizer))
        del checkpoint  # frees its vocabulary of Python strings
        give_back_memory()
        return runtime

    def load(metrics: "Metrics") -> "Runtime":
        from kakeya.models.catalogue import resolve

        with FetchBar(screen) as progress:
            path = resolve(options.model, progress, asked)
        return opened(path, metrics)

    return load
