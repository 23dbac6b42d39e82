"""The flags of `kakeya serve`, each with its KAKEYA_ environment twin, and the settings they become."""

from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kakeya.cli import options
from kakeya.cli.command import read_file
from kakeya.cli.memory import DEFAULT_BUDGETS, Budget
from kakeya.config import (
    DEFAULT_MODEL,
    AdmissionConfig,
    CacheConfig,
    EngineConfig,
    HttpConfig,
    Quotas,
    RuntimeConfig,
    ServerConfig,
    TlsConfig,
)
from kakeya.errors import ConfigError
from kakeya.types import AdmissionPolicy, BackendChoice

_LISTEN = "Listening"
_WHO = "Who may call"
_LIMITS = "Limits"
_HTTP = "HTTP"
_WATCH = "Watching it"

OFF = "off"
# Options whose values are never written anywhere.
SECRETS = frozenset({"api_key"})


class LogFormat(StrEnum):
    """Lines for people, or one JSON object per line."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least important line that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class ServeOptions:
    """What `kakeya serve` was asked for: one field per flag."""

    model: options.Model = DEFAULT_MODEL
    backend: options.Backend = EngineConfig.backend
    sink: options.Sink = CacheConfig.sink
    window: options.Window = CacheConfig.window
    dtype: options.Dtype = EngineConfig.dtype
    weights: options.Weights = EngineConfig.weights
    numerics: options.NumericMode = EngineConfig.numerics
    kernels: options.Kernels = EngineConfig.kernels
    threads: options.Threads = None
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(
            help="The most tokens of one engine step; when left out 256 on a CPU, and on CUDA enough for a "
            "prompt's block of 2,048 beside a token of every session.",
            rich_help_panel=options.MEMORY,
        ),
    ] = None
    capacity: Annotated[
        int | None,
        typer.Option(
            help="Sessions that may exist at once; what the budget holds when left out.",
            rich_help_panel=options.MEMORY,
        ),
    ] = None
    memory_budget: Annotated[
        str | None,
        typer.Option(
            help="Memory for all sessions: 8GB, 512MiB, or a share of what is free: "
            "25% on a CPU and 90% of what the model leaves on CUDA when left out.",
            rich_help_panel=options.MEMORY,
        ),
    ] = None
    bind: Annotated[str, typer.Option(help="HOST:PORT for gRPC.", rich_help_panel=_LISTEN)] = (
        ServerConfig.bind
    )
    http: Annotated[
        str,
        typer.Option(
            help="HOST:PORT for HTTP: OpenAI's API and the console; or off.", rich_help_panel=_LISTEN
        ),
    ] = HttpConfig.bind
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate chain, PEM.", rich_help_panel=_LISTEN)
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.", rich_help_panel=_LISTEN)] = None
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="Clients need a certificate of this authority, PEM.", rich_help_panel=_LISTEN),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Listen beyond this machine without keys or TLS.", rich_help_panel=_LISTEN
        ),
    ] = False
    shutdown_grace_s: Annotated[
        float, typer.Option(help="Seconds that running work gets to end.", rich_help_panel=_LISTEN)
    ] = ServerConfig.shutdown_grace_s
    keepalive_s: Annotated[
        float, typer.Option(help="Ping silent connections so often.", rich_help_panel=_LISTEN)
    ] = ServerConfig.keepalive_s
    keepalive_timeout_s: Annotated[
        float, typer.Option(help="Drop a connection whose ping is unanswered.", rich_help_panel=_LISTEN)
    ] = ServerConfig.keepalive_timeout_s
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that may call; each is an owner. Repeatable.", rich_help_panel=_WHO),
    ] = None
    api_key_file: Annotated[
        Path | None, typer.Option(help="One key per line; # begins a comment.", rich_help_panel=_WHO)
    ] = None
    max_concurrent: Annotated[
        int | None,
        typer.Option(
            help="Requests that generate at once, gRPC and HTTP together; the capacity when left out.",
            rich_help_panel=_LIMITS,
        ),
    ] = AdmissionConfig.max_concurrent
    admission: Annotated[
        AdmissionPolicy, typer.Option(help="What the others meet.", rich_help_panel=_LIMITS)
    ] = AdmissionConfig.policy
    queue_max_wait_s: Annotated[
        float, typer.Option(help="The longest wait in the queue; 0 is for ever.", rich_help_panel=_LIMITS)
    ] = AdmissionConfig.queue_max_wait_s
    queue_depth: Annotated[int, typer.Option(help="Requests that may wait.", rich_help_panel=_LIMITS)] = (
        AdmissionConfig.queue_depth
    )
    max_concurrent_rpcs: Annotated[
        int, typer.Option(help="gRPC calls in flight, all clients together.", rich_help_panel=_LIMITS)
    ] = ServerConfig.max_concurrent_rpcs
    max_message_bytes: Annotated[
        int, typer.Option(help="The longest gRPC message accepted.", rich_help_panel=_LIMITS)
    ] = ServerConfig.max_message_bytes
    session_idle_ttl_s: Annotated[
        float,
        typer.Option(help="Close sessions unused for so long; 0 is never.", rich_help_panel=_LIMITS),
    ] = 1800.0
    quota_sessions: Annotated[
        int | None, typer.Option(help="Sessions of one owner.", rich_help_panel=_LIMITS)
    ] = None
    quota_concurrent_requests: Annotated[
        int | None, typer.Option(help="Generates of one owner at once.", rich_help_panel=_LIMITS)
    ] = None
    quota_tokens_per_minute: Annotated[
        int | None,
        typer.Option(help="Tokens of one owner, appended and generated.", rich_help_panel=_LIMITS),
    ] = None
    max_connections: Annotated[
        int, typer.Option(help="Open connections, all clients together.", rich_help_panel=_HTTP)
    ] = HttpConfig.max_connections
    max_body_bytes: Annotated[int, typer.Option(help="The longest body accepted.", rich_help_panel=_HTTP)] = (
        HttpConfig.max_body_bytes
    )
    receive_timeout_s: Annotated[
        float, typer.Option(help="A request must have arrived after so long.", rich_help_panel=_HTTP)
    ] = HttpConfig.receive_timeout_s
    request_timeout_s: Annotated[
        float, typer.Option(help="And be answered after so long; 0 is no limit.", rich_help_panel=_HTTP)
    ] = HttpConfig.request_timeout_s
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Pages from here may call: https://… or *. Repeatable.", rich_help_panel=_HTTP),
    ] = None
    default_max_tokens: Annotated[
        int, typer.Option(help="The longest answer to who gives no limit.", rich_help_panel=_HTTP)
    ] = HttpConfig.default_max_tokens
    stored_responses: Annotated[
        int, typer.Option(help="Responses of one owner that can be continued.", rich_help_panel=_HTTP)
    ] = HttpConfig.stored_responses
    chat_matching: Annotated[
        bool, typer.Option(help="Continue chats whose messages are resent.", rich_help_panel=_HTTP)
    ] = HttpConfig.chat_matching
    held_conversations: Annotated[
        int, typer.Option(help="How many are held for that.", rich_help_panel=_HTTP)
    ] = HttpConfig.held_conversations
    chat_deprecation: Annotated[
        bool, typer.Option(help="Say that chat completions are deprecated.", rich_help_panel=_HTTP)
    ] = HttpConfig.chat_deprecation
    chat_sunset: Annotated[
        str, typer.Option(help="The day on which they end.", metavar="YYYY-MM-DD", rich_help_panel=_HTTP)
    ] = HttpConfig.chat_sunset.isoformat()
    metrics_port: Annotated[
        int | None, typer.Option(help="Prometheus metrics over HTTP here.", rich_help_panel=_WATCH)
    ] = None
    metrics_host: Annotated[str, typer.Option(help="The address for them.", rich_help_panel=_WATCH)] = (
        "127.0.0.1"
    )
    log_level: Annotated[LogLevel, typer.Option(help="How much to say.", rich_help_panel=_WATCH)] = (
        LogLevel.INFO
    )
    log_format: Annotated[LogFormat, typer.Option(help="For whom to say it.", rich_help_panel=_WATCH)] = (
        LogFormat.TEXT
    )
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with settings named like the flags.", is_eager=True, callback=read_file),
    ] = None
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show the settings and where they come from, and exit.")
    ] = False

    def engine_config(self) -> EngineConfig:
        """The engine's settings, before the capacity is known. Raises ConfigError."""
        return options.engine_config(
            backend=self.backend,
            sink=self.sink,
            window=self.window,
            dtype=self.dtype,
            weights=self.weights,
            numerics=self.numerics,
            kernels=self.kernels,
            threads=self.threads,
            capacity=1 if self.capacity is None else self.capacity,
            max_batch_tokens=self.max_batch_tokens,
        )

    def runtime_config(self) -> RuntimeConfig:
        """How sessions are kept. Raises ConfigError."""
        return RuntimeConfig(
            session_idle_ttl_s=self.session_idle_ttl_s or None,
            quotas=Quotas(
                max_sessions=self.quota_sessions,
                max_concurrent_requests=self.quota_concurrent_requests,
                tokens_per_minute=self.quota_tokens_per_minute,
            ),
        )

    def budget(self, backend: BackendChoice = BackendChoice.CPU) -> Budget:
        """The memory for sessions, where the backend is decided. Raises ConfigError."""
        return Budget.parse(DEFAULT_BUDGETS[backend] if self.memory_budget is None else self.memory_budget)

    def server_config(self) -> ServerConfig:
        """The server's settings. Raises ConfigError, also for a bind that is too open."""
        from kakeya.serving.keys import hash_key

        return ServerConfig(
            bind=self.bind,
            key_hashes=tuple(dict.fromkeys(map(hash_key, self._keys()))),
            tls=self._tls(),
            insecure=self.insecure,
            max_concurrent_rpcs=self.max_concurrent_rpcs,
            max_message_bytes=self.max_message_bytes,
            keepalive_s=self.keepalive_s,
            keepalive_timeout_s=self.keepalive_timeout_s,
            shutdown_grace_s=self.shutdown_grace_s,
        )

    def admission_config(self) -> AdmissionConfig:
        """How many requests generate at once. Raises ConfigError."""
        return AdmissionConfig(
            max_concurrent=self.max_concurrent,
            policy=self.admission,
            queue_max_wait_s=self.queue_max_wait_s,
            queue_depth=self.queue_depth,
        )

    def http_config(self) -> HttpConfig | None:
        """The HTTP server's settings; None when there is to be none. Raises ConfigError."""
        if self.http == OFF:
            return None
        grpc = self.server_config()
        return HttpConfig(
            bind=self.http,
            key_hashes=grpc.key_hashes,
            tls=grpc.tls,
            insecure=self.insecure,
            max_body_bytes=self.max_body_bytes,
            max_connections=self.max_connections,
            receive_timeout_s=self.receive_timeout_s,
            request_timeout_s=self.request_timeout_s,
            cors_origins=tuple(self.cors_origin or ()),
            default_max_tokens=self.default_max_tokens,
            chat_deprecation=self.chat_deprecation,
            chat_sunset=self._sunset(),
            chat_matching=self.chat_matching,
            held_conversations=self.held_conversations,
            stored_responses=self.stored_responses,
        )

    def _sunset(self) -> date:
        try:
            return date.fromisoformat(self.chat_sunset)
        except ValueError:
            raise ConfigError(
                f"chat_sunset must be a day like 2027-12-31, got {self.chat_sunset!r}"
            ) from None

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
