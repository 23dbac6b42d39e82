"""One error tree for the whole package.

    KakeyaError
    ├── ConfigError            a setting that cannot work, named with what would be right
    ├── ModelError             anything wrong with a model or its files
    │   ├── ModelNotFound      no such name, path or hub id
    │   ├── UnsupportedModel   an architecture or feature that is refused by name
    │   ├── CorruptCheckpoint  truncated file, missing tensor, wrong shape
    │   └── DownloadFailed     the fetch broke; the models in the cache are as they were
    ├── InvalidArgument        a bad request: token id, sampling value, empty history
    ├── SessionNotFound        unknown, closed, expired or someone else's session
    ├── PresetNotFound         no preset of this name
    ├── RunNotFound            unknown, forgotten or someone else's run of a preset, or one without a report
    ├── Conflict               the session is not as the call needs it; nothing was changed
    │   ├── SessionBusy        the session is generating already
    │   └── HistoryMismatch    expected_history_length differs from the real one
    ├── ComeBackLater          it may work later
    │   ├── ResourceExhausted  no slab free, queue full, over quota
    │   │   ├── NoFreeSlab     all slabs are in use
    │   │   └── StorageFailed  the state directory cannot be written or read: full, or broken
    │   │       └── Fenced     another process has taken the state directory over
    │   └── Unavailable        draining, shut down, still loading or out of reach
    │       ├── Restarting     the server says that it is loading, or that it ends and takes no new work
    │       └── DeviceLost     the device failed for good, and the engine with it
    ├── InvariantViolation     the session's bookkeeping broke; the session is failed
    ├── StateMismatch          exported state of another model, geometry or format
    │   └── StateDamaged       stored state that was cut, changed, or encrypted with another key
    ├── StepFailed             computing the request's step raised
    ├── PeerFailed             a program we are compared with in a benchmark broke
    ├── Unauthenticated        missing or wrong API key
    ├── DeadlineExceeded       no answer in the time the caller allowed
    └── RemoteError            a server answered with something none of the others stands for

Foreign errors are translated where they enter; servers map these to status codes, and the client maps those
back: an error that came over the wire has the gRPC status in `status`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpc import StatusCode

# Trailing metadata in which a gRPC server names the class: ABORTED alone stands for two of them.
ERROR_NAME_KEY = "kakeya-error"


class KakeyaError(Exception):
    """Base of every error this package raises on purpose.

    `status` is the gRPC status it came with; None for an error of this process.
    """

    status: "StatusCode | None" = None


class ConfigError(KakeyaError):
    """A setting is out of range or contradicts another."""


class ModelError(KakeyaError):
    """Something is wrong with a model or its files."""


class ModelNotFound(ModelError):
    """No catalogue name, path or hub id matches."""


class UnsupportedModel(ModelError):
    """The checkpoint uses something that is refused by name."""


class CorruptCheckpoint(ModelError):
    """A file is truncated, a tensor is missing or has the wrong shape."""


class DownloadFailed(ModelError):
    """The model could not be fetched; those in the cache are as they were."""


class InvalidArgument(KakeyaError):
    """A request holds a value that cannot be honoured."""


class SessionNotFound(KakeyaError):
    """The session is unknown, closed, expired or belongs to someone else."""


class PresetNotFound(KakeyaError):
    """No preset has this name."""


class RunNotFound(KakeyaError):
    """The run of a preset is unknown, forgotten or belongs to someone else, or it has no report."""


class Conflict(KakeyaError):
    """The session is not in the state the call needs. Nothing was changed."""


class SessionBusy(Conflict):
    """The session is generating; one generate at a time."""


class HistoryMismatch(Conflict):
    """The caller's idea of the history length is out of date."""


class ComeBackLater(KakeyaError):
    """It may work later: in `retry_after` seconds, where somebody knows."""

    def __init__(self, *args: object, retry_after: float | None = None) -> None:
        super().__init__(*args)
        self.retry_after = retry_after


class ResourceExhausted(ComeBackLater):
    """No slab, queue place or quota is left. Nothing was changed."""


class NoFreeSlab(ResourceExhausted):
    """All slabs are in use."""


class StorageFailed(ResourceExhausted):
    """The state directory cannot be written or read. Nothing was changed; it may work when there is space."""


class Fenced(StorageFailed):
    """Another process has taken the state directory over: this one must end."""


class InvariantViolation(KakeyaError):
    """A session's bookkeeping contradicts its storage."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant} violated: {detail}")
        self.invariant = invariant


class StateMismatch(KakeyaError):
    """Exported session state does not fit this model, geometry or format."""


class StateDamaged(StateMismatch):
    """Stored state is not what was stored."""


class StepFailed(KakeyaError):
    """The engine step that carried this request raised; others are unharmed."""


class PeerFailed(KakeyaError):
    """The program on the other side of a comparison broke or refused the work."""


class Unauthenticated(KakeyaError):
    """The API key is missing or wrong."""


class Unavailable(ComeBackLater):
    """The server or engine is draining, shut down, dead, still loading or out of reach."""


class Restarting(Unavailable):
    """The server says that it is loading, or that it ends and takes no new work. Clients wait for it."""


class DeviceLost(Unavailable):
    """The device failed for good: the engine dies of it, and only a new process can go on."""


class DeadlineExceeded(KakeyaError, TimeoutError):
    """The caller's time limit passed before the answer came."""


class RemoteError(KakeyaError):
    """A server failed inside, or answered with something that is not in the contract."""
