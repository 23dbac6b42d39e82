"""The flags of `kakeya serve`, each with its KAKEYA_ environment twin, and the settings they become."""

from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kakeya.cli.command import read_file
from kakeya.cli.memory import DEFAULT_BUDGETS, Budget
from kakeya.config import (
    AdmissionConfig,
    EngineConfig,
    HttpConfig,
    Quotas,
    RuntimeConfig,
    ServerConfig,
    TlsConfig,
)
from kakeya.errors import ConfigError
from kakeya.logs import LogFormat, LogLevel
from kakeya.options import EngineOptions, build, memory
from kakeya.types import AdmissionPolicy, BackendChoice, ShareBeginnings

if TYPE_CHECKING:
    from kakeya.text.known_beginnings import KnownBeginning

# A flag in one panel of the help.
_listening = partial(typer.Option, rich_help_panel="Listening")
_callers = partial(typer.Option, rich_help_panel="Who may call")
_limits = partial(typer.Option, rich_help_panel="Limits")
_http = partial(typer.Option, rich_help_panel="HTTP")
_watching = partial(typer.Option, rich_help_panel="Watching it")

OFF = "off"
# Options whose values are never written anywhere.
SECRETS = frozenset({"api_key"})


@dataclass(frozen=True)
class ServeOptions(EngineOptions):
    """What `kakeya serve` was asked for: one field per flag."""

    max_batch_tokens: Annotated[
        int | None,
        memory(
            help="The most tokens of one engine step; when left out 256 on a CPU, and on CUDA enough for a "
            "prompt's block of 2,048 beside a token of every session."
        ),
    ] = None
    capacity: Annotated[
        int | None, memory(help="Sessions that may exist at once; what the budget holds when left out.")
    ] = None
    memory_budget: Annotated[
        str | None,
        memory(
            help="Memory for all sessions: 8GB, 512MiB, or a share of what is free: "
            "25% on a CPU and 90% of what the model leaves on CUDA when left out."
        ),
    ] = None
    share_beginnings: Annotated[
        ShareBeginnings,
        memory(
            help="Between whose sessions the same beginning is computed once: those of one owner, or all."
        ),
    ] = EngineConfig.share_beginnings
    prefix_cache_bytes: Annotated[
        int | None,
        memory(help="Memory for beginnings of closed sessions; an eighth of the sessions' when left out."),
    ] = None
    warm_prefix: Annotated[
        Path | None,
        memory(
            help='Beginnings to compute at the start, one JSON object a line: {"text": …} or {"messages": …}.'
        ),
    ] = None
    max_stall_ms: Annotated[
        int, memory(help="How long prompts may hold up the tokens of others, about; 0 is no limit.")
    ] = EngineConfig.max_stall_ms
    bind: Annotated[str, _listening(help="HOST:PORT for gRPC.")] = ServerConfig.bind
    http: Annotated[str, _listening(help="HOST:PORT for HTTP: OpenAI's API and the console; or off.")] = (
        HttpConfig.bind
    )
    tls_cert: Annotated[Path | None, _listening(help="Certificate chain, PEM.")] = None
    tls_key: Annotated[Path | None, _listening(help="Its key, PEM.")] = None
    tls_client_ca: Annotated[
        Path | None, _listening(help="Clients need a certificate of this authority, PEM.")
    ] = None
    insecure: Annotated[
        bool, _listening("--insecure", help="Listen beyond this machine without keys or TLS.")
    ] = False
    shutdown_grace_s: Annotated[float, _listening(help="Seconds that running work gets to end.")] = (
        ServerConfig.shutdown_grace_s
    )
    keepalive_s: Annotated[float, _listening(help="Seconds between pings on a silent connection.")] = (
        ServerConfig.keepalive_s
    )
    keepalive_timeout_s: Annotated[
        float, _listening(help="Seconds after which an unanswered ping ends a connection.")
    ] = ServerConfig.keepalive_timeout_s
    api_key: Annotated[
        list[str] | None, _callers(help="A key that may call; each is an owner. Repeatable.")
    ] = None
    api_key_file: Annotated[Path | None, _callers(help="One key per line; # begins a comment.")] = None
    max_concurrent: Annotated[
        int | None,
        _limits(help="Requests that generate at once, gRPC and HTTP together; the capacity when left out."),
    ] = AdmissionConfig.max_concurrent
    admission: Annotated[AdmissionPolicy, _limits(help="What happens to the others.")] = (
        AdmissionConfig.policy
    )
    queue_max_wait_s: Annotated[float, _limits(help="The longest wait in the queue; 0 is for ever.")] = (
        AdmissionConfig.queue_max_wait_s
    )
    queue_depth: Annotated[int, _limits(help="Requests that may wait.")] = AdmissionConfig.queue_depth
    max_concurrent_rpcs: Annotated[int, _limits(help="gRPC calls in flight, all clients together.")] = (
        ServerConfig.max_concurrent_rpcs
    )
    max_message_bytes: Annotated[int, _limits(help="The longest gRPC message accepted.")] = (
        ServerConfig.max_message_bytes
    )
    session_idle_ttl_s: Annotated[
        float, _limits(help="Close sessions idle for this many seconds; 0 is never.")
    ] = 1800.0
    quota_sessions: Annotated[int | None, _limits(help="Sessions of one owner.")] = None
    quota_concurrent_requests: Annotated[int | None, _limits(help="Generates of one owner at once.")] = None
    quota_tokens_per_minute: Annotated[
        int | None, _limits(help="Tokens of one owner, appended and generated.")
    ] = None
    max_connections: Annotated[int, _http(help="Open connections, all clients together.")] = (
        HttpConfig.max_connections
    )
    max_body_bytes: Annotated[int, _http(help="The longest body accepted.")] = HttpConfig.max_body_bytes
    receive_timeout_s: Annotated[float, _http(help="Seconds in which a request must arrive.")] = (
        HttpConfig.receive_timeout_s
    )
    request_timeout_s: Annotated[
        float, _http(help="Seconds in which it must be answered; 0 is no limit.")
    ] = HttpConfig.request_timeout_s
    cors_origin: Annotated[
        list[str] | None, _http(help="Pages from here may call: https://… or *. Repeatable.")
    ] = None
    default_max_tokens: Annotated[int, _http(help="The longest answer when a request sets no limit.")] = (
        HttpConfig.default_max_tokens
    )
    stored_responses: Annotated[int, _http(help="Responses of one owner that can be continued.")] = (
        HttpConfig.stored_responses
    )
    chat_matching: Annotated[bool, _http(help="Continue chats whose messages are resent.")] = (
        HttpConfig.chat_matching
    )
    held_conversations: Annotated[int, _http(help="How many of these chats are held.")] = (
        HttpConfig.held_conversations
    )
    chat_deprecation: Annotated[bool, _http(help="Say that chat completions are deprecated.")] = (
        HttpConfig.chat_deprecation
    )
    chat_sunset: Annotated[
        str, _http(help="The day on which chat completions end.", metavar="YYYY-MM-DD")
    ] = HttpConfig.chat_sunset.isoformat()
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

    def known_beginnings(self) -> "list[KnownBeginning]":
        """What is computed at the start. Raises ConfigError naming the line that is wrong."""
        if self.warm_prefix is None:
            return []
        from kakeya.text.known_beginnings import parse_beginnings

        try:
            return parse_beginnings(self.warm_prefix.read_text(encoding="utf-8"), str(self.warm_prefix))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the beginnings in {self.warm_prefix} cannot be read: {error}") from error

    def budget(self, backend: BackendChoice = BackendChoice.CPU) -> Budget:
        """The memory for sessions, where the backend is decided. Raises ConfigError."""
        return Budget.parse(DEFAULT_BUDGETS[backend] if self.memory_budget is None else self.memory_budget)

    def server_config(self) -> ServerConfig:
        """The server's settings. Raises ConfigError, also for a bind that is too open."""
        from kakeya.serving.keys import hash_key

        key_hashes = tuple(dict.fromkeys(map(hash_key, self._keys())))
        return build(ServerConfig, {**vars(self), "key_hashes": key_hashes, "tls": self._tls()})

    def admission_config(self) -> AdmissionConfig:
        """How many requests generate at once. Raises ConfigError."""
        return build(AdmissionConfig, {**vars(self), "policy": self.admission})

    def http_config(self) -> HttpConfig | None:
        """The HTTP server's settings; None when there is to be none. Raises ConfigError."""
        if self.http == OFF:
            return None
        grpc = self.server_config()
        given = {
            **vars(self),
            "bind": self.http,
            "key_hashes": grpc.key_hashes,
            "tls": grpc.tls,
            "cors_origins": tuple(self.cors_origin or ()),
            "chat_sunset": self._sunset(),
            "keepalive_s": HttpConfig.keepalive_s,  # the flag is about gRPC's pings
        }
        return build(HttpConfig, given)

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
