from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StopReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_REASON_UNSPECIFIED: _ClassVar[StopReason]
    MAX_TOKENS: _ClassVar[StopReason]
    EOS: _ClassVar[StopReason]
    CANCELLED: _ClassVar[StopReason]
    TRUNCATED: _ClassVar[StopReason]
STOP_REASON_UNSPECIFIED: StopReason
MAX_TOKENS: StopReason
EOS: StopReason
CANCELLED: StopReason
TRUNCATED: StopReason

class CreateSessionRequest(_message.Message):
    __slots__ = ("client_label", "eos_token_ids", "pinned_prefix_tokens", "request_id", "ignore_eos", "recall_tokens")
    CLIENT_LABEL_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PINNED_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    RECALL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    client_label: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    pinned_prefix_tokens: int
    request_id: str
    ignore_eos: bool
    recall_tokens: int
    def __init__(self, client_label: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., pinned_prefix_tokens: _Optional[int] = ..., request_id: _Optional[str] = ..., ignore_eos: _Optional[bool] = ..., recall_tokens: _Optional[int] = ...) -> None: ...

class CreateSessionResponse(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class AppendTokensRequest(_message.Message):
    __slots__ = ("session_id", "token_ids", "expected_history_length", "request_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    expected_history_length: int
    request_id: str
    def __init__(self, session_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., expected_history_length: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class AppendTokensResponse(_message.Message):
    __slots__ = ("history_length",)
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    history_length: int
    def __init__(self, history_length: _Optional[int] = ...) -> None: ...

class TokenRange(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class RecallTokensRequest(_message.Message):
    __slots__ = ("session_id", "ranges", "remember", "request_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    REMEMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    ranges: _containers.RepeatedCompositeFieldContainer[TokenRange]
    remember: bool
    request_id: str
    def __init__(self, session_id: _Optional[str] = ..., ranges: _Optional[_Iterable[_Union[TokenRange, _Mapping]]] = ..., remember: _Optional[bool] = ..., request_id: _Optional[str] = ...) -> None: ...

class RecallTokensResponse(_message.Message):
    __slots__ = ("ranges",)
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[TokenRange]
    def __init__(self, ranges: _Optional[_Iterable[_Union[TokenRange, _Mapping]]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("session_id", "max_tokens", "seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logprobs", "request_id", "presence_penalty", "frequency_penalty", "logit_bias", "group_tokens", "min_tokens", "ignore_eos", "stop_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    GROUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    max_tokens: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    logprobs: int
    request_id: str
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    group_tokens: bool
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[str] = ..., max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logprobs: _Optional[int] = ..., request_id: _Optional[str] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., group_tokens: _Optional[bool] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("truncated", "token", "done", "tokens")
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    truncated: Truncated
    token: Token
    done: Done
    tokens: Tokens
    def __init__(self, truncated: _Optional[_Union[Truncated, _Mapping]] = ..., token: _Optional[_Union[Token, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ...) -> None: ...

class Truncated(_message.Message):
    __slots__ = ("dropped_token_count",)
    DROPPED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    dropped_token_count: int
    def __init__(self, dropped_token_count: _Optional[int] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "logprob", "top_logprobs")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("id", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("stop_reason", "generated_token_count", "prefill_duration_seconds", "total_duration_seconds", "cached_token_count", "accepted_draft_tokens", "proposed_draft_tokens", "recalled", "recall_duration_seconds")
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DURATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_DURATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECALLED_FIELD_NUMBER: _ClassVar[int]
    RECALL_DURATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    stop_reason: StopReason
    generated_token_count: int
    prefill_duration_seconds: float
    total_duration_seconds: float
    cached_token_count: int
    accepted_draft_tokens: int
    proposed_draft_tokens: int
    recalled: _containers.RepeatedCompositeFieldContainer[TokenRange]
    recall_duration_seconds: float
    def __init__(self, stop_reason: _Optional[_Union[StopReason, str]] = ..., generated_token_count: _Optional[int] = ..., prefill_duration_seconds: _Optional[float] = ..., total_duration_seconds: _Optional[float] = ..., cached_token_count: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., proposed_draft_tokens: _Optional[int] = ..., recalled: _Optional[_Iterable[_Union[TokenRange, _Mapping]]] = ..., recall_duration_seconds: _Optional[float] = ...) -> None: ...

class GetSessionInfoRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class GetSessionInfoResponse(_message.Message):
    __slots__ = ("history_length", "kv_live_bytes", "kv_capacity_bytes", "dropped_token_count", "cache_invariant_inv1_violations", "cache_invariant_inv2_violations", "idle_seconds", "state", "client_label", "session_id", "recall_tokens", "recalled", "remembered", "recall_duration_seconds", "cache_invariant_inv4_violations")
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    KV_LIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHE_INVARIANT_INV1_VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    CACHE_INVARIANT_INV2_VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_LABEL_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RECALL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECALLED_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_FIELD_NUMBER: _ClassVar[int]
    RECALL_DURATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_INVARIANT_INV4_VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    history_length: int
    kv_live_bytes: int
    kv_capacity_bytes: int
    dropped_token_count: int
    cache_invariant_inv1_violations: int
    cache_invariant_inv2_violations: int
    idle_seconds: float
    state: str
    client_label: str
    session_id: str
    recall_tokens: int
    recalled: _containers.RepeatedCompositeFieldContainer[TokenRange]
    remembered: _containers.RepeatedCompositeFieldContainer[TokenRange]
    recall_duration_seconds: float
    cache_invariant_inv4_violations: int
    def __init__(self, history_length: _Optional[int] = ..., kv_live_bytes: _Optional[int] = ..., kv_capacity_bytes: _Optional[int] = ..., dropped_token_count: _Optional[int] = ..., cache_invariant_inv1_violations: _Optional[int] = ..., cache_invariant_inv2_violations: _Optional[int] = ..., idle_seconds: _Optional[float] = ..., state: _Optional[str] = ..., client_label: _Optional[str] = ..., session_id: _Optional[str] = ..., recall_tokens: _Optional[int] = ..., recalled: _Optional[_Iterable[_Union[TokenRange, _Mapping]]] = ..., remembered: _Optional[_Iterable[_Union[TokenRange, _Mapping]]] = ..., recall_duration_seconds: _Optional[float] = ..., cache_invariant_inv4_violations: _Optional[int] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("final_history_length",)
    FINAL_HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    final_history_length: int
    def __init__(self, final_history_length: _Optional[int] = ...) -> None: ...

class ForkSessionRequest(_message.Message):
    __slots__ = ("session_id", "request_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ForkSessionResponse(_message.Message):
    __slots__ = ("session_id", "history_length")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    history_length: int
    def __init__(self, session_id: _Optional[str] = ..., history_length: _Optional[int] = ...) -> None: ...

class ExportSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class StatePart(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ImportSessionRequest(_message.Message):
    __slots__ = ("data", "client_label", "request_id")
    DATA_FIELD_NUMBER: _ClassVar[int]
    CLIENT_LABEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    client_label: str
    request_id: str
    def __init__(self, data: _Optional[bytes] = ..., client_label: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ImportSessionResponse(_message.Message):
    __slots__ = ("session_id", "history_length")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    history_length: int
    def __init__(self, session_id: _Optional[str] = ..., history_length: _Optional[int] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[GetSessionInfoResponse]
    next_page_token: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[GetSessionInfoResponse, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "model_id", "model_fingerprint", "layers", "kv_heads", "head_dim", "vocab_size", "sink", "window", "capacity", "kv_bytes_per_session", "features", "eos_token_ids", "proposer", "recall_tokens")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    SINK_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_SESSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSER_FIELD_NUMBER: _ClassVar[int]
    RECALL_TOKENS_FIELD_NUMBER: _ClassVar[int]
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
    features: _containers.RepeatedScalarFieldContainer[str]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    proposer: str
    recall_tokens: int
    def __init__(self, version: _Optional[str] = ..., model_id: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., vocab_size: _Optional[int] = ..., sink: _Optional[int] = ..., window: _Optional[int] = ..., capacity: _Optional[int] = ..., kv_bytes_per_session: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., proposer: _Optional[str] = ..., recall_tokens: _Optional[int] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("tokenizer_json", "chat_template", "bos_token", "eos_token", "unk_token", "pad_token")
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    UNK_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAD_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tokenizer_json: str
    chat_template: str
    bos_token: str
    eos_token: str
    unk_token: str
    pad_token: str
    def __init__(self, tokenizer_json: _Optional[str] = ..., chat_template: _Optional[str] = ..., bos_token: _Optional[str] = ..., eos_token: _Optional[str] = ..., unk_token: _Optional[str] = ..., pad_token: _Optional[str] = ...) -> None: ...
