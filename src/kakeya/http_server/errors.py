"""Errors to answers in the shape of the API that was called: one table, and nothing of our inside in any."""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from kakeya import errors
from kakeya.errors import ComeBackLater, KakeyaError

log = logging.getLogger(__name__)

MESSAGES = "/v1/messages"
"""The routes of Anthropic's API begin with it."""
INVALID_REQUEST = "invalid_request_error"
_DEFAULT_RETRY_S = 1.0
# A client may have put anything into a field's name, and a message quotes it.
_LONGEST_TEXT = 2000


@dataclass(eq=False)
class ApiError(Exception):
    """An answer other than success, as the client is to see it."""

    status: int
    message: str
    type: str = INVALID_REQUEST
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.message


def invalid(param: str, message: str) -> ApiError:
    """The answer to a field with a wrong value."""
    return ApiError(400, message, param=param, code="invalid_value")


@contextmanager
def blames(param: str) -> Iterator[None]:
    """Names this field for every argument that is found invalid inside."""
    try:
        yield
    except errors.InvalidArgument as error:
        raise invalid(param, str(error)) from error


# How each class of errors is told: status, type and code.
_KINDS: Mapping[type[KakeyaError], tuple[int, str, str]] = {
    errors.SessionNotFound: (404, INVALID_REQUEST, "session_not_found"),
    errors.InvalidArgument: (400, INVALID_REQUEST, "invalid_value"),
    errors.ModelNotFound: (404, INVALID_REQUEST, "model_not_found"),
    errors.SessionBusy: (409, "conflict_error", "session_busy"),
    errors.HistoryMismatch: (409, "conflict_error", "history_mismatch"),
    errors.InvariantViolation: (500, "server_error", "invariant_violation"),
    errors.Fenced: (503, "server_error", "unavailable"),
    errors.ResourceExhausted: (429, "rate_limit_error", "rate_limit_exceeded"),
    errors.Unauthenticated: (401, INVALID_REQUEST, "invalid_api_key"),
    errors.Unavailable: (503, "server_error", "unavailable"),
    errors.DeadlineExceeded: (504, "timeout_error", "timeout"),
    errors.StepFailed: (500, "server_error", "step_failed"),
}


# What Anthropic's API calls them.
_MESSAGES_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AsciiJsonResponse(JSONResponse):
    """JSON that can hold whatever a client sent, half a surrogate pair included."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def error_response(error: Exception, path: str) -> JSONResponse:
    """The answer to a request that met `error`. What nobody expected is logged and told as 500."""
    told = as_api_error(error)
    return AsciiJsonResponse(error_body(told, path), told.status, told.headers)


def error_event(error: Exception, path: str) -> bytes:
    """The same as one event, for a stream that has begun."""
    # ASCII: a client may have sent half of a surrogate pair, and an error quotes it.
    data = json.dumps(error_body(error, path), separators=(",", ":"))
    name = "event: error\n" if is_messages(path) else ""
    return f"{name}data: {data}\n\n".encode("ascii")


def error_body(error: Exception, path: str) -> dict[str, Any]:
    """What is told of `error`: in Anthropic's shape on its routes, in OpenAI's on all others."""
    told = as_api_error(error)
    message = _shortened(told.message)
    if is_messages(path):
        kind = _MESSAGES_TYPES.get(told.status, "api_error" if told.status >= 500 else INVALID_REQUEST)
        return {"type": "error", "error": {"type": kind, "message": message}}
    param = None if told.param is None else _shortened(told.param)
    return {"error": {"message": message, "type": told.type, "param": param, "code": told.code}}


def is_messages(path: str) -> bool:
    """Whether a route is one of Anthropic's API."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def as_api_error(error: Exception) -> ApiError:
    """What the client is told about `error`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors(), error.body)
    if isinstance(error, HTTPException):  # the router itself refuses a path, a method, a body
        code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
        return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)
    for known, (status, kind, code) in _KINDS.items():
        if isinstance(error, known):
            return ApiError(status, str(error), type=kind, code=code, headers=_headers(error))
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed; its log says why", type="server_error", code="internal_error")


def _headers(error: KakeyaError) -> dict[str, str]:
    if isinstance(error, errors.Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, ComeBackLater):
        wait = _DEFAULT_RETRY_S if error.retry_after is None else error.retry_after
        return {"Retry-After": str(max(1, math.ceil(wait)))}
    return {}


def _invalid(problems: Sequence[Any], body: Any) -> ApiError:
    """A body that does not fit its model: the field that is wrong, and how many more there are."""
    first = problems[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    paths = [_path(problem, body) for problem in problems]
    # Where a value may be one of several kinds, each kind complains; the one that fits best goes deepest.
    deepest = max(range(len(paths)), key=lambda number: len(paths[number]))
    problem, param = problems[deepest], ".".join(paths[deepest])
    others = len({tuple(path) for path in paths if path != paths[deepest][: len(path)]})
    more = f" (and {others} more)" if others else ""
    reason, code = problem["msg"].removeprefix("Value error, "), "invalid_value"
    if problem["type"] == "missing":
        code = "missing_required_parameter"
    if problem["type"] == "extra_forbidden":
        reason, code = "this field is not known or not supported", "unknown_parameter"
    return ApiError(400, f"{param or 'the body'}: {reason}{more}", param=param or None, code=code)


def _path(problem: Any, body: Any) -> list[str]:
    """`messages`, `0`, `content`: where in the body, the query or the path the problem is.

    Pydantic also puts the kinds it tried into a location; what the body does not have is left out,
    except for the field that is missing.
    """
    location = problem["loc"]
    if not location or location[0] != "body":
        return [str(part) for part in location[1:] or location]
    path, here = [], body
    for part in location[1:]:
        if _has(here, part):
            here = here[part]
        elif not (problem["type"] == "missing" and part is location[-1]):
            continue
        path.append(str(part))
    return path


def _has(value: Any, part: int | str) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, Mapping) and part in value


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"
