from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_RUNNING: _ClassVar[RunState]
    RUN_STATE_PASSED: _ClassVar[RunState]
    RUN_STATE_GATES_FAILED: _ClassVar[RunState]
    RUN_STATE_FAILED: _ClassVar[RunState]
    RUN_STATE_CANCELLED: _ClassVar[RunState]
    RUN_STATE_TIMED_OUT: _ClassVar[RunState]

class ReportForm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPORT_FORM_JSON: _ClassVar[ReportForm]
    REPORT_FORM_HTML: _ClassVar[ReportForm]
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_RUNNING: RunState
RUN_STATE_PASSED: RunState
RUN_STATE_GATES_FAILED: RunState
RUN_STATE_FAILED: RunState
RUN_STATE_CANCELLED: RunState
RUN_STATE_TIMED_OUT: RunState
REPORT_FORM_JSON: ReportForm
REPORT_FORM_HTML: ReportForm

class ListPresetsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPresetsResponse(_message.Message):
    __slots__ = ("presets",)
    PRESETS_FIELD_NUMBER: _ClassVar[int]
    presets: _containers.RepeatedCompositeFieldContainer[PresetInfo]
    def __init__(self, presets: _Optional[_Iterable[_Union[PresetInfo, _Mapping]]] = ...) -> None: ...

class PresetInfo(_message.Message):
    __slots__ = ("name", "proves", "benchmark", "arguments", "limit_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROVES_FIELD_NUMBER: _ClassVar[int]
    BENCHMARK_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    proves: str
    benchmark: str
    arguments: _containers.RepeatedScalarFieldContainer[str]
    limit_seconds: float
    def __init__(self, name: _Optional[str] = ..., proves: _Optional[str] = ..., benchmark: _Optional[str] = ..., arguments: _Optional[_Iterable[str]] = ..., limit_seconds: _Optional[float] = ...) -> None: ...

class RunPresetRequest(_message.Message):
    __slots__ = ("preset", "request_id")
    PRESET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    preset: str
    request_id: str
    def __init__(self, preset: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class FollowRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class ListRunsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRunsResponse(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[RunStatus]
    def __init__(self, runs: _Optional[_Iterable[_Union[RunStatus, _Mapping]]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("run_id", "preset", "state", "progress", "work", "started_at", "finished_at", "elapsed_seconds", "reason", "output_tail", "has_report")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PRESET_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TAIL_FIELD_NUMBER: _ClassVar[int]
    HAS_REPORT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    preset: str
    state: RunState
    progress: float
    work: str
    started_at: str
    finished_at: str
    elapsed_seconds: float
    reason: str
    output_tail: str
    has_report: bool
    def __init__(self, run_id: _Optional[str] = ..., preset: _Optional[str] = ..., state: _Optional[_Union[RunState, str]] = ..., progress: _Optional[float] = ..., work: _Optional[str] = ..., started_at: _Optional[str] = ..., finished_at: _Optional[str] = ..., elapsed_seconds: _Optional[float] = ..., reason: _Optional[str] = ..., output_tail: _Optional[str] = ..., has_report: _Optional[bool] = ...) -> None: ...

class FetchReportRequest(_message.Message):
    __slots__ = ("run_id", "form")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    form: ReportForm
    def __init__(self, run_id: _Optional[str] = ..., form: _Optional[_Union[ReportForm, str]] = ...) -> None: ...

class ReportChunk(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: ReportHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[ReportHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ReportHeader(_message.Message):
    __slots__ = ("size", "sha256")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    size: int
    sha256: bytes
    def __init__(self, size: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...
