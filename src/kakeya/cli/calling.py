"""The flags of every verb that calls a server of ours: with which key, and over TLS."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kakeya.cli.command import ENVIRONMENT_PREFIX
from kakeya.errors import ConfigError

if TYPE_CHECKING:
    from kakeya.dialing import TLS


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """How a server is called. Which one, its verbs say."""

    api_key: Annotated[
        str | None, typer.Option(help="The server's key for you.", envvar=f"{ENVIRONMENT_PREFIX}_API_KEY")
    ] = None
    tls_ca: Annotated[
        str | None, typer.Option(help="Call it over TLS: its authority, PEM, or `system`.", metavar="FILE")
    ] = None
    tls_cert: Annotated[Path | None, typer.Option(help="Our certificate for it, PEM.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None

    def tls(self) -> "TLS | None":
        """None without TLS. Raises ConfigError for certificates that cannot be."""
        from kakeya.dialing import tls_to  # here because it imports gRPC, and help should not wait

        if self.tls_ca is None and (self.tls_cert is not None or self.tls_key is not None):
            raise ConfigError("--tls-cert and --tls-key need --tls-ca, which turns TLS on")
        return tls_to(self.tls_ca, self.tls_cert, self.tls_key)
