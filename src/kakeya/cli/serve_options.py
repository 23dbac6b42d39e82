"""The flags of `kakeya serve`, each with its KAKEYA_ environment twin, and the settings they become."""

from dataclasses import dataclass, fields
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kakeya.cli.grpc_options import GrpcOptions, limits, listening
from kakeya.cli.memory import DEFAULT_BUDGETS, Budget
from kakeya.config import EngineConfig, Quotas, RuntimeConfig, StateConfig
from kakeya.errors import ConfigError
from kakeya.options import TalkOptions, build, memory
from kakeya.serving.config import AdmissionConfig, HttpConfig
from kakeya.types import AdmissionPolicy, BackendChoice, Durability, ShareBeginnings

if TYPE_CHECKING:
    from kakeya.text.warm_prefixes import WarmPrefix

# A flag in one panel of the help.
_http = partial(typer.Option, rich_help_panel="HTTP")
_state = partial(typer.Option, rich_help_panel="Sessions that outlive the process")

OFF = "off"
# A front end shows the metrics of all homes at /metrics of --http.
_WATCHED_AT_HOMES = {"metrics_port", "metrics_host"}


@dataclass(frozen=True)
class FrontOptions(GrpcOptions):
    """The flags that a front end of a cluster has as well: where it listens, and what it bears."""

    cluster: Annotated[
        str | None,
        listening(
            help="Serve the sessions of a cluster instead of a model: the address of its Ray head, or auto, "
            "or homes:HOST:PORT,HOST:PORT for homes without Ray.",
            metavar="ADDRESS",
        ),
    ] = None
    cluster_secret: Annotated[
        Path | None, listening(help="File with the secret of homes: what Ray says when left out.")
    ] = None
    http: Annotated[str, listening(help="HOST:PORT for HTTP: OpenAI's API and the console; or off.")] = (
        HttpConfig.bind
    )
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
    chat_deprecation: Annotated[bool, _http(help="Say that chat completions are deprecated.")] = (
        HttpConfig.chat_deprecation
    )
    chat_sunset: Annotated[
        str, _http(help="The day on which chat completions end.", metavar="YYYY-MM-DD")
    ] = HttpConfig.chat_sunset.isoformat()

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


@dataclass(frozen=True)
class ServeOptions(FrontOptions, TalkOptions):
    """What `kakeya serve` was asked for: one field per flag."""

    prefill_block: Annotated[
        int | None,
        memory(
            help="Tokens of a prompt that are computed together. When left out: 2,048 on CUDA, 128 on a CPU, "
            "and 32 with torch's kernels there, so that streams wait for less."
        ),
    ] = None
    max_batch_tokens: Annotated[
        int | None,
        memory(
            help="The most tokens of one engine step. When left out: 256 on a CPU; on CUDA a prefill block "
            "and a token of every session."
        ),
    ] = None
    capacity: Annotated[
        int | None, memory(help="Sessions that may exist at once; what the budget holds when left out.")
    ] = None
    memory_budget: Annotated[
        str | None,
        memory(
            help="Memory for all sessions: 8GB, 512MiB, or a share of what is free. "
            "When left out: 25% on a CPU, on CUDA 90% of what the model leaves free."
        ),
    ] = None
    share_beginnings: Annotated[
        ShareBeginnings,
        memory(help="Who shares the prefixes that are computed already: the sessions of one owner, or all."),
    ] = EngineConfig.share_beginnings
    prefix_cache_bytes: Annotated[
        int | None,
        memory(
            help="Memory for prefixes that no live session has; an eighth of the sessions' when left out."
        ),
    ] = None
    warm_prefix: Annotated[
        Path | None,
        memory(
            help='Prefixes to compute at the start, one JSON object a line: {"text": …} or {"messages": …}.'
        ),
    ] = None
    max_stall_ms: Annotated[
        int, memory(help="About how long a step with prompts may hold up streams; 0 is no limit.")
    ] = EngineConfig.max_stall_ms
    max_concurrent: Annotated[
        int | None,
        limits(help="Requests that generate at once, gRPC and HTTP together; the capacity when left out."),
    ] = AdmissionConfig.max_concurrent
    admission: Annotated[AdmissionPolicy, limits(help="What happens to the others.")] = AdmissionConfig.policy
    queue_max_wait_s: Annotated[float, limits(help="The longest wait in the queue; 0 is for ever.")] = (
        AdmissionConfig.queue_max_wait_s
    )
    queue_depth: Annotated[int, limits(help="Requests that may wait.")] = AdmissionConfig.queue_depth
    session_idle_ttl_s: Annotated[
        float, limits(help="Close sessions idle for this many seconds; 0 is never.")
    ] = 1800.0
    quota_sessions: Annotated[int | None, limits(help="Sessions of one owner.")] = None
    quota_concurrent_requests: Annotated[int | None, limits(help="Generates of one owner at once.")] = None
    quota_tokens_per_minute: Annotated[
        int | None, limits(help="Tokens of one owner, appended and generated.")
    ] = None
    state_dir: Annotated[
        Path | None,
        _state(help="Store sessions here. They survive a restart, and sleep here when their slab is needed."),
    ] = None
    durability: Annotated[
        Durability,
        _state(help="What they survive: a clean end, the death of the process, or a loss of power as well."),
    ] = StateConfig.durability
    host_tier_bytes: Annotated[int, _state(help="Host memory for sleeping sessions.")] = (
        StateConfig.host_tier_bytes
    )
    disk_tier_bytes: Annotated[int, _state(help="Disk space for keys and values of sessions.")] = (
        StateConfig.disk_tier_bytes
    )
    snapshot_tokens: Annotated[
        int | None,
        _state(help="The most tokens of a session to compute again after a crash; a window when left out."),
    ] = None
    hibernated_ttl_s: Annotated[
        float, _state(help="Delete sessions that slept for this many seconds; 0 is never.")
    ] = 7 * 86400.0
    encrypt_state: Annotated[
        Path | None, _state(help="Encrypt what is stored with the key in this file.", metavar="KEYFILE")
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

    def runtime_config(self) -> RuntimeConfig:
        """How sessions are kept. Raises ConfigError."""
        return RuntimeConfig(
            session_idle_ttl_s=self.session_idle_ttl_s or None,
            quotas=Quotas(
                max_sessions=self.quota_sessions,
                max_concurrent_requests=self.quota_concurrent_requests,
                tokens_per_minute=self.quota_tokens_per_minute,
            ),
            state=self._state_config(),
        )

    def _state_config(self) -> StateConfig | None:
        return None if self.state_dir is None else self._state_in(self.state_dir.expanduser())

    def _state_in(self, directory: Path) -> StateConfig:
        return StateConfig(
            directory,
            self.durability,
            self.host_tier_bytes,
            self.disk_tier_bytes,
            self.snapshot_tokens,
            self.hibernated_ttl_s or None,
            self.encrypt_state,
        )

    def useless_in_front(self) -> list[str]:
        """The flags that were given and that a front end of a cluster has no use for: its homes have."""
        used = {field.name for field in fields(FrontOptions)} - _WATCHED_AT_HOMES
        return [
            f"--{'no-' if getattr(self, field.name) is False else ''}{field.name.replace('_', '-')}"
            for field in fields(self)
            if field.name not in used and getattr(self, field.name) != field.default
        ]

    def _usual_recall(self, window: int) -> int:
        """None where only gRPC is served: its clients say themselves what a session recalls."""
        return 0 if self.http == OFF else super()._usual_recall(window)

    def warm_prefixes(self) -> "list[WarmPrefix]":
        """What is computed at the start. Raises ConfigError naming the line that is wrong."""
        if self.warm_prefix is None:
            return []
        from kakeya.text.warm_prefixes import parse_prefixes

        try:
            return parse_prefixes(self.warm_prefix.read_text(encoding="utf-8"), str(self.warm_prefix))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the prefixes in {self.warm_prefix} cannot be read: {error}") from error

    def budget(self, backend: BackendChoice = BackendChoice.CPU) -> Budget:
        """The memory for sessions, where the backend is decided. Raises ConfigError."""
        return Budget.parse(DEFAULT_BUDGETS[backend] if self.memory_budget is None else self.memory_budget)

    def admission_config(self) -> AdmissionConfig:
        """How many requests generate at once. Raises ConfigError."""
        return build(AdmissionConfig, {**vars(self), "policy": self.admission})
