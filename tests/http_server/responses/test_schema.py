"""What the Responses routes refuse, by name, and what they list."""

from functools import partial
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from support.http_clients import Responding, text_of


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input.0.role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"type": "reasoning", "id": "x", "summary": []}]}, "input.0"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]},
            "input.0.arguments",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}]},
            "input.0.arguments",
        ),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"reasoning": {"colour": "red"}}, "reasoning.colour"),
        ({"background": True}, "background"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"stop": ["x"]}, "stop"),
        ({"min_tokens": 9, "max_output_tokens": 8}, "min_tokens"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"prompt_cache_retention": "for ever"}, "prompt_cache_retention"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"context_management": []}, "context_management"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"include": ["the kitchen sink"]}, "include.0"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"stream_options": {}}, "stream_options"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": "thinking"}, "chat_template_kwargs"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"truncation": "middle"}, "truncation"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
    ],
)
def test_bad_fields_are_named(api: Responding, fields: dict[str, Any], param: str) -> None:
    error = api.refused(400, **{"input": "Hello", **fields})
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert api.sessions() == {}


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"continue_final_message": True}, "continue_final_message", "a response is a message of its own"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "a response is the assistant's"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "a response has its usage in its last event",
        ),
    ],
)
def test_what_makes_no_sense_here_is_refused_with_the_reason(
    api: Responding, fields: dict[str, Any], param: str, reason: str
) -> None:
    error = api.refused(400, input="Hello", **fields)
    assert error["param"] == param
    assert reason in error["message"]


def test_defaults_of_the_original_may_be_sent(api: Responding) -> None:
    defaults = {
        "model": api.runtime.describe().model,
        "background": False,
        "reasoning": None,
        "store": True,
        "stream": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "truncation": None,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "include": [],
        "metadata": None,
        "user": "me",
        "safety_identifier": "me",
        "prompt_cache_key": "key",
    }
    body = api.ask("Hello", **defaults)
    assert body["tool_choice"] == "auto"
    assert body["prompt_cache_key"] == "key"


def test_settings_that_change_nothing_may_be_sent(api: Responding) -> None:
    plain = api.ask("Hello", seed=5, max_output_tokens=6)
    settings = {
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "max_tool_calls": 3,
        "prompt_cache_retention": "24h",
        "stop": None,
        "continue_final_message": False,
        "add_generation_prompt": True,
        "chat_template_kwargs": {"mood": "calm"},  # of which this template knows nothing
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
    }
    body = api.ask("Hello", seed=5, max_output_tokens=6, **settings)
    assert text_of(body) == text_of(plain)
    assert body["max_tool_calls"] == 3
    assert body["output"][0]["content"][0]["logprobs"] == []  # none of these asks for them


def test_an_ignored_end_makes_an_answer_as_long_as_it_may_be(api: Responding) -> None:
    ends = {str(token_id): 100 for token_id in api.runtime.model_config.eos_token_ids}
    assert api.ask("Hello", logit_bias=ends, max_output_tokens=7)["usage"]["output_tokens"] == 1
    body = api.ask("Hello", logit_bias=ends, max_output_tokens=7, ignore_eos=True)
    assert body["usage"]["output_tokens"] == 7
    assert api.ask("Hello", logit_bias=ends, max_output_tokens=7, min_tokens=4)["usage"]["output_tokens"] == 5


def test_special_tokens_and_stop_tokens_are_shown_where_asked_for(api: Responding) -> None:
    ends = {str(token_id): 100 for token_id in api.runtime.model_config.eos_token_ids}
    ending = {"logit_bias": ends, "max_output_tokens": 4, "ignore_eos": True}
    assert text_of(api.ask("Hello", **ending)) == ""
    assert text_of(api.ask("Hello", **ending, skip_special_tokens=False)) == "<|end|>" * 4
    [stop] = api.runtime.tokenizer.encode("s")
    stopping = {"logit_bias": {str(stop): 100}, "stop_token_ids": [stop]}
    assert text_of(api.ask("Hello", **stopping)) == ""
    assert text_of(api.ask("Hello", **stopping, include_stop_str_in_output=True)) == "s"


def test_another_model_is_not_here(api: Responding) -> None:
    error = api.refused(404, input="Hello", model="gpt-4o")
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_what_the_server_said_may_be_sent_back(api: Responding) -> None:
    # A form is plain text, which a random model would not write by itself.
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "form", "schema": schema}}
    asked = {"text": form, "max_output_tokens": 200, "include": ["message.output_text.logprobs"]}
    first = api.ask("Hello", **asked)
    said = [{"role": "user", "content": "Hello"}, *first["output"], {"role": "user", "content": "More"}]
    stateless = api.ask(said)
    chained = api.ask("More", previous_response_id=first["id"])
    assert stateless["output"][0]["content"] == chained["output"][0]["content"]
    listed = api.http.get(f"/v1/responses/{stateless['id']}/input_items?order=asc").json()["data"]
    assert [item["role"] for item in listed] == ["user", "assistant", "user"]
    assert listed[1]["id"] == first["output"][0]["id"]


def test_unknown_ids_and_questions(api: Responding) -> None:
    for path in ("/v1/responses/resp_x", "/v1/responses/resp_x/input_items"):
        answer = api.http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
    assert api.http.delete("/v1/responses/resp_x").status_code == 404
    body = api.ask("Hello")
    path = f"/v1/responses/{body['id']}"
    assert api.http.get(f"{path}?include=message.output_text.logprobs&stream=false").json() == body
    for query, param in (("stream=true", "stream"), ("starting_after=3", "starting_after")):
        answer = api.http.get(f"{path}?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    answer = api.http.get(f"{path}/input_items?limit=0")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


def test_half_a_surrogate_pair_is_an_answer_and_not_an_accident(api: Responding) -> None:
    body = api.ask("Hello", user="\ud800")
    assert body["user"] == "\ud800"
    assert api.refused(400, input="\ud800")["type"] == "invalid_request_error"


def test_the_official_client_raises_the_right_errors(api: Responding) -> None:
    create = partial(api.openai.responses.create, input="Hello")
    with pytest.raises(NotFoundError) as unknown:
        create(previous_response_id="resp_x")
    assert (unknown.value.code, unknown.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )
    with pytest.raises(BadRequestError) as too_long:
        create(truncation="disabled", max_output_tokens=1_000_000)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(NotFoundError) as elsewhere:
        create(model="gpt-4o")
    assert elsewhere.value.code == "model_not_found"
