"""Errors as a client sees them: OpenAI's shape, the right status, nothing of our inside."""

import json
import logging
from typing import Any, Literal

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from kakeya import errors
from kakeya.http_server.errors import ApiError, error_body, error_response


def told(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    response = error_response(error, "/v1/responses")
    body = json.loads(response.body)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert error_body(error, "") == body
    return response.status_code, body["error"], dict(response.headers)


@pytest.mark.parametrize(
    "error, status, kind, code",
    [
        (errors.SessionNotFound("x"), 404, "invalid_request_error", "session_not_found"),
        (errors.InvalidArgument("x"), 400, "invalid_request_error", "invalid_value"),
        (errors.SessionBusy("x"), 409, "conflict_error", "session_busy"),
        (errors.HistoryMismatch("x"), 409, "conflict_error", "history_mismatch"),
        (errors.InvariantViolation("INV-1", "x"), 500, "server_error", "invariant_violation"),
        (errors.ResourceExhausted("x"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (errors.Unauthenticated("x"), 401, "invalid_request_error", "invalid_api_key"),
        (errors.Unavailable("x"), 503, "server_error", "unavailable"),
        (errors.DeadlineExceeded("x"), 504, "timeout_error", "timeout"),
        (errors.StepFailed("x"), 500, "server_error", "step_failed"),
    ],
)
def test_the_table(error: Exception, status: int, kind: str, code: str) -> None:
    got, body, headers = told(error)
    assert (got, body["type"], body["code"], body["param"]) == (status, kind, code, None)
    assert body["message"] == str(error)
    assert ("retry-after" in headers) is (status in (429, 503))
    assert headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


@pytest.mark.parametrize("wait, header", [(None, "1"), (0.0, "1"), (0.2, "1"), (6.1, "7")])
def test_when_to_come_back(wait: float | None, header: str) -> None:
    assert told(errors.ResourceExhausted("x", retry_after=wait))[2]["retry-after"] == header
    assert told(errors.Unavailable("x", retry_after=wait))[2]["retry-after"] == header


@pytest.mark.parametrize("error", [ValueError("a secret path"), errors.ConfigError("a secret path")])
def test_what_nobody_expected_is_in_the_log_alone(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "kakeya"):
        status, body, _ = told(error)
    assert (status, body["code"]) == (500, "internal_error")
    assert "secret" not in body["message"]
    assert "a secret path" in caplog.text


def test_an_api_error_is_told_as_it_is() -> None:
    error = ApiError(418, "no coffee", type="tea_error", param="pot", code="teapot", headers={"X-Tea": "yes"})
    status, body, headers = told(error)
    assert status == 418
    assert body == {"message": "no coffee", "type": "tea_error", "param": "pot", "code": "teapot"}
    assert headers["x-tea"] == "yes"
    assert str(error) == "no coffee"


def test_what_the_router_refuses() -> None:
    status, body, headers = told(HTTPException(405, "Method Not Allowed", {"Allow": "GET"}))
    assert (status, body["code"], headers["allow"]) == (405, "method_not_allowed", "GET")


def test_a_text_that_a_client_chose_is_bounded_and_always_encodable() -> None:
    assert len(told(errors.InvalidArgument("x" * 100_000))[1]["message"]) < 2100
    assert len(told(ApiError(400, "x", param="y" * 100_000))[1]["param"]) < 2100
    assert told(errors.InvalidArgument("\ud800"))[1]["message"] == "\ud800"


# Bodies that do not fit.


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["user"]
    content: str | list[Part]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")
    messages: list[Message]
    temperature: float = Field(default=1.0, ge=0)


USER = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    "body, param, code, words",
    [
        ({}, "messages", "missing_required_parameter", "messages: Field required"),
        (
            {"messages": [], "tempratur": 1},
            "tempratur",
            "unknown_parameter",
            "tempratur: this field is not known or not supported",
        ),
        ({"messages": [], "temperature": -1}, "temperature", "invalid_value", "greater than or equal to 0"),
        (
            {"messages": [USER, {"role": "user"}]},
            "messages.1.content",
            "missing_required_parameter",
            "required",
        ),
        (
            {"messages": [{"role": "cat", "content": ""}]},
            "messages.0.role",
            "invalid_value",
            "should be 'user'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "text": ""}]}]},
            "messages.0.content.0.type",
            "invalid_value",
            "should be 'text'",
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content",
            "invalid_value",
            "valid string",
        ),
        (
            {"messages": [USER], "temperature": "hot", "more": 1},
            "temperature",
            "invalid_value",
            "(and 1 more)",
        ),
        ([], None, "invalid_value", "the body: "),
    ],
)
def test_the_field_that_is_wrong_is_named(body: Any, param: str | None, code: str, words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Body.model_validate(body)
    problems = [problem | {"loc": ("body", *problem["loc"])} for problem in refused.value.errors()]
    status, got, _ = told(RequestValidationError(problems, body=body))
    assert (status, got["param"], got["code"]) == (400, param, code)
    assert words in got["message"]


def test_a_query_and_a_body_that_is_not_json() -> None:
    query = {"type": "int_parsing", "loc": ("query", "limit"), "msg": "should be a whole number"}
    assert told(RequestValidationError([query]))[1]["param"] == "limit"
    own = {"type": "value_error", "loc": ("body", "stop"), "msg": "Value error, at most 4"}
    assert told(RequestValidationError([own], body={"stop": 1}))[1]["message"] == "stop: at most 4"
    broken = {
        "type": "json_invalid",
        "loc": ("body", 7),
        "msg": "JSON decode error",
        "ctx": {"error": "comma"},
    }
    status, body, _ = told(RequestValidationError([broken]))
    assert (status, body["param"], body["code"]) == (400, None, "invalid_json")
    assert body["message"] == "the body is not valid JSON: comma"
