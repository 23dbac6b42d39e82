"""The Messages API: one object or the events that build it, held sessions, tools, errors in its own shape."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kakeya.config import CacheConfig
from kakeya.http_server import HttpServer
from kakeya.runtime import Runtime
from kakeya.serving.keys import hash_key
from support.http_clients import Talker, content_of, letter_bias, user
from support.http_serving import ANY_PORT, client_of, serving_http
from support.serving import ENGINE

MESSAGES = "/v1/messages"
WIDE = replace(ENGINE, cache=CacheConfig(sink=2, window=600, spare=16))
PAINT = {
    "name": "paint",
    "description": "Paints.",
    "input_schema": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
}


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


@pytest.fixture
def letters(wide: tuple[HttpServer, Runtime]) -> dict[str, int]:
    return letter_bias(wide[1])


def ask(talker: Talker, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    answer = talker.post(MESSAGES, **{"max_tokens": 8, "messages": list(messages), **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def events_of(talker: Talker, *messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    body = {"model": talker.model, "stream": True, "max_tokens": 8, "messages": list(messages), **fields}
    answer = talker.client.post(MESSAGES, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def text_of(body: dict[str, Any]) -> str:
    return "".join(block["text"] for block in body["content"] if block["type"] == "text")


def said(body: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": body["content"]}


def test_it_says_what_a_chat_completion_says(talker: Talker, letters: dict[str, int]) -> None:
    body = ask(talker, user("Hello"), system="Be brief.", logit_bias=letters, seed=3)
    system = {"role": "system", "content": "Be brief."}
    chat = talker.chat([system, user("Hello")], logit_bias=letters, seed=3, max_tokens=8)
    assert text_of(body) == content_of(chat) != ""
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", talker.model)
    assert (body["stop_reason"], body["stop_sequence"]) == ("max_tokens", None)
    assert body["usage"] == {
        "input_tokens": chat["usage"]["prompt_tokens"],
        "cache_creation_input_tokens": 0,
        "dropped_tokens": 0,
        "recalled_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 8,
    }


def test_the_events_build_up_the_same_message(talker: Talker, letters: dict[str, int]) -> None:
    settings = {"logit_bias": letters, "seed": 3}
    whole = ask(talker, user("Hello"), **settings)
    events = events_of(talker, user("Hello"), **settings)
    kinds = [event["type"] for event in events]
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(deltas) == text_of(whole)
    assert events[0]["message"]["usage"] == whole["usage"] | {"output_tokens": 0}
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"] == whole["usage"]


@pytest.mark.parametrize("as_blocks", [True, False])
def test_a_conversation_goes_on_in_its_session(
    talker: Talker, letters: dict[str, int], as_blocks: bool
) -> None:
    settings = {"logit_bias": letters, "seed": 3, "system": [{"type": "text", "text": "Be brief."}]}
    first = ask(talker, user("Hello"), **settings)
    answer = said(first) if as_blocks else {"role": "assistant", "content": text_of(first)}
    second = ask(talker, user("Hello"), answer, user("Go on"), **settings)["usage"]
    # All but the last token of the answer, which was said and not computed.
    assert second["cache_read_input_tokens"] == first["usage"]["input_tokens"] + 8 - 1
    counted = talker.post(
        f"{MESSAGES}/count_tokens",
        system=settings["system"],
        messages=[user("Hello"), answer, user("Go on")],
    ).json()
    assert counted == {"input_tokens": second["input_tokens"] + second["cache_read_input_tokens"]}


def test_a_stream_begins_with_what_was_cached(talker: Talker, letters: dict[str, int]) -> None:
    settings = {"logit_bias": letters, "seed": 3}
    first = ask(talker, user("Hello"), **settings)
    events = events_of(talker, user("Hello"), said(first), user("Go on"), **settings)
    begun, ended = events[0]["message"]["usage"], events[-2]["usage"]
    assert begun["cache_read_input_tokens"] == first["usage"]["input_tokens"] + 8 - 1
    assert begun | {"output_tokens": 8} == ended


def test_a_stop_sequence_is_told_and_is_no_part_of_the_answer(
    talker: Talker, letters: dict[str, int]
) -> None:
    whole = text_of(ask(talker, user("Hello"), logit_bias=letters, seed=3))
    stop = whole[2:4]
    body = ask(talker, user("Hello"), logit_bias=letters, seed=3, stop_sequences=["never", stop])
    assert text_of(body) == whole[: whole.index(stop)]
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", stop)


def test_a_last_message_of_the_assistants_is_continued(talker: Talker, letters: dict[str, int]) -> None:
    settings = {"logit_bias": letters, "seed": 3}
    begun = {"role": "assistant", "content": "QZ"}
    body = ask(talker, user("Hello"), begun, **settings)
    assert body["usage"]["input_tokens"] > 0
    went_on = {"role": "assistant", "content": "QZ" + text_of(body)}
    assert ask(talker, user("Hello"), went_on, user("On"), **settings)["usage"]["cache_read_input_tokens"]


@pytest.mark.parametrize("streams", [True, False])
def test_a_call_is_made_answered_and_carried_on(talker: Talker, streams: bool) -> None:
    settings = {
        "tools": [PAINT],
        "tool_choice": {"type": "tool", "name": "paint"},
        "max_tokens": 300,
        "seed": 1,
    }
    if streams:
        events = events_of(talker, user("Paint"), **settings)
        [start] = [event for event in events if event["type"] == "content_block_start"]
        parts = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert {part["type"] for part in parts} == {"input_json_delta"}
        call = {
            **start["content_block"],
            "input": json.loads("".join(part["partial_json"] for part in parts)),
        }
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
    else:
        body = ask(talker, user("Paint"), **settings)
        assert body["stop_reason"] == "tool_use"
        [call] = body["content"]
    assert (call["type"], call["name"]) == ("tool_use", "paint")
    assert call["id"].startswith("toolu_")
    assert call["input"]["colour"] in ("red", "green")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "Done.", "is_error": True}
    answered = {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]}
    after = ask(
        talker, user("Paint"), {"role": "assistant", "content": [call]}, answered, tools=[PAINT], max_tokens=4
    )
    assert after["usage"]["cache_read_input_tokens"] > 0


def test_a_call_that_was_cut_off_is_no_part_of_the_message(talker: Talker) -> None:
    body = ask(talker, user("Paint"), tools=[PAINT], tool_choice={"type": "any"}, max_tokens=10)
    assert body["content"] == []
    assert body["stop_reason"] == "max_tokens"


def test_an_answer_fits_its_schema(talker: Talker) -> None:
    schema = PAINT["input_schema"]
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    body = ask(talker, user("Paint"), output_config=config, max_tokens=300)
    assert json.loads(text_of(body))["colour"] in ("red", "green")


def test_errors_have_anthropics_shape(talker: Talker) -> None:
    answer = talker.post(MESSAGES, messages=[user("Hello")])
    error = answer.json()
    assert answer.status_code == 400
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in error["error"]["message"]
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    missing = talker.client.post(MESSAGES, json={"model": "none", "max_tokens": 1, "messages": [user("x")]})
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    unknown = talker.client.get(f"{MESSAGES}/batches")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")


def test_an_error_ends_a_stream_in_anthropics_shape(
    talker: Talker, wide: tuple[HttpServer, Runtime], letters: dict[str, int]
) -> None:
    runtime = wide[1]
    asked = {"messages": [user("Hello")], "max_tokens": 100_000, "logit_bias": letters}
    with talker.streaming(MESSAGES, **asked) as lines:
        while next(lines) != "event: content_block_delta":
            pass
        [info] = runtime.list_sessions(owner="local")[0]
        runtime.close_session(info.session_id, owner="local")
        *_, name, data = lines
    assert name == "event: error"
    error = json.loads(data)
    assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")


@pytest.mark.parametrize("headers", [{"x-api-key": "right"}, {"authorization": "Bearer right"}])
def test_either_header_has_the_key(model: Path, headers: dict[str, str]) -> None:
    config = replace(ANY_PORT, key_hashes=(hash_key("right"),))
    with serving_http(model, config) as (server, _), httpx.Client(trust_env=False) as http:
        url = f"{server.url}{MESSAGES}/count_tokens"
        wrong = http.post(url, json={}, headers={"x-api-key": "wrong"})
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
        # The key is right; the body is not.
        assert http.post(url, json={}, headers=headers).status_code == 400
