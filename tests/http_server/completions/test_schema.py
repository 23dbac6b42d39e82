"""What chat completions cannot do is refused by name, and nothing is left behind."""

from collections.abc import Iterator
from typing import Any

import pytest

from kakeya.http_server import HttpServer
from kakeya.runtime import Runtime
from support.http_clients import Talker, user
from support.http_serving import client_of, eventually

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}


@pytest.fixture
def talker(server: HttpServer, runtime: Runtime) -> Iterator[Talker]:
    with client_of(server) as client:
        yield Talker(client, runtime.describe().model)
    assert runtime.list_sessions(owner="local")[0] == []
    eventually(lambda: server.state.admission.running == 0)


@pytest.mark.parametrize(
    "field, value",
    [
        ("audio", {"voice": "x"}),
        ("function_call", "auto"),
        ("functions", []),
        ("modalities", ["audio"]),
        ("modalities", []),
        ("moderation", {}),
        ("prompt_cache_options", {}),
        ("prompt_cache_retention", "for ever"),
        ("reasoning_effort", "enormous"),
        ("verbosity", "loud"),
        ("min_tokens", -1),
        ("min_tokens", 2000),
        ("ignore_eos", 1),
        ("stop_token_ids", [10**6]),
        ("stop_token_ids", 5),
        ("skip_special_tokens", "no"),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", "thinking"),
        ("continue_final_message", True),
        ("web_search_options", {}),
        ("store", True),
        ("service_tier", "flex"),
        ("unheard_of", 1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 2),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("seed", 2**64),
        ("seed", 1.5),
        ("n", 0),
        ("n", 5),
        ("n", 1000),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", 2**31),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"99999": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": True}),
        ("logit_bias", [1]),
        ("top_logprobs", 5),
        ("top_logprobs", 21),
        ("stream_options", {"include_usage": True}),
        ("metadata", {str(number): "x" for number in range(17)}),
        ("tool_choice", "required"),
        ("messages", []),
        ("messages", None),
    ],
)
def test_fields_are_refused_by_name(talker: Talker, field: str, value: object) -> None:
    status, error = talker.refusal(**{"messages": [user("Hello")], field: value})
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", field)
    assert field in error["message"]


@pytest.mark.parametrize(
    "message, param",
    [
        ({"role": "robot", "content": "x"}, "messages.1.role"),
        ({"role": "function", "content": "x"}, "messages.1.role"),
        ({"content": "x"}, "messages.1.role"),
        ({"role": "user"}, "messages.1"),
        ({"role": "user", "content": None}, "messages.1"),
        ({"role": "user", "content": 5}, "messages.1.content"),
        ({"role": "user", "content": "x", "name": "Bob"}, "messages.1"),
        ({"role": "user", "content": "x", "extra": 1}, "messages.1.extra"),
        ({"role": "user", "content": "x", "tool_call_id": "y"}, "messages.1"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages.1"),
        ({"role": "assistant", "content": None}, "messages.1"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, "messages.1.refusal"),
        ({"role": "assistant", "content": "x", "function_call": {}}, "messages.1.function_call"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, "messages.1.audio"),
        ({"role": "assistant", "content": "x", "annotations": [{}]}, "messages.1.annotations"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "["}}]},
            "messages.1.tool_calls.0.function.arguments",
        ),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "messages.1.tool_calls.0.type"),
        ({"role": "tool", "content": "x"}, "messages.1"),
        ({"role": "tool", "content": "x", "tool_call_id": "call_9"}, "messages.1.tool_call_id"),
    ],
)
def test_messages_are_refused_by_their_place(talker: Talker, message: dict[str, Any], param: str) -> None:
    status, error = talker.refusal(messages=[user("Hello"), message])
    assert (status, error["param"]) == (400, param), error
    assert param.rpartition(".")[2] in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("broken", [{"type": "string", "pattern": "("}, {"type": "colour"}])
def test_a_schema_that_cannot_be_compiled_names_its_field_and_says_where(
    talker: Talker, broken: dict[str, Any], stream: bool
) -> None:
    schema = {"type": "object", "properties": {"a": broken}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    status, error = talker.refusal(messages=[user("Hello")], response_format=wanted, stream=stream)
    assert (status, error["param"]) == (400, "response_format")
    assert "/properties/a" in error["message"]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    status, error = talker.refusal(messages=[user("Hello")], tools=[tool], stream=stream)
    assert (status, error["param"]) == (400, "tools")
    assert "f" in error["message"]


@pytest.mark.parametrize(
    "part, reason",
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, "image_url"),
        ({"type": "input_audio", "input_audio": {}}, "input_audio"),
        ({"type": "file", "file": {}}, "file"),
        ({"type": "refusal", "refusal": "no"}, "refusal"),
        ({"type": "text"}, "a text"),
        ({"type": "text", "text": 5}, "a text"),
        ({"type": "text", "text": "x", "more": 1}, "nothing else"),
        ({"text": "x"}, "with a type"),
        ("x", "with a type"),
    ],
)
def test_parts_are_refused_by_their_type(talker: Talker, part: object, reason: str) -> None:
    content = [{"type": "text", "text": "x"}, part]
    status, error = talker.refusal(messages=[{"role": "user", "content": content}])
    assert (status, error["param"]) == (400, "messages.0.content")
    assert "part 1" in error["message"]
    assert reason in error["message"]


def test_the_name_of_a_tool_must_be_that_of_the_call(talker: Talker) -> None:
    result = {"role": "tool", "content": "x", "tool_call_id": "call_1", "name": "g"}
    status, error = talker.refusal(messages=[user("Hello"), CALLING, result])
    assert (status, error["param"]) == (400, "messages.2.name")


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"tools": [{"type": "custom"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": None}}, "prediction.content"),
        ({"prediction": {"type": "guess", "content": "x"}}, "prediction.type"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}},
            "response_format",
        ),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
    ],
)
def test_contradictions_are_named(talker: Talker, fields: dict[str, Any], param: str) -> None:
    status, error = talker.refusal(messages=[user("Hello")], **fields)
    assert (status, error["param"]) == (400, param), error


def test_another_model_is_not_found(talker: Talker) -> None:
    answer = talker.client.post("/v1/chat/completions", json={"model": "gpt-4o", "messages": [user("Hi")]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert talker.model in error["message"]


def test_a_body_without_a_model_is_refused(talker: Talker) -> None:
    answer = talker.client.post("/v1/chat/completions", json={"messages": [user("Hi")]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
