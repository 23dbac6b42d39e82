"""gRPC's credentials from the PEM files of TLS and mutual TLS."""

import grpc

from kakeya.serving.config import TlsConfig
from kakeya.serving.tls import server_context


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Credentials from the files. Raises ConfigError for one that is unreadable or does not fit."""
    # gRPC finds bad files at the first handshake, and only says so to the client: look now.
    server_context(tls)
    client_ca = tls.client_ca.read_bytes() if tls.client_ca is not None else None
    return grpc.ssl_server_credentials(
        [(tls.key.read_bytes(), tls.cert.read_bytes())],
        root_certificates=client_ca,
        require_client_auth=client_ca is not None,
    )
