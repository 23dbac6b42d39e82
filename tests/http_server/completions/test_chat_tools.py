"""Structured answers: JSON that fits, tool calls that parse, streamed alike, and carried on."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kakeya.config import CacheConfig
from kakeya.http_server import HttpServer
from kakeya.runtime import Runtime
from support.http_clients import Talker, content_of, letter_bias, logprobs_of, streamed_content, user
from support.http_serving import client_of, serving_http
from support.serving import ENGINE

WIDE = replace(ENGINE, cache=CacheConfig(sink=2, window=600, spare=16))
COLOURS = {"enum": ["red", "green", "blue"]}
PAINT = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paints.",
        "parameters": {
            "type": "object",
            "properties": {"colour": COLOURS, "times": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["colour", "times"],
            "additionalProperties": False,
        },
    },
}
REST = {
    "type": "function",
    "function": {
        "name": "rest",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
HELLO = [user("Hello")]


@pytest.fixture(scope="module")
def wide(model: Path) -> Iterator[tuple[HttpServer, Runtime]]:
    with serving_http(model, engine=WIDE) as live:
        yield live


@pytest.fixture
def talker(wide: tuple[HttpServer, Runtime]) -> Iterator[Talker]:
    server, runtime = wide
    with client_of(server) as client:
        yield Talker(client, runtime.describe().model)
    for info in runtime.list_sessions(owner="local")[0]:
        runtime.close_session(info.session_id, owner="local")


def calls_of(body: dict[str, Any]) -> list[tuple[str, Any]]:
    message = body["choices"][0]["message"]
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message["tool_calls"]
    ]


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_fits_its_schema(talker: Talker, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": COLOURS, "sizes": {"type": "array", "items": COLOURS, "maxItems": 2}},
        "required": ["colour", "sizes"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    settings = {"response_format": wanted, "seed": seed, "max_tokens": 200, "logprobs": True}
    body = talker.chat(HELLO, **settings)
    value = json.loads(content_of(body))
    assert body["choices"][0]["finish_reason"] == "stop"
    assert value["colour"] in COLOURS["enum"]
    assert set(value["sizes"]) <= set(COLOURS["enum"])
    chunks = talker.stream(messages=HELLO, **settings)
    assert streamed_content(chunks) == content_of(body)
    assert b"".join(bytes(each["bytes"]) for each in logprobs_of(body)).decode() == content_of(body)


def test_any_json_object(talker: Talker, wide: tuple[HttpServer, Runtime]) -> None:
    # A random model would write for ever: it may only close what it has opened.
    closing = {str(wide[1].tokenizer.encode(text)[0]): 100 for text in "{}"}
    settings = {"response_format": {"type": "json_object"}, "temperature": 0, "logit_bias": closing}
    body = talker.chat(HELLO, **settings)
    assert body["choices"][0]["finish_reason"] == "stop"
    assert json.loads(content_of(body)) == {}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.slow
def test_a_required_call_parses_and_streams_alike(talker: Talker, seed: int, parallel: bool) -> None:
    settings = {
        "tools": [PAINT, REST],
        "tool_choice": "required",
        "parallel_tool_calls": parallel,
        "seed": seed,
        "max_tokens": 400,
        "logprobs": True,
    }
    body = talker.chat(HELLO, **settings)
    [choice] = body["choices"]
    if choice["finish_reason"] == "length":  # a random model likes calling
        assert parallel
        return
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    calls = calls_of(body)
    assert len(calls) == 1 or parallel
    for name, arguments in calls:
        assert (name, set(arguments)) in (("paint", {"colour", "times"}), ("rest", set()))
    ids = [call["id"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids)
    assert all(each.startswith("call_") for each in ids)
    chunks = talker.stream(messages=HELLO, **settings)
    assert joined_calls(chunks) == calls
    assert streamed_content(chunks) == ""
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "tool_calls"
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [each for part in told if part for each in part["content"]] == logprobs_of(body)


def joined_calls(chunks: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """As clients put them together: id and name first, then pieces of arguments."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for part in chunk["choices"][0]["delta"].get("tool_calls", []):
            if "id" in part:
                assert part["type"] == "function"
                assert part["index"] == len(calls)
                calls.append({"name": part["function"]["name"], "arguments": ""})
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def test_the_named_function_is_called(talker: Talker) -> None:
    choice = {"type": "function", "function": {"name": "rest"}}
    body = talker.chat(HELLO, tools=[PAINT, REST], tool_choice=choice, max_tokens=200)
    assert calls_of(body) == [("rest", {})]


def test_text_is_fine_where_no_call_is_needed(talker: Talker, wide: tuple[HttpServer, Runtime]) -> None:
    body = talker.chat(HELLO, tools=[PAINT], max_tokens=6, logit_bias=letter_bias(wide[1]))
    assert len(content_of(body)) == 6
    assert "tool_calls" not in body["choices"][0]["message"]


def test_no_tools_are_told_of_where_none_may_be_called(talker: Talker) -> None:
    settings = {"temperature": 0, "max_tokens": 5, "logprobs": True}
    body = talker.chat(HELLO, tools=[PAINT], tool_choice="none", **settings)
    assert body["usage"]["prompt_tokens"] == talker.chat(HELLO, **settings)["usage"]["prompt_tokens"]
    form = {"response_format": {"type": "json_object"}, "max_tokens": 2}
    assert talker.chat(HELLO, tools=[PAINT], tool_choice="none", **form)["choices"]


def test_a_cut_call_is_told_as_far_as_it_came(talker: Talker, wide: tuple[HttpServer, Runtime]) -> None:
    choice = {"type": "function", "function": {"name": "paint"}}
    fields = {"tools": [PAINT], "tool_choice": choice, "seed": 1}
    whole = talker.chat(HELLO, **fields, max_tokens=200)
    length = whole["usage"]["completion_tokens"]
    written = whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    body = talker.chat([user("Hello")], **fields, max_tokens=length - 20)
    assert body["choices"][0]["finish_reason"] == "length"
    for call in body["choices"][0]["message"].get("tool_calls", []):
        assert written.startswith(call["function"]["arguments"])
    assert len(wide[1].list_sessions(owner="local")[0]) == 1, "what nobody can go on with is not held"


@pytest.mark.parametrize("name", [None, "rest"])
def test_a_loop_of_calls_goes_on_in_its_session(talker: Talker, name: str | None) -> None:
    choice = {"type": "function", "function": {"name": "rest"}}
    messages = [{"role": "system", "content": "Rest."}, user("Hello")]
    fields = {"tools": [PAINT, REST], "tool_choice": choice, "max_tokens": 200, "temperature": 0}
    for turn in range(3):
        body = talker.chat(messages, **fields)
        assert (body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == (turn > 0)
        said = body["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "rested"}
        messages += [said, {**result, "name": name} if name else result]
    final = talker.chat(messages, **{**fields, "tool_choice": "auto", "max_tokens": 3})
    assert final["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_grammar_holds_every_choice(talker: Talker) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": COLOURS}}
    body = talker.chat(HELLO, response_format=wanted, n=4, seed=8, temperature=2.0)
    said = [json.loads(content_of(body, index)) for index in range(4)]
    assert set(said) <= set(COLOURS["enum"])
