"""Errors to gRPC statuses: one table."""

from collections.abc import Mapping

import grpc

from kakeya import errors
from kakeya.errors import KakeyaError

STATUS_CODES: Mapping[type[KakeyaError], grpc.StatusCode] = {
    errors.SessionNotFound: grpc.StatusCode.NOT_FOUND,
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SessionBusy: grpc.StatusCode.ABORTED,
    errors.HistoryMismatch: grpc.StatusCode.ABORTED,
    errors.InvariantViolation: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.StepFailed: grpc.StatusCode.INTERNAL,
}


def status_code(error: Exception) -> grpc.StatusCode:
    """The status of an error. INTERNAL for what no caller could have caused."""
    for kind, code in STATUS_CODES.items():
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def status_details(error: Exception) -> str:
    """What the caller is told: our own errors' text. Foreign ones stay in the log."""
    return str(error) if isinstance(error, KakeyaError) else "the server failed; its log says why"
