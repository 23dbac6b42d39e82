"""Streams of the Responses API: events that the official client reads, and streams that break off."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from support.http_clients import GREEDY, OWNER, Responding, cached, history, responding, text_of
from support.http_serving import connection_to, eventually
from support.serving import on_loop

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def events_of(api: Responding, **fields: Any) -> list[dict[str, Any]]:
    """All events of a stream, each checked against the official types."""
    with api.http.stream("POST", "/v1/responses", json={**GREEDY, **fields, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        frames = answer.read().decode().split("\n\n")[:-1]
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_events_tell_a_message_in_order(api: Responding) -> None:
    events = events_of(api, input="Hello")
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        kinds[-1],
    ]
    final = events[-1]["response"]
    assert kinds[-1] == final["status"]
    text = "".join(event["delta"] for event in deltas)
    assert text
    assert text == text_of(final) == events[-4]["text"] == events[-3]["part"]["text"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["id"] == final["id"]
    assert api.http.get(f"/v1/responses/{final['id']}").json() == final
    assert text == text_of(api.ask("Hello")), "told at once it is the same"


def test_a_whole_response_has_the_official_shape(api: Responding) -> None:
    body = api.ask("Hello", metadata={"a": "b"}, user="me", instructions="Be brief.")
    Response.model_validate(body)
    assert body["metadata"] == {"a": "b"}
    assert body["model"] == api.runtime.describe().model
    cut = api.ask("Hello", max_output_tokens=1)
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["status"] == "incomplete"
    assert cut["usage"]["output_tokens"] == 1
    assert api.ask("x", previous_response_id=cut["id"])["usage"]["input_tokens"] > history(cut)


def test_the_official_client_streams_and_chains(api: Responding) -> None:
    client = api.openai
    model = api.runtime.describe().model
    first = client.responses.create(model=model, input="Hello", **GREEDY)
    assert first.output_text == text_of(api.ask("Hello"))
    # A form ends by itself, whatever a random model says.
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False}
    wanted = {"format": {"type": "json_schema", "name": "form", "schema": schema}}
    asked = {"model": model, "input": "More", "temperature": 0, "max_output_tokens": 200, "text": wanted}
    with client.responses.stream(previous_response_id=first.id, **asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == "".join(deltas)
    assert final.usage is not None
    assert final.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1
    assert client.responses.retrieve(final.id).output_text == final.output_text
    items = client.responses.input_items.list(final.id)
    assert [item.content[0].text for item in items] == ["More"]
    client.responses.delete(final.id)


def test_the_official_async_client_streams(api: Responding) -> None:
    async def stream() -> tuple[list[str], str]:
        transport = httpx.AsyncClient(trust_env=False)
        client = AsyncOpenAI(
            base_url=f"{api.server.url}/v1", api_key="none", max_retries=0, http_client=transport
        )
        async with client:
            kinds, text = [], ""
            async for event in await client.responses.create(input="Hello", stream=True, **GREEDY):
                kinds.append(event.type)
                text += event.delta if event.type == "response.output_text.delta" else ""
        return kinds, text

    kinds, text = asyncio.run(stream())
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert text == text_of(api.ask("Hello"))


def test_log_probabilities_come_with_the_text(api: Responding) -> None:
    asked = {"input": "Hello", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    events = events_of(api, **asked)
    final = events[-1]["response"]
    logprobs = final["output"][0]["content"][0]["logprobs"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [each for event in deltas for each in event["logprobs"]] == logprobs
    assert len(logprobs) >= final["usage"]["output_tokens"] - 1, "all but the end"
    for each in logprobs:
        assert next(top["logprob"] for top in each["top_logprobs"]) == each["logprob"] <= 0
        assert bytes(each["bytes"]).decode(errors="replace") == each["token"]
    assert api.ask("Hello")["output"][0]["content"][0]["logprobs"] == []
    assert api.ask("Hello", include=asked["include"])["output"][0]["content"][0]["logprobs"]


def test_what_is_wrong_before_the_first_event_is_told_by_the_status(api: Responding) -> None:
    error = api.refused(404, input="x", stream=True, previous_response_id="resp_unknown")
    assert error["code"] == "previous_response_not_found"
    error = api.refused(400, input="\ud800", stream=True)
    assert error["type"] == "invalid_request_error"
    assert api.sessions() == {}


def long_stream(api: Responding, **fields: Any) -> Any:
    asked = {"temperature": 1, "seed": 3, "max_output_tokens": 100_000, "logit_bias": {"0": -100}}
    return api.http.stream("POST", "/v1/responses", json={**asked, **fields, "stream": True})


def test_a_client_that_leaves_mid_stream_leaves_nothing_behind(api: Responding) -> None:
    first = api.ask("Hello")
    expected = api.ask("More", previous_response_id=first["id"], store=False)
    eventually(lambda: len(api.sessions()) == 1)
    for _ in range(3):
        with long_stream(api, input="Count", previous_response_id=first["id"]) as answer:
            chunks = answer.iter_bytes()
            while b"output_text.delta" not in next(chunks):
                pass
        eventually(lambda: len(api.sessions()) == 1 and api.server.state.admission.running == 0)
    assert not api.server.state.streams
    again = api.ask("More", previous_response_id=first["id"])
    assert text_of(again) == text_of(expected)
    assert cached(again) == history(first) - 1


def test_a_client_that_leaves_a_whole_answer_leaves_nothing_behind(api: Responding) -> None:
    asked = {"input": "Count", "max_output_tokens": 100_000, "logit_bias": {"0": -100}}
    body = json.dumps(asked).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
    with connection_to(api.server) as connection:
        connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        eventually(lambda: api.server.state.streams)
    eventually(lambda: api.sessions() == {} and api.server.state.admission.running == 0)
    assert not api.server.state.streams


def test_a_conversation_that_was_left_mid_stream_goes_on(api: Responding) -> None:
    conversation = api.http.post("/v1/conversations", json={}).json()["id"]
    first = api.ask("Hello", conversation=conversation)
    with long_stream(api, input="Count", conversation=conversation) as answer:
        chunks = answer.iter_bytes()
        next(chunks)
        assert api.refused(409, input="x", conversation=conversation)["code"] == "session_busy"
        assert api.http.delete(f"/v1/conversations/{conversation}").status_code == 409
    eventually(lambda: api.server.state.admission.running == 0)
    second = api.ask("More", conversation=conversation)
    assert cached(second) == history(first) - 1
    items = api.http.get(f"/v1/conversations/{conversation}/items?order=asc").json()["data"]
    assert [item["content"][0]["text"] for item in items] == [
        "Hello",
        text_of(first),
        "More",
        text_of(second),
    ]


def test_an_error_mid_stream_is_the_last_event(api: Responding) -> None:
    with long_stream(api, input="Count") as answer:
        chunks = answer.iter_bytes()
        received = next(chunks)
        for session_id in api.sessions():
            api.runtime.close_session(session_id, owner=OWNER)
        received += b"".join(chunks)
    last = json.loads(received.decode().split("\n\n")[-2].split("data: ")[1])
    EVENT.validate_python(last)
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "closed" in last["response"]["error"]["message"]
    assert api.http.get(f"/v1/responses/{last['response']['id']}").status_code == 404


def test_a_prompt_that_cannot_be_computed_fails_its_response_only(
    api: Responding, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = api.ask("Hello")
    expected = api.ask("More", previous_response_id=first["id"])
    sessions = len(api.sessions())

    def break_down(*args: object) -> None:
        raise RuntimeError("no power")

    with monkeypatch.context() as broken:
        broken.setattr(api.runtime._engine._backend, "run", break_down)
        (created, started, failed) = events_of(api, input="More", previous_response_id=first["id"])
        error = api.refused(500, input="More", previous_response_id=first["id"])
    assert [created["type"], started["type"]] == ["response.created", "response.in_progress"]
    assert failed["type"] == "response.failed"
    assert error["code"] == "step_failed"
    eventually(lambda: len(api.sessions()) == sessions)
    assert text_of(api.ask("More", previous_response_id=first["id"])) == text_of(expected)


def test_a_shutdown_ends_streams_with_a_word(chat_model: Path) -> None:
    with responding(chat_model) as api, long_stream(api, input="Count") as answer:
        chunks = answer.iter_bytes()
        received = next(chunks)
        on_loop(_interrupt(api))
        received += b"".join(chunks)
        last = json.loads(received.decode().split("\n\n")[-2].split("data: ")[1])
        assert last["type"] == "response.failed"
        assert "shutting down" in last["response"]["error"]["message"]


async def _interrupt(api: Responding) -> None:
    api.server.interrupt()
