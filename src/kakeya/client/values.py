"""What a server reports, as plain frozen values, and how they are read from the wire."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

from kakeya.errors import RemoteError
from kakeya.types import StopReason, TokenRange
from kakeya.wire import runtime_pb2 as pb

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

V = TypeVar("V", bound="DataclassInstance")

_STOP_REASONS = {
    pb.MAX_TOKENS: StopReason.MAX_TOKENS,
    pb.EOS: StopReason.EOS,
    pb.CANCELLED: StopReason.CANCELLED,
    pb.TRUNCATED: StopReason.TRUNCATED,
}


@dataclass(frozen=True)
class TokenLogprob:
    """A candidate token and its log-probability under the model's own distribution."""

    id: int
    logprob: float


@dataclass(frozen=True)
class Token:
    """One generated token. Log-probabilities are there if they were asked for, likeliest first."""

    id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class GenerateResult:
    """How a generate ended. `dropped_token_count`: tokens of history the model could no longer see."""

    stop_reason: StopReason
    generated_token_count: int
    prefill_duration_seconds: float
    total_duration_seconds: float
    cached_token_count: int
    accepted_draft_tokens: int
    proposed_draft_tokens: int
    dropped_token_count: int
    recalled: tuple[TokenRange, ...] = ()
    """What of its past the session saw beside its window, in order of time."""
    recall_duration_seconds: float = 0.0


@dataclass(frozen=True)
class SessionInfo:
    """What a session holds right now. `state`: idle, generating, failed; host or disk asleep."""

    session_id: str
    state: str
    client_label: str
    history_length: int
    kv_live_bytes: int
    kv_capacity_bytes: int
    dropped_token_count: int
    cache_invariant_inv1_violations: int
    cache_invariant_inv2_violations: int
    idle_seconds: float
    recall_tokens: int = 0
    """How many tokens that left the window it can see again at once."""
    recalled: tuple[TokenRange, ...] = ()
    """Those that it sees, in order of time."""
    remembered: tuple[TokenRange, ...] = ()
    recall_duration_seconds: float = 0.0
    cache_invariant_inv4_violations: int = 0


@dataclass(frozen=True)
class ServerInfo:
    """What a server runs, and what one session costs there."""

    version: str
    model_id: str
    model_fingerprint: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    sink: int
    window: int
    capacity: int
    kv_bytes_per_session: int
    features: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    proposer: str
    """What guesses tokens ahead there, for speed alone."""
    recall_tokens: int = 0
    """The most that a session may ask to recall."""


def read(kind: type[V], message: Message, **others: Any) -> V:
    """A value with the fields of a message; `others` are those that are not simply the same."""
    same = (field.name for field in fields(kind) if field.name not in others)
    return kind(**{name: getattr(message, name) for name in same}, **others)


def token_ranges(messages: Iterable[pb.TokenRange]) -> tuple[TokenRange, ...]:
    return tuple(TokenRange(each.start, each.end) for each in messages)


def session_info(message: pb.GetSessionInfoResponse) -> SessionInfo:
    lists = {"recalled": token_ranges(message.recalled), "remembered": token_ranges(message.remembered)}
    return read(SessionInfo, message, **lists)


def token(message: pb.Token) -> Token:
    return Token(
        id=message.id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple(TokenLogprob(top.id, top.logprob) for top in message.top_logprobs),
    )


def server_info(message: pb.GetServerInfoResponse) -> ServerInfo:
    lists = {"features": tuple(message.features), "eos_token_ids": tuple(message.eos_token_ids)}
    return read(ServerInfo, message, **lists)


def generate_result(done: pb.Done, dropped_token_count: int) -> GenerateResult:
    """Raises RemoteError for a stop reason this version does not know."""
    reason = _STOP_REASONS.get(done.stop_reason)
    if reason is None:
        raise RemoteError(f"the server stopped for a reason unknown here: number {done.stop_reason}")
    return read(
        GenerateResult,
        done,
        stop_reason=reason,
        dropped_token_count=dropped_token_count,
        recalled=token_ranges(done.recalled),
    )


def joined(first: GenerateResult, later: GenerateResult) -> GenerateResult:
    """Two parts of one generate, the second of which continued where the first was broken off."""
    return replace(
        later,
        generated_token_count=first.generated_token_count + later.generated_token_count,
        prefill_duration_seconds=first.prefill_duration_seconds,
        total_duration_seconds=first.total_duration_seconds + later.total_duration_seconds,
        cached_token_count=first.cached_token_count,
        accepted_draft_tokens=first.accepted_draft_tokens + later.accepted_draft_tokens,
        proposed_draft_tokens=first.proposed_draft_tokens + later.proposed_draft_tokens,
        recall_duration_seconds=first.recall_duration_seconds + later.recall_duration_seconds,
    )
