"""TLS and mutual TLS: the PEM files, checked before the server listens."""

import ssl
from pathlib import Path

import grpc

from kakeya.config import TlsConfig
from kakeya.errors import ConfigError


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Credentials from the files. Raises ConfigError for one that is unreadable or does not fit."""
    _check(tls)
    client_ca = tls.client_ca.read_bytes() if tls.client_ca is not None else None
    return grpc.ssl_server_credentials(
        [(tls.key.read_bytes(), tls.cert.read_bytes())],
        root_certificates=client_ca,
        require_client_auth=client_ca is not None,
    )


def _check(tls: TlsConfig) -> None:
    """gRPC finds bad files at the first handshake, and only says so to the client: look now."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.cert, tls.key, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise _unusable(f"TLS certificate {tls.cert} with key {tls.key}", error) from error
    if tls.client_ca is not None:
        _check_authority(context, tls.client_ca)


def _check_authority(context: ssl.SSLContext, client_ca: Path) -> None:
    try:
        context.load_verify_locations(client_ca)
    except (OSError, ValueError) as error:
        raise _unusable(f"TLS client authority {client_ca}", error) from error


def _unusable(what: str, error: Exception) -> ConfigError:
    return ConfigError(f"{what} cannot be used: {error}")
