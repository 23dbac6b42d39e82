"""The flags of every gRPC server of ours: where it listens, who may call, limits, what can be watched."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kakeya.cli.command import read_file
from kakeya.errors import ConfigError
from kakeya.logs import LogFormat, LogLevel
from kakeya.options import build
from kakeya.serving.config import ServerConfig, TlsConfig

# A flag in one panel of the help.
listening = partial(typer.Option, rich_help_panel="Listening")
limits = partial(typer.Option, rich_help_panel="Limits")
_callers = partial(typer.Option, rich_help_panel="Who may call")
_watching = partial(typer.Option, rich_help_panel="Watching it")


@dataclass(frozen=True)
class GrpcOptions:
    """What a gRPC server was asked for: one field per flag."""

    bind: Annotated[str, listening(help="HOST:PORT for gRPC.")] = ServerConfig.bind
    tls_cert: Annotated[Path | None, listening(help="Certificate chain, PEM.")] = None
    tls_key: Annotated[Path | None, listening(help="Its key, PEM.")] = None
    tls_client_ca: Annotated[
        Path | None, listening(help="Clients need a certificate of this authority, PEM.")
    ] = None
    insecure: Annotated[
        bool, listening("--insecure", help="Listen beyond this machine without keys or TLS.")
    ] = False
    shutdown_grace_s: Annotated[float, listening(help="Seconds that running work gets to end.")] = (
        ServerConfig.shutdown_grace_s
    )
    keepalive_s: Annotated[float, listening(help="Seconds between pings on a silent connection.")] = (
        ServerConfig.keepalive_s
    )
    keepalive_timeout_s: Annotated[
        float, listening(help="Seconds after which an unanswered ping ends a connection.")
    ] = ServerConfig.keepalive_timeout_s
    api_key: Annotated[
        list[str] | None, _callers(help="A key that may call; each is an owner. Repeatable.")
    ] = None
    api_key_file: Annotated[Path | None, _callers(help="One key per line; # begins a comment.")] = None
    max_concurrent_rpcs: Annotated[int, limits(help="gRPC calls in flight, all clients together.")] = (
        ServerConfig.max_concurrent_rpcs
    )
    max_message_bytes: Annotated[int, limits(help="The longest gRPC message accepted.")] = (
        ServerConfig.max_message_bytes
    )
    metrics_port: Annotated[int | None, _watching(help="Prometheus metrics over HTTP here.")] = None
    metrics_host: Annotated[str, _watching(help="The address to serve them on.")] = "127.0.0.1"
    log_level: Annotated[LogLevel, _watching(help="The least important lines that are logged.")] = (
        LogLevel.INFO
    )
    log_format: Annotated[LogFormat, _watching(help="Lines for people, or JSON for programs.")] = (
        LogFormat.TEXT
    )
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with settings named like the flags.", is_eager=True, callback=read_file),
    ] = None
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show the settings and where they come from, and exit.")
    ] = False

    def server_config(self) -> ServerConfig:
        """The server's settings. Raises ConfigError, also for a bind that is too open."""
        from kakeya.serving.keys import hash_key

        key_hashes = tuple(dict.fromkeys(map(hash_key, self._keys())))
        return build(ServerConfig, {**vars(self), "key_hashes": key_hashes, "tls": self._tls()})

    def _keys(self) -> list[str]:
        given = list(self.api_key or ())
        if self.api_key_file is None:
            return given
        try:
            lines = self.api_key_file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the key file {self.api_key_file} cannot be read: {error}") from error
        keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        if not keys:
            raise ConfigError(f"the key file {self.api_key_file} holds no key")
        return given + keys

    def _tls(self) -> TlsConfig | None:
        if self.tls_cert is not None and self.tls_key is not None:
            return TlsConfig(self.tls_cert, self.tls_key, self.tls_client_ca)
        if self.tls_cert is not None or self.tls_key is not None or self.tls_client_ca is not None:
            raise ConfigError("TLS needs both --tls-cert and --tls-key; --tls-client-ca comes on top of them")
        return None
