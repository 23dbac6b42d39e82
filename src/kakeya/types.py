"""The plain nouns every room shares. No torch here, so that clients stay light."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from kakeya.errors import InvalidArgument


class Numerics(StrEnum):
    """`fast` takes the fastest kernel. In `exact` a row's bits do not depend on other rows of the batch."""

    FAST = "fast"
    EXACT = "exact"


class ShareBeginnings(StrEnum):
    """Between whom the computed prefixes of histories are shared.

    The time of an answer tells whoever asks whether someone among them has used the same prefix.
    """

    OWNER = "owner"
    SERVER = "server"
    OFF = "off"


class Durability(StrEnum):
    """What sessions in a state directory survive.

    `none`: a clean end. `process`: the death of the process as well; what was acknowledged is stored first.
    `power`: also a loss of power; what was acknowledged has reached the disk.
    """

    NONE = "none"
    PROCESS = "process"
    POWER = "power"


class DType(StrEnum):
    """The element type of activations and of the KV cache."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class WeightFormat(StrEnum):
    """How weight matrices are held in memory."""

    NATIVE = "native"
    FLOAT32 = "float32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"
    AUTO = "auto"


class KernelChoice(StrEnum):
    """Which implementation computes the hot operations: our own (C++, or Triton on CUDA) or torch's."""

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"


class BackendChoice(StrEnum):
    """What computes; auto is a CUDA device where torch sees one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    MLX = "mlx"


class AdmissionPolicy(StrEnum):
    """What happens to a request that comes when all places are taken."""

    REJECT = "reject"
    QUEUE = "queue"


class StopReason(StrEnum):
    """Why a generate ended."""

    MAX_TOKENS = "MAX_TOKENS"
    EOS = "EOS"
    CANCELLED = "CANCELLED"
    TRUNCATED = "TRUNCATED"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, and which of them end a generate. Defaults are greedy; every value is
    checked here, once.

    `seed` and the token's position decide the randomness, nothing else does.
    Penalties look at the last sink + window tokens of the history.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    min_tokens: int = 0
    """Before this many tokens, none is chosen that would end the generate."""
    ignore_eos: bool = False
    """The session's EOS tokens are chosen like any other, and end nothing."""
    stop_token_ids: Sequence[int] = ()
    """These end the generate as well. Like an EOS, the one that does is emitted and kept."""

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_k", self.top_k, 0, 2**31 - 1)
        _check("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _check("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _check("seed", self.seed, 0, 2**64 - 1)
        _check("top_logprobs", self.top_logprobs, 0, 20)
        _check("min_tokens", self.min_tokens, 0, 2**31 - 1)
        for token, bias in self.logit_bias.items():
            _check(f"logit_bias[{token}]", bias, -1e4, 1e4)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_plain(self) -> bool:
        """Whether neither the history, a bias nor log-probabilities are needed."""
        return not (self.has_penalties or self.logit_bias or self.logprobs or self.top_logprobs)


def _check(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    bracket = "(" if low_open else "["
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise InvalidArgument(f"{name} must be a number in {bracket}{low}, {high}], got {value!r}")
    if value < low or value > high or (low_open and value == low):
        raise InvalidArgument(f"{name} must be in {bracket}{low}, {high}], got {value!r}")


@dataclass(frozen=True)
class TokenLogprob:
    """A candidate token and its log-probability under the model's distribution."""

    token_id: int
    logprob: float


@dataclass(frozen=True, order=True)
class TokenRange:
    """Positions `start` to `end - 1` of a session's history."""

    start: int
    end: int

    @property
    def length(self) -> int:
        """How many tokens that are."""
        return self.end - self.start


@dataclass(frozen=True)
class RecallQuery:
    """What a turn asks of its session's past. The token at `length` is the first that will see the answer.

    It sees the first `pinned` tokens, and the last `window` ones up to itself. Of the rest, `recall` tokens
    can be brought back. The turn's own words lie from `query_from` to `end`. `remembered` are always to be
    among what is brought back; they are out of its sight.
    """

    length: int
    pinned: int
    window: int
    recall: int
    query_from: int
    end: int
    remembered: tuple[TokenRange, ...] = ()


@dataclass(frozen=True)
class TruncatedEvent:
    """Tokens have left the window since the session began. At most once, before any token."""

    dropped_token_count: int


class TokenEvent(NamedTuple):
    """One chosen token; it is history once its reader has taken it. Log-probabilities are the model's own,
    before any adjustment. A tuple, because one is made for every token of every session."""

    token_id: int
    logprob: float | None = None
    top_logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True)
class DoneEvent:
    """The request ended well (or was cancelled). Always last, exactly once."""

    stop_reason: StopReason
    generated_token_count: int
    prefill_duration_seconds: float
    total_duration_seconds: float
    cached_token_count: int
    accepted_draft_tokens: int = 0
    proposed_draft_tokens: int = 0
    recalled: tuple[TokenRange, ...] = ()
    """What of its past the session saw beside its window, in order of time."""
    recall_duration_seconds: float = 0.0
    """How long it took to find that and to compute it."""
    recalled_token_ids: tuple[tuple[int, ...], ...] = ()
    """The tokens of each range that it saw."""

    @property
    def recalled_tokens(self) -> int:
        return sum(each.length for each in self.recalled)


@dataclass(frozen=True)
class FailedEvent:
    """The request ended by an error. Always last, exactly once."""

    error: Exception


Event = TruncatedEvent | TokenEvent | DoneEvent | FailedEvent


@dataclass(frozen=True)
class TokenizerFiles:
    """All a text front end needs: the tokenizer, the chat template and the special tokens."""

    tokenizer_json: bytes
    """UTF-8: as text a large vocabulary takes four bytes a character."""
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None


@dataclass(frozen=True)
class TurnRecord:
    """What one turn took, and what the session held at its end. A generate without a token does not count."""

    history_length: int
    computed_tokens: int
    """The part of the prompt that was new since the turn before."""
    generated_tokens: int
    first_token_seconds: float
    seconds: float
    kv_live_bytes: int


@dataclass(frozen=True)
class SessionInfo:
    """What a session is and holds right now.

    `turns` counts the turns that have ended; a fork begins with the count of its original. `recent_turns` are
    the newest of them, oldest first. `generated_tokens` includes the tokens of a running turn.
    """

    session_id: str
    state: str
    client_label: str
    history_length: int
    computed_length: int
    sink: int
    window: int
    kv_live_bytes: int
    kv_capacity_bytes: int
    dropped_token_count: int
    cache_invariant_inv1_violations: int
    cache_invariant_inv2_violations: int
    idle_seconds: float
    turns: int = 0
    generated_tokens: int = 0
    recent_turns: tuple[TurnRecord, ...] = ()
    shared_tokens: int = 0
    """Of the history: copied from other sessions that began the same way."""
    recall_tokens: int = 0
    """How many tokens that left the window it can see again at once."""
    recalled: tuple[TokenRange, ...] = ()
    """Those that it sees, in order of time; none: the earliest that are not pinned."""
    remembered: tuple[TokenRange, ...] = ()
    """What its client wants it to see always."""
    recall_duration_seconds: float = 0.0
    """How long the last turn took to find and to compute what it recalled."""
    cache_invariant_inv4_violations: int = 0


@dataclass(frozen=True)
class Document:
    """What a front end keeps for its own clients in a state directory, by kind and name, as JSON knows it.

    `contents` stay, `state` changes. To store one without `contents` leaves those that are stored.
    """

    kind: str
    name: str
    owner: str
    contents: Any
    state: Any
    used_at: float


@dataclass(frozen=True)
class OwnerUsage:
    """What an owner uses: sessions, generates that run, and tokens, appended and generated."""

    sessions: int = 0
    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class TierFacts:
    """Where sessions are, and what the tiers for sleeping ones take."""

    active: int
    host: int
    disk: int
    host_bytes: int
    disk_bytes: int
    host_limit: int
    disk_limit: int
    lag_tokens: int
    """The most tokens that a session would have to compute again after a crash."""


@dataclass(frozen=True)
class RuntimeFacts:
    """What was loaded and how it runs: the start banner, in numbers."""

    model: str
    path: str
    family: str
    parameters: int
    weights: str
    dtype: str
    numerics: str
    kernels: str
    threads: int
    sink: int
    window: int
    capacity: int
    bytes_per_token: int
    session_bytes: int
    pool_bytes: int
    backend: str = BackendChoice.CPU.value
    share_beginnings: str = ShareBeginnings.OFF.value
    prefix_cache_bytes: int = 0
    proposer: str = "none"
    draft_tokens: int = 0
    recall: int = 0
    """The most tokens that a session may recall."""
    recall_bytes: int = 0
    """What copies of slots for recall take, beside `pool_bytes`."""
    proposer_bytes: int = 0
    """What proposers' memory of sessions takes, beside `pool_bytes`: the slabs of a small model, say."""
