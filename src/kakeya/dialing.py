"""How a program of ours calls a gRPC server: retries, keepalive and TLS, frozen and checked when made."""

from dataclasses import dataclass
from pathlib import Path

import grpc

from kakeya.errors import ConfigError

# Metadata by which a caller names the model that it means, where one address leads to several.
MODEL_KEY = "kakeya-model"
# A tokenizer file can be larger than gRPC's default limit of 4 MiB.
_MAX_MESSAGE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Retry:
    """How often and how patiently a call is tried when the server cannot be reached or a reply is lost.

    The pause doubles from `first_delay` up to `longest_delay` seconds; each is cut at random by up to a half.
    A server that says that it loads or drains is asked again each second, and that counts as no failure.
    Every call that changes something carries a request id, so nothing is done twice. One attempt: no retry.
    """

    attempts: int = 9
    first_delay: float = 0.1
    longest_delay: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"Retry.attempts must be at least 1, got {self.attempts}")
        if not 0 < self.first_delay <= self.longest_delay:
            raise ConfigError(
                "Retry needs 0 < first_delay <= longest_delay, "
                f"got {self.first_delay} and {self.longest_delay}"
            )


@dataclass(frozen=True)
class Keepalive:
    """A call quiet for `interval` seconds asks the server for a sign of life, and waits `timeout` for it."""

    interval: float = 30.0
    timeout: float = 10.0

    def __post_init__(self) -> None:
        if self.interval <= 0 or self.timeout <= 0:
            raise ConfigError(f"Keepalive times must be above 0, got {self.interval} and {self.timeout}")


@dataclass(frozen=True)
class TLS:
    """Encrypt the connection.

    `ca_file` checks the server; left out, the system's authorities do. `cert_file` and `key_file`, both or
    neither, prove who the client is.
    """

    ca_file: Path | str | None = None
    cert_file: Path | str | None = None
    key_file: Path | str | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError("TLS needs cert_file and key_file together, or neither")

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises ConfigError for one that cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=_content(self.ca_file),
            private_key=_content(self.key_file),
            certificate_chain=_content(self.cert_file),
        )


def tls_to(authority: str | None, cert: Path | str | None, key: Path | str | None) -> TLS | None:
    """TLS as settings name it: the authority is a PEM file, or `system`; without one there is no TLS.

    Raises ConfigError for a certificate without its key.
    """
    if authority is None:
        return None
    return TLS(None if authority == "system" else authority, cert, key)


def _content(path: Path | str | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the TLS file {path}: {error.strerror}") from error


def channel_options(retry: Retry, keepalive: Keepalive) -> list[tuple[str, int]]:
    """gRPC's own names for what a client wants of its channel."""
    return [
        ("grpc.keepalive_time_ms", int(keepalive.interval * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive.timeout * 1000)),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        # Reconnecting must not be slower than retrying, or retries fail without having tried.
        ("grpc.initial_reconnect_backoff_ms", int(retry.first_delay * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(retry.longest_delay * 1000)),
        # A client has a connection of its own: none waits behind another's full one.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def dial(target: str, tls: TLS | None, retry: Retry, keepalive: Keepalive) -> grpc.Channel:
    """A channel for threads, which connects when it is first used. Raises ConfigError for a bad TLS file."""
    options = channel_options(retry, keepalive)
    if tls is None:
        return grpc.insecure_channel(target, options)
    return grpc.secure_channel(target, tls.credentials(), options)
