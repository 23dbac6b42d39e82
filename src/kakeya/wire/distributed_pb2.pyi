from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("version", "proposer", "model_fingerprint", "tokenizer_digest", "verifier_fingerprint", "block_sizes", "hidden_layers", "max_ahead", "load")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROPOSER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_AHEAD_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    version: str
    proposer: str
    model_fingerprint: str
    tokenizer_digest: str
    verifier_fingerprint: str
    block_sizes: _containers.RepeatedScalarFieldContainer[int]
    hidden_layers: _containers.RepeatedScalarFieldContainer[int]
    max_ahead: int
    load: Load
    def __init__(self, version: _Optional[str] = ..., proposer: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., verifier_fingerprint: _Optional[str] = ..., block_sizes: _Optional[_Iterable[int]] = ..., hidden_layers: _Optional[_Iterable[int]] = ..., max_ahead: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("sessions", "capacity", "busy_sessions", "seconds_per_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    BUSY_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    capacity: int
    busy_sessions: int
    seconds_per_token: float
    def __init__(self, sessions: _Optional[int] = ..., capacity: _Optional[int] = ..., busy_sessions: _Optional[int] = ..., seconds_per_token: _Optional[float] = ...) -> None: ...

class ProposeRequest(_message.Message):
    __slots__ = ("session_id", "open", "fork", "commit", "observe", "rollback", "drop")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    OBSERVE_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    open: Open
    fork: Fork
    commit: Commit
    observe: Observe
    rollback: Rollback
    drop: Drop
    def __init__(self, session_id: _Optional[int] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., fork: _Optional[_Union[Fork, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., observe: _Optional[_Union[Observe, _Mapping]] = ..., rollback: _Optional[_Union[Rollback, _Mapping]] = ..., drop: _Optional[_Union[Drop, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Fork(_message.Message):
    __slots__ = ("from_session_id",)
    FROM_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    from_session_id: int
    def __init__(self, from_session_id: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("epoch", "start", "token_ids", "wanted", "turn")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    start: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    wanted: int
    turn: Turn
    def __init__(self, epoch: _Optional[int] = ..., start: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., wanted: _Optional[int] = ..., turn: _Optional[_Union[Turn, _Mapping]] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("prompt_length", "prediction", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    prompt_length: int
    prediction: _containers.RepeatedScalarFieldContainer[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    def __init__(self, prompt_length: _Optional[int] = ..., prediction: _Optional[_Iterable[int]] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ...) -> None: ...

class Observe(_message.Message):
    __slots__ = ("layer", "start", "rows", "values")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    layer: int
    start: int
    rows: int
    values: bytes
    def __init__(self, layer: _Optional[int] = ..., start: _Optional[int] = ..., rows: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class Rollback(_message.Message):
    __slots__ = ("epoch", "length")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    length: int
    def __init__(self, epoch: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Drop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProposeResponse(_message.Message):
    __slots__ = ("session_id", "block", "refused")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    block: Block
    refused: Refused
    def __init__(self, session_id: _Optional[int] = ..., block: _Optional[_Union[Block, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("epoch", "position", "token_ids")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
