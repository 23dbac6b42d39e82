"""Frozen settings. Complete at construction; a bad value is named with what would be right."""

import os
import re
from dataclasses import dataclass, field, replace
from datetime import date
from ipaddress import ip_address
from pathlib import Path

from kakeya.errors import ConfigError
from kakeya.types import (
    AdmissionPolicy,
    BackendChoice,
    DType,
    Durability,
    KernelChoice,
    Numerics,
    ShareBeginnings,
    WeightFormat,
)

DEFAULT_MODEL = "smollm2-135m-instruct"


def _positive(name: str, value: object, least: int = 1, most: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, got {value!r}")


@dataclass(frozen=True)
class CacheConfig:
    """The bounded cache: `sink` first tokens kept for ever, `window` most recent ones,
    `spare` ring slots for tokens that are written but not committed.

    `recall` slots more, for sessions that bring back what has left their window. A session that does not has
    a window longer by as many tokens."""

    sink: int = 4
    window: int = 1024
    spare: int = 32
    recall: int = 0

    def __post_init__(self) -> None:
        _positive("sink", self.sink, least=0, most=2**24)
        _positive("window", self.window, most=2**24)
        _positive("spare", self.spare, least=0, most=2**16)
        _positive("recall", self.recall, least=0, most=2**24)

    @property
    def capacity(self) -> int:
        """C: how many tokens a session sees."""
        return self.sink + self.window + self.recall

    @property
    def slots(self) -> int:
        """Slots a slab holds, the spare ones included."""
        return self.capacity + self.spare


_CPU_BLOCK, _CPU_BATCH = 128, 256
# Where prompts must not be cut anywhere, streams wait for a whole block: a smaller one, at a price in speed.
_CANONICAL_BLOCK = 32
# A device of some hundred TFLOP/s wants large matmuls.
_CUDA_BLOCK = 2048
# Rows beside a block, one for each session, rounded up to whole 256s. The default capacity is below the most.
_CUDA_BESIDE, _CUDA_MOST_BESIDE = 256, 6144


AUTO, NO_PROPOSER, NGRAM, DRAFTER, MODEL, REMOTE = "auto", "none", "ngram", "drafter", "model", "remote"
# Whether each has a path behind it.
_HAS_PATH = {AUTO: (False,), NGRAM: (False,), DRAFTER: (False, True), MODEL: (True,), REMOTE: (True,)}
_KINDS = (NO_PROPOSER, *_HAS_PATH)
# A + joins proposers where the name of one follows it. Any other one belongs to a path.
_JOINT = re.compile(rf"\+(?=(?:{'|'.join(_KINDS)})(?:[:+]|$))")


@dataclass(frozen=True)
class ProposerChoice:
    """One proposer by its `kind`; `path` is that of a model or a drafter, or the addresses of remote ones."""

    kind: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}" if self.path else self.kind

    def addresses(self) -> tuple[str, ...]:
        """HOST:PORT of each remote proposer. Raises ConfigError for what is no such address."""
        found = tuple(dict.fromkeys(self.path.split(",")))
        for address in found:
            if _host_and_port(address, "remote:")[1] == 0:
                raise ConfigError(f"remote: needs a port above 0, got {address!r}")
        return found


def split_proposers(written: str) -> tuple[ProposerChoice, ...]:
    """Proposers as an option names them, joined by `+`, whether or not there are such proposers."""
    return tuple(ProposerChoice(*part.split(":", 1)) for part in _JOINT.split(written))


def parse_proposers(written: str) -> tuple[ProposerChoice, ...]:
    """Proposers as an option names them, joined by `+`; none for `none`. Raises ConfigError."""
    if written in (NO_PROPOSER, ""):
        return ()
    choices = split_proposers(written)
    for choice in choices:
        if bool(choice.path) not in _HAS_PATH.get(choice.kind, ()):
            raise ConfigError(
                "proposer must be auto, none, ngram, drafter, drafter:PATH, model:PATH or remote:HOST:PORT, "
                f"or several joined by +, got {written!r}"
            )
        if choice.kind == REMOTE:
            choice.addresses()
    kinds = [choice.kind for choice in choices]
    if len(set(kinds)) < len(kinds) or (AUTO in kinds and len(kinds) > 1):
        raise ConfigError(f"proposer names each kind once, and auto stands alone, got {written!r}")
    return choices


@dataclass(frozen=True)
class Calling:
    """How a remote proposer is called: with a key, and over TLS.

    `authority` is a PEM file, or `system` for those that the system trusts. `cert` and `key`, both or
    neither, prove who calls.
    """

    api_key: str | None = field(default=None, repr=False)
    authority: str | None = None
    cert: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigError("proposer_tls_cert and proposer_tls_key come together")
        if self.cert is not None and self.authority is None:
            raise ConfigError("proposer_tls_cert needs proposer_tls_ca beside it: a PEM file, or system")


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs: backend, numerics, batching and queues.

    `prefill_block` and `max_batch_tokens` are what was asked for. Where they are None, the backend and the
    capacity decide, and how the kernels let prompts be cut. `block_tokens` and `step_tokens` are the numbers
    in use. By default, a block on CUDA fits into a step beside a token of every session.

    `prefix_cache_bytes` None is an eighth of the slabs. A step that carries streams takes about
    `max_stall_ms` with the rows of prompts beside them; 0 is no limit.

    A `proposer` guesses at most `draft_tokens` tokens at once, and no more than fit into the spare slots.
    A remote one goes on for up to `draft_ahead` tokens while these are verified; `calling` says how to call.
    """

    backend: BackendChoice = BackendChoice.AUTO
    cache: CacheConfig = field(default_factory=CacheConfig)
    capacity: int = 1
    numerics: Numerics = Numerics.FAST
    dtype: DType = DType.BFLOAT16
    weights: WeightFormat = WeightFormat.AUTO
    kernels: KernelChoice = KernelChoice.AUTO
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    prefill_block: int | None = None
    max_batch_tokens: int | None = None
    max_waiting: int = 4096
    share_beginnings: ShareBeginnings = ShareBeginnings.OWNER
    prefix_cache_bytes: int | None = None
    max_stall_ms: int = 40
    proposer: str = AUTO
    draft_tokens: int = 8
    draft_ahead: int = 64
    calling: Calling = field(default_factory=Calling)

    def __post_init__(self) -> None:
        _positive("capacity", self.capacity, most=2**20)
        _positive("threads", self.threads, most=1024)
        if self.prefill_block is not None:
            _positive("prefill_block", self.prefill_block, most=2**16)
        if self.max_batch_tokens is not None:
            _positive("max_batch_tokens", self.max_batch_tokens, most=2**20)
        _positive("max_waiting", self.max_waiting)
        if self.prefix_cache_bytes is not None:
            _positive("prefix_cache_bytes", self.prefix_cache_bytes, least=0, most=2**50)
        _positive("max_stall_ms", self.max_stall_ms, least=0, most=60_000)
        _positive("draft_tokens", self.draft_tokens, most=64)
        _positive("draft_ahead", self.draft_ahead, least=0, most=1024)
        parse_proposers(self.proposer)
        if self.step_tokens < self.block_tokens:
            raise ConfigError(
                f"max_batch_tokens must be at least prefill_block, {self.block_tokens}, "
                f"got {self.step_tokens}"
            )

    @property
    def block_tokens(self) -> int:
        """Tokens of a prompt that are computed together."""
        if self.prefill_block is not None:
            return self.prefill_block
        if self.backend is not BackendChoice.CUDA:
            return _CPU_BLOCK
        return _CUDA_BLOCK if self.max_batch_tokens is None else min(_CUDA_BLOCK, self.max_batch_tokens)

    @property
    def step_tokens(self) -> int:
        """The most tokens of one step."""
        if self.max_batch_tokens is not None:
            return self.max_batch_tokens
        if self.backend is not BackendChoice.CUDA:
            return _CPU_BATCH
        beside = min(-(-self.capacity // _CUDA_BESIDE) * _CUDA_BESIDE, _CUDA_MOST_BESIDE)
        return self.block_tokens + beside

    @property
    def proposers(self) -> tuple[ProposerChoice, ...]:
        """Those in use, the first to be asked first."""
        choices = parse_proposers(self.proposer)
        if choices != (ProposerChoice(AUTO),):
            return choices
        # Looking up is free on a CPU. A device runs ahead of the host, which a draft makes it wait for.
        return () if self.backend is BackendChoice.CUDA else (ProposerChoice(NGRAM),)

    def cut_by(self, *, any_cut: bool) -> "EngineConfig":
        """The same with the block for kernels that let prompts be cut anywhere, or do not.

        Where they do not, a row's bits depend on the block. So it never changes with what steps take. It is
        small where sessions could hold each other up for longer than they should.
        """
        if any_cut or self.prefill_block is not None or not self.max_stall_ms or self.capacity == 1:
            return self
        return replace(self, prefill_block=_CANONICAL_BLOCK)

    def resolved(self) -> "EngineConfig":
        """The same with every number written out and without keys, as reports have it."""
        return replace(
            self, prefill_block=self.block_tokens, max_batch_tokens=self.step_tokens, calling=Calling()
        )


@dataclass(frozen=True)
class Quotas:
    """What one owner may use; None is unlimited.

    `max_concurrent_requests` counts generates in flight. `tokens_per_minute` counts appended and
    generated tokens.
    """

    max_sessions: int | None = None
    max_concurrent_requests: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_sessions", "max_concurrent_requests", "tokens_per_minute"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))


@dataclass(frozen=True)
class StateConfig:
    """Where sessions are stored, and what they survive there.

    A session that has no slab sleeps in host memory, up to `host_tier_bytes` of them, or on the disk, up to
    `disk_tier_bytes`. Keys and values are stored after every `snapshot_tokens` tokens, so no more have to be
    computed again after a crash; None is a window. A session that nobody used for `hibernated_ttl_s` seconds
    is deleted; None keeps it. What is stored is encrypted with a key from `key_file`, if there is one.
    """

    directory: Path
    durability: Durability = Durability.PROCESS
    host_tier_bytes: int = 2**30
    disk_tier_bytes: int = 2**34
    snapshot_tokens: int | None = None
    hibernated_ttl_s: float | None = 7 * 86400.0
    key_file: Path | None = None

    def __post_init__(self) -> None:
        _positive("host_tier_bytes", self.host_tier_bytes, least=0, most=2**50)
        _positive("disk_tier_bytes", self.disk_tier_bytes, least=0, most=2**60)
        if self.snapshot_tokens is not None:
            _positive("snapshot_tokens", self.snapshot_tokens)
        if self.hibernated_ttl_s is not None:
            _seconds("hibernated_ttl_s", self.hibernated_ttl_s)


@dataclass(frozen=True)
class RuntimeConfig:
    """How sessions are kept: when idle ones are closed, what owners may use, how much is remembered.

    `session_idle_ttl_s` None keeps idle sessions for ever. `remembered_requests` answers are kept for
    each owner, so that a repeated request id gets the first one; the generates among them are kept
    with at most `remembered_events` events in all. With a `state` directory idle sessions are put to sleep
    instead of closed.
    """

    session_idle_ttl_s: float | None = 1800.0
    quotas: Quotas = field(default_factory=Quotas)
    remembered_requests: int = 1024
    remembered_events: int = 32768
    state: StateConfig | None = None

    def __post_init__(self) -> None:
        if self.session_idle_ttl_s is not None:
            _seconds("session_idle_ttl_s", self.session_idle_ttl_s)
        _positive("remembered_requests", self.remembered_requests, most=2**24)
        _positive("remembered_events", self.remembered_events)


def _seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be a number of seconds above 0, got {value!r}")


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
    """

    bind: str
    key_hashes: tuple[bytes, ...] = field(default=(), repr=False)
    tls: TlsConfig | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        exposures = self.exposures
        if exposures and not self.insecure:
            raise ConfigError(
                f"{self.bind} is not a loopback address, and {' and '.join(exposures)}; "
                "add the missing option, bind to 127.0.0.1, or accept the risk with --insecure"
            )

    @property
    def host(self) -> str:
        return _host_and_port(self.bind)[0]

    @property
    def port(self) -> int:
        return _host_and_port(self.bind)[1]

    @property
    def exposures(self) -> tuple[str, ...]:
        """What makes listening here dangerous. Nothing on the loopback interface."""
        if is_loopback(self.host):
            return ()
        open_door = () if self.key_hashes else ("anybody may call it (no --api-key)",)
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
        _positive("max_concurrent_rpcs", self.max_concurrent_rpcs)
        _positive("max_message_bytes", self.max_message_bytes, least=1024)
        _seconds_from("keepalive_s", self.keepalive_s, 1.0)
        _seconds_from("keepalive_timeout_s", self.keepalive_timeout_s, 0.1)
        _seconds_from("shutdown_grace_s", self.shutdown_grace_s, 0.0)
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
        _positive("max_body_bytes", self.max_body_bytes, least=1024)
        _positive("max_connections", self.max_connections)
        _seconds_from("receive_timeout_s", self.receive_timeout_s, 0.1)
        _seconds_from("request_timeout_s", self.request_timeout_s, 0.0)
        _seconds_from("keepalive_s", self.keepalive_s, 0.1)
        _positive("default_max_tokens", self.default_max_tokens)
        _positive("held_conversations", self.held_conversations, least=0)
        _seconds("held_seconds", self.held_seconds)
        _positive("stored_responses", self.stored_responses)
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
            _positive("max_concurrent", self.max_concurrent)
        _seconds_from("queue_max_wait_s", self.queue_max_wait_s, 0.0)
        _positive("queue_depth", self.queue_depth)


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


def _host_and_port(bind: str, name: str = "bind") -> tuple[str, int]:
    host, colon, port = bind.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not bracketed):
        raise ConfigError(f"{name} must be HOST:PORT such as 127.0.0.1:50051 or [::1]:50051, got {bind!r}")
    return host.strip("[]"), int(port)


def _seconds_from(name: str, value: object, least: float) -> None:
    # gRPC counts milliseconds in 32 bits.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= 1e6:
        raise ConfigError(f"{name} must be a number of seconds from {least:g} to 1,000,000, got {value!r}")
