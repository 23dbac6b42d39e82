"""Settings of servers: a bad value is named, with what would be right."""

import math

import pytest

from kakeya.errors import ConfigError
from kakeya.serving.config import AdmissionConfig, HttpConfig


@pytest.mark.parametrize(
    "name, values",
    [
        ("bind", ["", "8000", "localhost", "::1:8000"]),
        ("max_body_bytes", [0, 1023, 1.5, True]),
        ("max_connections", [0, "many"]),
        ("receive_timeout_s", [0, -1, math.inf, math.nan, None]),
        ("request_timeout_s", [-1, math.nan, "long"]),
        ("keepalive_s", [0, True]),
        ("default_max_tokens", [0, -1]),
        ("held_conversations", [-1, 1.5]),
        ("held_seconds", [0, -1, math.inf]),
        ("stored_responses", [0]),
        ("cors_origins", [("example.org",)]),
    ],
)
def test_http_names_what_is_wrong(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"{name} must be"):
            HttpConfig(**{name: value})


@pytest.mark.parametrize(
    "name, values", [("max_concurrent", [0, 1.5]), ("queue_max_wait_s", [-1, math.nan]), ("queue_depth", [0])]
)
def test_admission_names_what_is_wrong(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"{name} must be"):
            AdmissionConfig(**{name: value})


def test_what_may_be_zero() -> None:
    assert HttpConfig(request_timeout_s=0, held_conversations=0).request_timeout_s == 0
    assert AdmissionConfig(queue_max_wait_s=0).queue_max_wait_s == 0
    assert HttpConfig(cors_origins=("*", "https://a.example:8443")).port == 8000
