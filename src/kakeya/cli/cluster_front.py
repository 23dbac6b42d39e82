"""`kakeya serve --cluster`: a front end of a cluster, from flags to a clean exit."""

import asyncio
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import kakeya
from kakeya import logs
from kakeya.cli.console import Screen
from kakeya.cli.serve_banner import Notices
from kakeya.cli.serve_options import ServeOptions
from kakeya.cli.watching import adopt_foreign_logs
from kakeya.errors import ConfigError
from kakeya.serving.config import HttpConfig, ServerConfig

if TYPE_CHECKING:
    from kakeya.cluster.homes import Homes

log = logging.getLogger(__name__)
_HOMES = "homes:"


def serve_cluster(screen: Screen, options: ServeOptions, address: str) -> None:
    """Check every setting, then listen, find the homes, serve and drain. Raises ConfigError."""
    useless = options.useless_in_front()
    if useless:
        raise ConfigError(
            "a front end keeps no session and computes nothing, and its metrics are at /metrics of --http: "
            f"leave out {', '.join(useless)}, which homes have"
        )
    grpc, http = options.server_config(), options.http_config()
    homes = _homes(options, address)
    logs.configure(options.log_level, options.log_format)
    adopt_foreign_logs()
    notices = Notices(screen, grpc, options.log_format)
    notices.warn()
    asyncio.run(_live(grpc, http, homes, notices))


async def _live(grpc: ServerConfig, http: HttpConfig | None, homes: "Homes", notices: Notices) -> None:
    from kakeya.cluster.grpc_front import ClusterServer
    from kakeya.cluster.http_front import ClusterHttp
    from kakeya.serving import lifecycle

    server = ClusterServer(grpc)
    web = None if http is None else ClusterHttp(http)
    fronts: list[lifecycle.FrontEnd[Homes]] = [server] if web is None else [server, web]

    def announce(found: "Homes") -> None:
        notices.say(_banner(found, server.address, None if web is None else web.url, notices.callers()))

    await lifecycle.serve(fronts, lambda: homes, announce, grpc.shutdown_grace_s)


def _homes(options: ServeOptions, address: str) -> "Homes":
    """The homes, of which none was called yet."""
    from kakeya.cluster.homes import Homes
    from kakeya.cluster.members import read_secret

    if address.startswith(_HOMES):
        if options.cluster_secret is None:
            raise ConfigError("--cluster homes:… needs --cluster-secret FILE beside it")
        seeds = [each for each in address.removeprefix(_HOMES).split(",") if each]
        return Homes(read_secret(options.cluster_secret), seeds)
    from kakeya.cluster.lookup import look_up

    found = look_up(address)

    async def again() -> list[str]:
        return (await asyncio.to_thread(look_up, address)).addresses

    return Homes(found.secret, found.addresses, again)


def _banner(homes: "Homes", address: str, http_url: str | None, callers: str) -> Iterator[str]:
    yield f"kakeya {kakeya.__version__} serves a cluster of {len(homes.homes)} homes on {address}"
    for name, home in sorted(homes.homes.items()):
        figures = f"{home.slabs:,} slabs, {home.sessions:,} sessions"
        yield f"  home      {name}: {home.model}, {figures}, on {home.address}"
    yield f"  callers   {callers}"
    if http_url is not None:
        yield f"  http      {http_url}/ (console), {http_url}/v1 (OpenAI's API), {http_url}/openapi.json"
