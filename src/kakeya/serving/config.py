"""Frozen settings of servers: where they listen, whom they let in, what they bear."""

from dataclasses import dataclass, field
from datetime import date
from ipaddress import ip_address
from pathlib import Path

from kakeya.checks import check_count, check_seconds, check_seconds_from, host_and_port
from kakeya.errors import ConfigError
from kakeya.types import AdmissionPolicy


@dataclass(frozen=True)
class TlsConfig:
    """PEM files: the server's certificate chain and key, and the authority that client certificates need."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True)
class Listening:
    """Where a front end listens and whom it lets in.

    `key_hashes` are SHA-256 digests: the API keys themselves are not kept. Away from the loopback
    interface both keys and TLS are needed, unless `insecure` says that the risk is known.
    With a `front_hash`, the digest of a cluster's secret, only the cluster's front ends may call. They say in
    whose name they do.
    """

    bind: str
    key_hashes: tuple[bytes, ...] = field(default=(), repr=False)
    tls: TlsConfig | None = None
    insecure: bool = False
    front_hash: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        exposures = self.exposures
        if exposures and not self.insecure:
            raise ConfigError(
                f"{self.bind} is not a loopback address, and {' and '.join(exposures)}; "
                "add the missing option, bind to 127.0.0.1, or accept the risk with --insecure"
            )

    @property
    def host(self) -> str:
        return host_and_port(self.bind)[0]

    @property
    def port(self) -> int:
        return host_and_port(self.bind)[1]

    @property
    def needs_key(self) -> bool:
        """Whether callers have to show anything."""
        return bool(self.key_hashes) or self.front_hash is not None

    @property
    def exposures(self) -> tuple[str, ...]:
        """What makes listening here dangerous. Nothing on the loopback interface."""
        if is_loopback(self.host):
            return ()
        open_door = () if self.needs_key else ("anybody may call it (no --api-key)",)
        plain_text = () if self.tls else ("everything travels in plain text (no --tls-cert)",)
        return open_door + plain_text


@dataclass(frozen=True)
class ServerConfig(Listening):
    """Where the gRPC server listens, whom it lets in and what it bears."""

    bind: str = "127.0.0.1:50051"
    max_concurrent_rpcs: int = 1024
    max_message_bytes: int = 4 * 2**20
    keepalive_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    shutdown_grace_s: float = 30.0

    def __post_init__(self) -> None:
        check_count("max_concurrent_rpcs", self.max_concurrent_rpcs)
        check_count("max_message_bytes", self.max_message_bytes, least=1024)
        check_seconds_from("keepalive_s", self.keepalive_s, 1.0)
        check_seconds_from("keepalive_timeout_s", self.keepalive_timeout_s, 0.1)
        check_seconds_from("shutdown_grace_s", self.shutdown_grace_s, 0.0)
        super().__post_init__()


@dataclass(frozen=True)
class HttpConfig(Listening):
    """Where the HTTP server listens, whom it lets in, what it bears and what it remembers.

    A request must have arrived after `receive_timeout_s` and be answered after `request_timeout_s`
    (0 is no limit). `default_max_tokens` bounds an answer whose client gave no bound. Chat completions say
    that they are deprecated, until `chat_sunset`, unless `chat_deprecation` is off; with `chat_matching`
    up to `held_conversations` of them are held for `held_seconds` to be continued.
    `stored_responses` of each owner are remembered.
    """

    bind: str = "127.0.0.1:8000"
    max_body_bytes: int = 4 * 2**20
    max_connections: int = 1024
    receive_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    keepalive_s: float = 75.0
    cors_origins: tuple[str, ...] = ()
    default_max_tokens: int = 1024
    chat_deprecation: bool = True
    chat_sunset: date = date(2027, 12, 31)
    chat_matching: bool = True
    held_conversations: int = 64
    held_seconds: float = 900.0
    stored_responses: int = 1024

    def __post_init__(self) -> None:
        check_count("max_body_bytes", self.max_body_bytes, least=1024)
        check_count("max_connections", self.max_connections)
        check_seconds_from("receive_timeout_s", self.receive_timeout_s, 0.1)
        check_seconds_from("request_timeout_s", self.request_timeout_s, 0.0)
        check_seconds_from("keepalive_s", self.keepalive_s, 0.1)
        check_count("default_max_tokens", self.default_max_tokens)
        check_count("held_conversations", self.held_conversations, least=0)
        check_seconds("held_seconds", self.held_seconds)
        check_count("stored_responses", self.stored_responses)
        for origin in self.cors_origins:
            _check_origin(origin)
        super().__post_init__()


@dataclass(frozen=True)
class AdmissionConfig:
    """How many requests both servers together let generate at once, and what the others meet.

    `max_concurrent` None is as many as there are sessions. Under `queue` at most `queue_depth` of the others
    wait, each for at most `queue_max_wait_s` (0 is for ever).
    """

    max_concurrent: int | None = None
    policy: AdmissionPolicy = AdmissionPolicy.QUEUE
    queue_max_wait_s: float = 30.0
    queue_depth: int = 1024

    def __post_init__(self) -> None:
        if self.max_concurrent is not None:
            check_count("max_concurrent", self.max_concurrent)
        check_seconds_from("queue_max_wait_s", self.queue_max_wait_s, 0.0)
        check_count("queue_depth", self.queue_depth)


def _check_origin(origin: str) -> None:
    scheme, separator, rest = origin.partition("://")
    is_origin = bool(separator and rest) and scheme in ("http", "https") and not set(rest) & set("/?#@ *")
    if origin != "*" and not is_origin:
        raise ConfigError(f"cors_origins must be like https://example.org or *, got {origin!r}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost counts as reachable."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
