"""Frozen settings of the engine and of sessions: complete at construction, a bad value is named.

Those of servers are in `serving/config.py`.
"""

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from kakeya.checks import check_choice, check_count, check_seconds, host_and_port
from kakeya.errors import ConfigError
from kakeya.types import (
    BackendChoice,
    DType,
    Durability,
    KernelChoice,
    Numerics,
    ShareBeginnings,
    WeightFormat,
)

DEFAULT_MODEL = "smollm2-135m-instruct"


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
        check_count("sink", self.sink, least=0, most=2**24)
        check_count("window", self.window, most=2**24)
        check_count("spare", self.spare, least=0, most=2**16)
        check_count("recall", self.recall, least=0, most=2**24)

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
_ALIGNED_BLOCK = 32
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
            if host_and_port(address, "remote:")[1] == 0:
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
        raise ConfigError(f"proposer must name each kind once, and auto only by itself, got {written!r}")
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
    max_stall_ms: int = 42
    proposer: str = AUTO
    draft_tokens: int = 8
    draft_ahead: int = 64
    calling: Calling = field(default_factory=Calling)

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, BackendChoice)
        check_choice("numerics", self.numerics, Numerics)
        check_choice("dtype", self.dtype, DType)
        check_choice("weights", self.weights, WeightFormat)
        check_choice("kernels", self.kernels, KernelChoice)
        check_choice("share_beginnings", self.share_beginnings, ShareBeginnings)
        check_count("capacity", self.capacity, most=2**20)
        check_count("threads", self.threads, most=1024)
        if self.prefill_block is not None:
            check_count("prefill_block", self.prefill_block, most=2**16)
        if self.max_batch_tokens is not None:
            check_count("max_batch_tokens", self.max_batch_tokens, most=2**20)
        check_count("max_waiting", self.max_waiting)
        if self.prefix_cache_bytes is not None:
            check_count("prefix_cache_bytes", self.prefix_cache_bytes, least=0, most=2**50)
        check_count("max_stall_ms", self.max_stall_ms, least=0, most=60_000)
        check_count("draft_tokens", self.draft_tokens, most=64)
        check_count("draft_ahead", self.draft_ahead, least=0, most=1024)
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
        return replace(self, prefill_block=_ALIGNED_BLOCK)

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
                check_count(name, getattr(self, name))


@dataclass(frozen=True)
class StateConfig:
    """Where sessions are stored, and what they survive there.

    A session that has no slab sleeps in host memory, up to `host_tier_bytes` of them, or on the disk, up to
    `disk_tier_bytes`. Keys and values are stored after every `snapshot_tokens` tokens, so no more have to be
    computed again after a crash; None is a window. A session that nobody used for `hibernated_ttl_s` seconds
    is deleted; None keeps it. What is stored is encrypted with a key from `key_file`, if there is one.
    A directory that is `fenced` belongs to the last process that opened it: an earlier one, which may still
    live on a machine that nobody reaches, can store nothing any more. Others are locked instead.
    """

    directory: Path
    durability: Durability = Durability.PROCESS
    host_tier_bytes: int = 2**30
    disk_tier_bytes: int = 2**34
    snapshot_tokens: int | None = None
    hibernated_ttl_s: float | None = 7 * 86400.0
    key_file: Path | None = None
    fenced: bool = False

    def __post_init__(self) -> None:
        check_count("host_tier_bytes", self.host_tier_bytes, least=0, most=2**50)
        check_count("disk_tier_bytes", self.disk_tier_bytes, least=0, most=2**60)
        if self.snapshot_tokens is not None:
            check_count("snapshot_tokens", self.snapshot_tokens)
        if self.hibernated_ttl_s is not None:
            check_seconds("hibernated_ttl_s", self.hibernated_ttl_s)


@dataclass(frozen=True)
class RuntimeConfig:
    """How sessions are kept: when idle ones are closed, what owners may use, how much is remembered.

    `session_idle_ttl_s` None keeps idle sessions for ever. `remembered_requests` answers are kept for
    each owner, so that a repeated request id gets the first one; the generates among them are kept
    with at most `remembered_events` events in all. With a `state` directory idle sessions are put to sleep
    instead of closed. The ids of new sessions begin with `session_prefix`, which names their first home in a
    cluster.
    """

    session_idle_ttl_s: float | None = 1800.0
    quotas: Quotas = field(default_factory=Quotas)
    remembered_requests: int = 1024
    remembered_events: int = 32768
    state: StateConfig | None = None
    session_prefix: str = ""

    def __post_init__(self) -> None:
        if self.session_idle_ttl_s is not None:
            check_seconds("session_idle_ttl_s", self.session_idle_ttl_s)
        check_count("remembered_requests", self.remembered_requests, most=2**24)
        check_count("remembered_events", self.remembered_events)
