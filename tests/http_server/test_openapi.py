"""Whatever the OpenAPI document allows, and what it does not, is answered in time and never with a 5xx."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings, strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from kakeya.config import RuntimeConfig
from kakeya.http_server import HttpServer
from kakeya.http_server.app import create_app
from kakeya.http_server.openapi import document
from support.http_clients import ENGINE
from support.http_serving import ANY_PORT, eventually, serving_http
from support.tiny import write_chat_model

pytestmark = [pytest.mark.untraced, pytest.mark.slow]

# Of each operation, with a body and without. The whole takes seconds, and is the same in every run.
EXAMPLES, FEWER_EXAMPLES = 20, 8
LONGEST_S = 10
# Fields that say how much is generated, and what is enough here.
BOUNDS = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "n": 2, "best_of": 2}
GENERATING = {
    "/v1/responses": "max_output_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/messages": "max_tokens",
}
# What makes sense where a question is expected.
QUESTIONS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "input": "Hello",
    "prompt": "Hello",
    "min_tokens": 0,
}


@dataclass
class Api:
    """A server, and things there are to ask for."""

    server: HttpServer
    http: httpx.Client
    transport: requests.Session

    @property
    def model(self) -> str:
        return str(self.http.get("/v1/models").json()["data"][0]["id"])

    def known(self, name: str) -> str:
        """The id of something that exists. It is new: what is deleted is gone."""
        if name == "model":
            return self.model
        if name in ("conversation", "conversation_id"):
            return str(self.http.post("/v1/conversations").json()["id"])
        wanted = {"input": "Hello", "max_output_tokens": 2}
        return str(self.http.post("/v1/responses", json=wanted).json()["id"])


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    model = write_chat_model(tmp_path_factory.mktemp("chat"))
    with (
        # Chains that were gone on with keep their sessions until nobody has used them for a while.
        serving_http(model, engine=replace(ENGINE, capacity=64), sessions=RuntimeConfig(2.0)) as (server, _),
        httpx.Client(base_url=server.url, trust_env=False, timeout=LONGEST_S) as http,
        requests.Session() as transport,
    ):
        transport.trust_env = False
        yield Api(server, http, transport)


def operations() -> list[APIOperation]:
    """All that the document describes. It can be written without a server."""
    state = HttpServer(ANY_PORT).state
    described = schemathesis.openapi.from_dict(document(create_app(state), needs_key=False))
    return [each.ok() for each in described.get_all_operations()]


def examinations() -> Iterator[Any]:
    """Every operation with requests that fit the document, and with such that do not, where there are any."""
    for operation in operations():
        yield pytest.param(operation, GenerationMode.POSITIVE, id=f"good {operation.label}")
        if operation.body or operation.query:
            yield pytest.param(operation, GenerationMode.NEGATIVE, id=f"bad {operation.label}")


@pytest.mark.parametrize("operation, mode", list(examinations()))
def test_every_request_is_answered(api: Api, operation: APIOperation, mode: GenerationMode) -> None:
    @settings(
        max_examples=EXAMPLES if operation.body else FEWER_EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode), knows=st.booleans())
    def ask(case: Case, knows: bool) -> None:
        if knows and mode is GenerationMode.POSITIVE:
            make_sense(case, api)
        bound(case)
        answer = case.call(base_url=api.server.url, session=api.transport, timeout=LONGEST_S)
        # No 5xx, a body as described, and no success for what does not fit the document. What fits it may
        # still be refused: fields contradict each other, ids are unknown.
        case.validate_response(answer, excluded_checks=[positive_data_acceptance])

    ask()


def make_sense(case: Case, api: Api) -> None:
    """Put ids that the server knows, and something to answer, where random values would be refused."""
    for name in case.path_parameters or {}:
        case.path_parameters[name] = api.known(name)
    if isinstance(case.body, dict):
        for name in ("model", "previous_response_id", "conversation"):
            if isinstance(case.body.get(name), str):
                case.body[name] = api.known(name)
        case.body.update((name, value) for name, value in QUESTIONS.items() if name in case.body)


def bound(case: Case) -> None:
    """Make what is generated short."""
    body = case.body
    if not isinstance(body, dict):
        return
    if (field := GENERATING.get(case.path)) is not None and body.get(field) is None:
        body[field] = BOUNDS[field]
    for field, most in BOUNDS.items():
        if isinstance(body.get(field), int) and body[field] > most:
            body[field] = most


def test_nothing_is_left_running(api: Api) -> None:
    eventually(lambda: api.server.state.admission.running == 0)
    assert not api.server.state.streams
    assert api.http.get("/readyz").status_code == 200
