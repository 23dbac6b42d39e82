"""TLS and mutual TLS: the PEM files, checked before a server listens."""

import ssl
from pathlib import Path

from kakeya.errors import ConfigError
from kakeya.serving.config import TlsConfig


def server_context(tls: TlsConfig) -> ssl.SSLContext:
    """A context from the files. Raises ConfigError for one that is unreadable or does not fit."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.cert, tls.key, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise _unusable(f"TLS certificate {tls.cert} with key {tls.key}", error) from error
    if tls.client_ca is not None:
        _require_clients_of(context, tls.client_ca)
    return context


def _require_clients_of(context: ssl.SSLContext, client_ca: Path) -> None:
    try:
        context.load_verify_locations(client_ca)
    except (OSError, ValueError) as error:
        raise _unusable(f"TLS client authority {client_ca}", error) from error
    context.verify_mode = ssl.CERT_REQUIRED


def _unusable(what: str, error: Exception) -> ConfigError:
    return ConfigError(f"{what} cannot be used: {error}")
