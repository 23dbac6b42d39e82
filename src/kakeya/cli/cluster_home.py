"""`kakeya cluster home`: one home of a cluster, as a process of its own. `kakeya cluster up` starts them."""

import json
import os
import sys
import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kakeya.cli.console import Screen
from kakeya.cli.serve import run
from kakeya.cli.serve_options import ServeOptions
from kakeya.config import RuntimeConfig, StateConfig
from kakeya.errors import ConfigError
from kakeya.serving.config import HttpConfig, ServerConfig
from kakeya.types import Durability

if TYPE_CHECKING:
    from kakeya.grpc_server import Server
    from kakeya.http_server import HttpServer
    from kakeya.serving.commons import Commons

_member = partial(typer.Option, rich_help_panel="In the cluster")


@dataclass(frozen=True)
class HomeOptions(ServeOptions):
    """What a home was asked for: all of `kakeya serve`, and its place in the cluster."""

    name: Annotated[
        str, _member(help="The home's name: the ids of its sessions begin with it, and it never changes.")
    ] = "home-1"
    shared: Annotated[
        Path | None, _member(help="Directory that all machines of the cluster reach.", metavar="DIR")
    ] = None
    node: Annotated[str, _member(help="The name of this machine, for drains.")] = ""
    label: Annotated[list[str] | None, _member(help="What sessions may ask for. Repeatable.")] = None
    leash: Annotated[
        bool,
        _member("--leash", help="End when the standard input does, as with the process that started it."),
    ] = False

    def __post_init__(self) -> None:
        from kakeya.cluster.members import check_name

        check_name(self.name)
        if self.shared is None:
            raise ConfigError("a home needs --shared DIR, which all machines of the cluster reach")
        if self.state_dir is not None:
            raise ConfigError("a home's state directory is SHARED/homes/NAME: leave out --state-dir")
        if self.durability is Durability.NONE:
            raise ConfigError("a home stores tokens before it sends them: --durability none cannot be used")
        if self.http == "off":
            raise ConfigError("front ends reach a home over HTTP as well: --http off cannot be used")

    @property
    def secret(self) -> str:
        """Raises ConfigError when it cannot be read."""
        from kakeya.cluster.members import read_secret

        assert self.shared is not None
        return read_secret(self.cluster_secret or self.shared / "secret")

    def runtime_config(self) -> RuntimeConfig:
        from kakeya.cluster.members import prefix_of

        return replace(super().runtime_config(), session_prefix=prefix_of(self.name))

    def _state_config(self) -> StateConfig:
        assert self.shared is not None
        directory = self.shared.expanduser() / "homes" / self.name
        return replace(self._state_in(directory), fenced=True)

    def server_config(self) -> ServerConfig:
        from kakeya.serving.keys import hash_key

        return replace(super().server_config(), key_hashes=(), front_hash=hash_key(self.secret))

    def http_config(self) -> HttpConfig | None:
        from kakeya.serving.keys import hash_key

        config = super().http_config()
        return None if config is None else replace(config, key_hashes=(), front_hash=hash_key(self.secret))


def home(context: typer.Context, options: HomeOptions) -> None:
    """Serve as a home until a signal, or with `--leash` until the standard input ends."""
    if options.leash:
        threading.Thread(target=_end_with_input, name="kakeya-input", daemon=True).start()
    run(Screen(), options, partial(_make_server, options), _announce)


def _make_server(options: HomeOptions, config: ServerConfig, commons: "Commons") -> "Server":
    from kakeya.cluster.home import HomeConfig, HomeServer

    labels = tuple(options.label or ())
    return HomeServer(config, commons, HomeConfig(options.name, options.secret, options.node, labels))


def _announce(server: "Server", http: "HttpServer | None") -> None:
    """Tell whoever started us where we are, in one line of JSON."""
    from kakeya.cluster.home import HomeServer

    assert isinstance(server, HomeServer)
    assert http is not None
    server.home.http_url = http.url
    sys.stdout.write(json.dumps({"address": server.address, "http": http.url}) + "\n")
    sys.stdout.flush()


def _end_with_input() -> None:
    """Who started this process has died: so does the home, which is started elsewhere."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)
