"""Errors to gRPC statuses: one table."""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kakeya import errors
from kakeya.errors import ERROR_NAME_KEY, KakeyaError

log = logging.getLogger(__name__)

# The classes of grpc.aio are generic for the type checker alone.
Context = Any

STATUS_CODES: Mapping[type[KakeyaError], grpc.StatusCode] = {
    errors.SessionNotFound: grpc.StatusCode.NOT_FOUND,
    errors.PresetNotFound: grpc.StatusCode.NOT_FOUND,
    errors.RunNotFound: grpc.StatusCode.NOT_FOUND,
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ModelNotFound: grpc.StatusCode.INVALID_ARGUMENT,
    errors.StateMismatch: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SessionBusy: grpc.StatusCode.ABORTED,
    errors.HistoryMismatch: grpc.StatusCode.ABORTED,
    errors.InvariantViolation: grpc.StatusCode.FAILED_PRECONDITION,
    # Its successor has the sessions, and answers the next try.
    errors.Fenced: grpc.StatusCode.UNAVAILABLE,
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


@asynccontextmanager
async def statuses(context: Context) -> AsyncIterator[None]:
    """What is raised inside becomes the status of the call."""
    try:
        yield
    except grpc.aio.AbortError:
        raise  # it has its status already
    except KakeyaError as error:
        await _abort(context, error)
    except Exception as error:
        log.exception("a call failed")
        await _abort(context, error)


async def _abort(context: Context, error: Exception) -> None:
    name = type(error).__name__ if isinstance(error, KakeyaError) else "InternalError"
    await context.abort(status_code(error), status_details(error), ((ERROR_NAME_KEY, name),))
