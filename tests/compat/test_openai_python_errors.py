"""The official Python package meets errors: the right exceptions, and retries that it makes by itself."""

import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import (
    APIStatusError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    OpenAI,
    RateLimitError,
)

from kakeya.http_server import HttpServer
from kakeya.runtime import Runtime
from support.clients import Served, all_places_taken
from support.http_serving import start
from support.serving import ENGINE, on_loop, write_model

HELLO: Any = [{"role": "user", "content": "Say hello."}]
RunAsync = Callable[[Callable[[AsyncOpenAI], Awaitable[None]]], None]


def body_of(error: APIStatusError) -> dict[str, Any]:
    """The error as the server wrote it: the four fields that OpenAI's have."""
    assert isinstance(error.body, dict)
    assert error.body.keys() == {"message", "type", "param", "code"}
    assert error.request_id
    return error.body


def test_a_wrong_key(client: OpenAI, model: str) -> None:
    with pytest.raises(AuthenticationError) as caught:
        client.with_options(api_key="wrong").models.list()
    assert body_of(caught.value)["code"] == "invalid_api_key"
    with pytest.raises(AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(model=model, messages=HELLO, stream=True)


@pytest.mark.parametrize(
    "fields, param, code",
    [
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"frobnicate": 1}, "frobnicate", "unknown_parameter"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": None}, "messages", "invalid_value"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "invalid_value"),
        ({"stream": True, "n": 1000}, "n", "invalid_value"),
    ],
)
def test_bad_chats(client: OpenAI, model: str, fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(
            model=model, messages=HELLO, max_tokens=1, extra_body=fields, stream=bool(fields.get("stream"))
        )
    body = body_of(caught.value)
    assert (body["type"], body["param"], body["code"]) == ("invalid_request_error", param, code)
    assert param in body["message"]
    headers = caught.value.response.headers
    assert headers["deprecation"] == "true"
    assert headers["link"] == '</v1/responses>; rel="successor-version"'


def test_a_schema_that_cannot_be_compiled_is_pointed_at(client: OpenAI, model: str) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(
            model=model,
            messages=HELLO,
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        )
    assert "nowhere" in body_of(caught.value)["message"]


def test_what_is_not_there(client: OpenAI, model: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        client.chat.completions.create(model="gpt-none", messages=HELLO)
    assert body_of(caught.value)["code"] == "model_not_found"
    with pytest.raises(NotFoundError) as caught:
        client.models.retrieve("gpt-none")
    assert body_of(caught.value)["code"] == "model_not_found"
    with pytest.raises(NotFoundError) as caught:
        client.responses.create(model=model, input="Hello", previous_response_id="resp_none")
    body = body_of(caught.value)
    assert (body["param"], body["code"]) == ("previous_response_id", "previous_response_not_found")
    with pytest.raises(NotFoundError):
        client.conversations.retrieve("conv_none")
    with pytest.raises(NotFoundError):
        client.embeddings.create(model=model, input="Hello")


def test_a_history_that_must_not_be_cut(client: OpenAI, model: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(
            model=model, input="word " * 400, truncation="disabled", max_output_tokens=200
        )
    assert body_of(caught.value)["code"] == "context_length_exceeded"


def test_a_busy_conversation(client: OpenAI, model: str) -> None:
    conversation = client.conversations.create()
    wanted: Any = {"model": model, "input": "On and on", "conversation": conversation.id}
    bias = {"0": -100, "2": -100}
    with client.responses.create(
        **wanted, max_output_tokens=10_000, stream=True, extra_body={"logit_bias": bias}
    ) as stream:
        next(iter(stream))
        with pytest.raises(ConflictError) as caught:
            client.responses.create(**wanted, max_output_tokens=1)
    assert body_of(caught.value)["code"] == "session_busy"


def test_a_full_server_is_told_and_retried(client: OpenAI, served: Served) -> None:
    with all_places_taken(served) as running:
        with pytest.raises(RateLimitError) as caught:
            client.chat.completions.create(model=served.model, messages=HELLO, max_tokens=1)
        assert body_of(caught.value)["code"] == "rate_limit_exceeded"
        assert float(caught.value.response.headers["retry-after"]) >= 1
        with after(0.5, running.close):
            patient = client.with_options(max_retries=5)
            asked = patient.chat.completions.with_raw_response.create(
                model=served.model, messages=HELLO, max_tokens=1
            )
    assert asked.retries_taken > 0
    assert asked.parse().choices[0].message.role == "assistant"


def test_the_asynchronous_client_retries_too(run_async: RunAsync, served: Served) -> None:
    async def test(client: AsyncOpenAI) -> None:
        with pytest.raises(RateLimitError):
            await client.responses.create(model=served.model, input="Hello", max_output_tokens=1)
        with after(0.5, running.close):
            response = await client.with_options(max_retries=5).responses.create(
                model=served.model, input="Hello", max_output_tokens=1
            )
        assert response.output_text

    with all_places_taken(served) as running:
        run_async(test)


def test_a_server_that_is_loading(loading: HttpServer) -> None:
    with (
        client_of(loading, max_retries=0) as client,
        pytest.raises(InternalServerError) as caught,
    ):
        client.models.list()
    assert caught.value.status_code == 503
    assert body_of(caught.value)["code"] == "unavailable"
    assert "loading" in caught.value.message


def test_a_client_waits_until_the_server_has_loaded(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    server = start()
    try:
        with (
            after(0.5, lambda: on_loop(server.open(Runtime.open(str(model), ENGINE)))),
            client_of(server, max_retries=8) as client,
        ):
            answer = client.models.with_raw_response.list()
        assert answer.retries_taken > 0
        assert answer.parse().data[0].owned_by == "kakeya"
    finally:
        on_loop(server.drain(0))


def test_a_draining_server_refuses(tmp_path: Path) -> None:
    server = start()
    on_loop(server.open(Runtime.open(str(write_model(tmp_path)), ENGINE)))
    with client_of(server, max_retries=0) as client:
        model = client.models.list().data[0].id
        on_loop(server.refuse())
        with pytest.raises(InternalServerError) as caught:
            client.chat.completions.create(model=model, messages=HELLO)
    on_loop(server.drain(0))
    assert caught.value.status_code == 503
    assert "retry-after" in caught.value.response.headers


@contextmanager
def client_of(server: HttpServer, max_retries: int) -> Iterator[OpenAI]:
    with (
        httpx.Client(trust_env=False, timeout=30) as transport,
        OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=max_retries, http_client=transport
        ) as client,
    ):
        yield client


@contextmanager
def after(seconds: float, work: Callable[[], object]) -> Iterator[None]:
    """Does some work later, while the test goes on; waits for it at the end."""

    def late() -> None:
        time.sleep(seconds)
        work()

    thread = threading.Thread(target=late)
    thread.start()
    try:
        yield
    finally:
        thread.join()
