from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OwnerUsage(_message.Message):
    __slots__ = ("sessions", "requests", "tokens")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    requests: int
    tokens: int
    def __init__(self, sessions: _Optional[int] = ..., requests: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Home(_message.Message):
    __slots__ = ("name", "address", "http_url", "epoch", "node", "model", "slabs", "free_slabs", "most_sessions", "sessions", "running", "waiting", "labels", "draining", "usage", "held_sessions", "session_bytes", "silent", "shape", "queue_seconds")
    class UsageEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: OwnerUsage
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[OwnerUsage, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_URL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    FREE_SLABS_FIELD_NUMBER: _ClassVar[int]
    MOST_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    HELD_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSION_BYTES_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    http_url: str
    epoch: int
    node: str
    model: str
    slabs: int
    free_slabs: int
    most_sessions: int
    sessions: int
    running: int
    waiting: int
    labels: _containers.RepeatedScalarFieldContainer[str]
    draining: bool
    usage: _containers.MessageMap[str, OwnerUsage]
    held_sessions: int
    session_bytes: int
    silent: bool
    shape: str
    queue_seconds: float
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., http_url: _Optional[str] = ..., epoch: _Optional[int] = ..., node: _Optional[str] = ..., model: _Optional[str] = ..., slabs: _Optional[int] = ..., free_slabs: _Optional[int] = ..., most_sessions: _Optional[int] = ..., sessions: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., labels: _Optional[_Iterable[str]] = ..., draining: _Optional[bool] = ..., usage: _Optional[_Mapping[str, OwnerUsage]] = ..., held_sessions: _Optional[int] = ..., session_bytes: _Optional[int] = ..., silent: _Optional[bool] = ..., shape: _Optional[str] = ..., queue_seconds: _Optional[float] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("homes", "list", "proposers")
    HOMES_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    PROPOSERS_FIELD_NUMBER: _ClassVar[int]
    homes: _containers.RepeatedCompositeFieldContainer[Home]
    list: str
    proposers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, homes: _Optional[_Iterable[_Union[Home, _Mapping]]] = ..., list: _Optional[str] = ..., proposers: _Optional[_Iterable[str]] = ...) -> None: ...

class BeatRequest(_message.Message):
    __slots__ = ("view",)
    VIEW_FIELD_NUMBER: _ClassVar[int]
    view: View
    def __init__(self, view: _Optional[_Union[View, _Mapping]] = ...) -> None: ...

class BeatResponse(_message.Message):
    __slots__ = ("home",)
    HOME_FIELD_NUMBER: _ClassVar[int]
    home: Home
    def __init__(self, home: _Optional[_Union[Home, _Mapping]] = ...) -> None: ...

class GetViewRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetViewResponse(_message.Message):
    __slots__ = ("view",)
    VIEW_FIELD_NUMBER: _ClassVar[int]
    view: View
    def __init__(self, view: _Optional[_Union[View, _Mapping]] = ...) -> None: ...

class ListOwnedRequest(_message.Message):
    __slots__ = ("owner", "page_size", "created_after", "after_id")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    CREATED_AFTER_FIELD_NUMBER: _ClassVar[int]
    AFTER_ID_FIELD_NUMBER: _ClassVar[int]
    owner: str
    page_size: int
    created_after: float
    after_id: str
    def __init__(self, owner: _Optional[str] = ..., page_size: _Optional[int] = ..., created_after: _Optional[float] = ..., after_id: _Optional[str] = ...) -> None: ...

class Owned(_message.Message):
    __slots__ = ("created_at", "session_id", "info")
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    created_at: float
    session_id: str
    info: bytes
    def __init__(self, created_at: _Optional[float] = ..., session_id: _Optional[str] = ..., info: _Optional[bytes] = ...) -> None: ...

class ListOwnedResponse(_message.Message):
    __slots__ = ("sessions", "has_more")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Owned]
    has_more: bool
    def __init__(self, sessions: _Optional[_Iterable[_Union[Owned, _Mapping]]] = ..., has_more: _Optional[bool] = ...) -> None: ...

class ListMovableRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Movable(_message.Message):
    __slots__ = ("session_id", "working")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WORKING_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    working: bool
    def __init__(self, session_id: _Optional[str] = ..., working: _Optional[bool] = ...) -> None: ...

class ListMovableResponse(_message.Message):
    __slots__ = ("sessions", "documents")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Movable]
    documents: int
    def __init__(self, sessions: _Optional[_Iterable[_Union[Movable, _Mapping]]] = ..., documents: _Optional[int] = ...) -> None: ...

class MoveSessionRequest(_message.Message):
    __slots__ = ("session_id", "target", "target_address")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TARGET_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    target: str
    target_address: str
    def __init__(self, session_id: _Optional[str] = ..., target: _Optional[str] = ..., target_address: _Optional[str] = ...) -> None: ...

class MoveSessionResponse(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class TakeInRequest(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class TakeInResponse(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class WasTakenRequest(_message.Message):
    __slots__ = ("session_id", "epoch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class WasTakenResponse(_message.Message):
    __slots__ = ("taken",)
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    taken: bool
    def __init__(self, taken: _Optional[bool] = ...) -> None: ...

class FindSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class FindSessionResponse(_message.Message):
    __slots__ = ("here", "moved_to")
    HERE_FIELD_NUMBER: _ClassVar[int]
    MOVED_TO_FIELD_NUMBER: _ClassVar[int]
    here: bool
    moved_to: str
    def __init__(self, here: _Optional[bool] = ..., moved_to: _Optional[str] = ...) -> None: ...
