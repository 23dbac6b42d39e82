"""gRPC statuses as the errors of `kakeya.errors`: the server's table, read backwards."""

from typing import Any

from grpc import StatusCode

from kakeya import errors
from kakeya.errors import KakeyaError

_BY_STATUS: dict[StatusCode, type[KakeyaError]] = {
    StatusCode.NOT_FOUND: errors.SessionNotFound,
    StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    StatusCode.OUT_OF_RANGE: errors.InvalidArgument,
    StatusCode.ABORTED: errors.Conflict,
    StatusCode.RESOURCE_EXHAUSTED: errors.ResourceExhausted,
    StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    StatusCode.UNAVAILABLE: errors.Unavailable,
    StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
}
# Where one status stands for several errors, the server names the one it means.
_BY_NAME: dict[object, type[KakeyaError]] = {
    kind.__name__: kind
    for kind in (
        errors.PresetNotFound,
        errors.RunNotFound,
        errors.Restarting,
        errors.SessionBusy,
        errors.HistoryMismatch,
        errors.StepFailed,
        errors.StateMismatch,
        errors.StateDamaged,
    )
}


# An AioRpcError, or the RpcError of a plain call. They have the same methods, and no type in common.
Refusal = Any


def translated(error: Refusal) -> KakeyaError:
    """The error that the server meant, with its status."""
    translation = _error(error, error.details() or error.code().name)
    translation.status = error.code()
    return translation


def _error(error: Refusal, message: str) -> KakeyaError:
    status = error.code()
    if status is StatusCode.FAILED_PRECONDITION:
        return _invariant_violation(message)
    named = _BY_NAME.get(_named_error(error))
    if named is not None:
        return named(message)
    kind = _BY_STATUS.get(status)
    return kind(message) if kind is not None else errors.RemoteError(f"{status.name}: {message}")


def _named_error(error: Refusal) -> object:
    return dict(error.trailing_metadata() or ()).get(errors.ERROR_NAME_KEY)


def _invariant_violation(message: str) -> KakeyaError:
    invariant, separator, detail = message.partition(" violated: ")
    if not separator:
        return errors.InvariantViolation("invariant", message)
    return errors.InvariantViolation(invariant, detail)
