"""Errors to OpenAI-shaped answers: one table, and nothing of our inside in any of them."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from kakeya import errors
from kakeya.errors import ComeBackLater, KakeyaError

log = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
_DEFAULT_RETRY_S = 1.0
# A client may have put anything into a field's name, and a message quotes it.
_LONGEST_TEXT = 2000


class ApiError(Exception):
    """An answer other than success, as the client is to see it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,  # noqa: A002 (the field's name on the wire)
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


@dataclass(frozen=True)
class _Kind:
    """How one class of errors is told."""

    status: int
    type: str
    code: str


_KINDS: Mapping[type[KakeyaError], _Kind] = {
    errors.SessionNotFound: _Kind(404, INVALID_REQUEST, "session_not_found"),
    errors.InvalidArgument: _Kind(400, INVALID_REQUEST, "invalid_value"),
    errors.SessionBusy: _Kind(409, "conflict_error", "session_busy"),
    errors.HistoryMismatch: _Kind(409, "conflict_error", "history_mismatch"),
    errors.InvariantViolation: _Kind(500, "server_error", "invariant_violation"),
    errors.ResourceExhausted: _Kind(429, "rate_limit_error", "rate_limit_exceeded"),
    errors.Unauthenticated: _Kind(401, INVALID_REQUEST, "invalid_api_key"),
    errors.Unavailable: _Kind(503, "server_error", "unavailable"),
    errors.DeadlineExceeded: _Kind(504, "timeout_error", "timeout"),
    errors.StepFailed: _Kind(500, "server_error", "step_failed"),
}


_CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}


class AsciiJsonResponse(JSONResponse):
    """JSON that can hold whatever a client sent, half a surrogate pair included."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def error_response(error: Exception) -> JSONResponse:
    """The answer to a request that met `error`. What nobody expected is logged and told as 500."""
    told = as_api_error(error)
    return AsciiJsonResponse(_body(told), told.status, told.headers)


def error_body(error: Exception) -> dict[str, Any]:
    """The same as the data of one event, for a stream that has begun."""
    return _body(as_api_error(error))


def as_api_error(error: Exception) -> ApiError:
    """What the client is told about `error`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors(), error.body)
    if isinstance(error, HTTPException):
        return _refused(error)
    for known, kind in _KINDS.items():
        if isinstance(error, known):
            return ApiError(
                kind.status, str(error), type=kind.type, code=kind.code, headers=_headers(error, kind.status)
            )
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed; its log says why", type="server_error", code="internal_error")


def _body(error: ApiError) -> dict[str, Any]:
    param = None if error.param is None else _shortened(error.param)
    message = _shortened(error.message)
    return {"error": {"message": message, "type": error.type, "param": param, "code": error.code}}


def _headers(error: KakeyaError, status: int) -> dict[str, str]:
    if status == HTTPStatus.UNAUTHORIZED:
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, ComeBackLater):
        wait = _DEFAULT_RETRY_S if error.retry_after is None else error.retry_after
        return {"Retry-After": str(max(1, math.ceil(wait)))}
    return {}


def _refused(error: HTTPException) -> ApiError:
    """What the router itself refuses: a path, a method, a body that is not JSON."""
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)


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
    code = _CODES.get(problem["type"], "invalid_value")
    return ApiError(400, f"{param or 'the body'}: {_reason(problem)}{more}", param=param or None, code=code)


def _reason(problem: Any) -> str:
    if problem["type"] == "extra_forbidden":
        return "this field is not known or not supported"
    return str(problem["msg"]).removeprefix("Value error, ")


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
