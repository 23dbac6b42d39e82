"""Function calls and structured output through the Responses API."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from support.http_clients import GREEDY, Responding, cached, history, text_of

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "get_weather", "description": "The weather", "parameters": CITY}
CLOCK = {"type": "function", "name": "get_time", "parameters": None}
CALL = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "max_output_tokens": 400}
AT_ONCE = {**CALL, "parallel_tool_calls": False, "tool_choice": {"type": "function", "name": "get_weather"}}


def test_a_call_is_an_item_and_its_output_goes_on_in_the_session(api: Responding) -> None:
    first = api.ask("What is the weather?", **AT_ONCE)
    Response.model_validate(first)
    (call,) = first["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "get_weather", "completed")
    assert json.loads(call["arguments"])["city"] in ("Paris", "Rome")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    second = api.ask([output], previous_response_id=first["id"], tool_choice="none")
    assert cached(second) == history(first) - 1
    assert [tool["name"] for tool in second["tools"]] == ["get_weather", "get_time"], "kept"
    assert text_of(second)
    listed = api.http.get(f"/v1/responses/{second['id']}/input_items").json()["data"]
    assert [(item["type"], item["output"]) for item in listed] == [("function_call_output", "sunny")]


def test_calls_are_rebuilt_from_what_was_said(api: Responding) -> None:
    first = api.ask("What is the weather?", **AT_ONCE)
    (call,) = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": [part("sunny")]}
    going_on = {"tool_choice": "none", "max_output_tokens": 12}
    second = api.ask([output], previous_response_id=first["id"], **going_on)
    said = [{"role": "user", "content": "What is the weather?"}, call, output]
    stateless = api.ask(said, tools=AT_ONCE["tools"], store=False, **going_on)
    assert stateless["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    assert text_of(stateless) == text_of(second)


def part(text: str) -> dict[str, str]:
    return {"type": "input_text", "text": text}


def test_calls_are_streamed(api: Responding) -> None:
    asked = {"input": "Weather and time?", **GREEDY, **CALL, "temperature": 1, "seed": 5, "stream": True}
    with api.http.stream("POST", "/v1/responses", json=asked) as answer:
        frames = answer.read().decode().split("\n\n")[:-1]
    events = [json.loads(frame.split("data: ")[1]) for frame in frames]
    for event in events:
        EVENT.validate_python(event)
    calls = [item for item in events[-1]["response"]["output"] if item["type"] == "function_call"]
    assert calls
    for call in calls:
        own = [event for event in events if event.get("item_id") == call["id"]]
        assert "".join(event["delta"] for event in own[:-1]) == call["arguments"]
        assert own[-1]["type"] == "response.function_call_arguments.done"
        assert (own[-1]["name"], own[-1]["arguments"]) == (call["name"], call["arguments"])
        added = next(event for event in events if event.get("item", {}).get("id") == call["id"])
        assert added["type"] == "response.output_item.added"
        assert (added["item"]["name"], added["item"]["arguments"]) == (call["name"], "")


def test_a_call_that_was_cut_short_is_incomplete_and_can_be_gone_on_from(api: Responding) -> None:
    cut = api.ask("What is the weather?", **{**AT_ONCE, "max_output_tokens": 60})
    assert cut["status"] == "incomplete"
    assert [item["status"] for item in cut["output"]] == ["incomplete"]
    second = api.ask("Go on", previous_response_id=cut["id"], tool_choice="none")
    assert cached(second) == history(cut) - 1


def test_only_the_allowed_tools_are_called(api: Responding) -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "get_time"}],
    }
    response = api.ask("Now", **{**CALL, "tool_choice": allowed, "parallel_tool_calls": False})
    assert [item["name"] for item in response["output"]] == ["get_time"]
    assert response["tool_choice"] == allowed


def test_other_tools_than_before_are_written_anew(api: Responding) -> None:
    first = api.ask("Hello", tools=[WEATHER], tool_choice="none")
    same = api.ask("More", previous_response_id=first["id"], tools=[WEATHER], tool_choice="none")
    assert cached(same) == history(first) - 1
    other = api.ask("More", previous_response_id=first["id"], tools=[CLOCK], tool_choice="none")
    assert cached(other) == 0
    none = api.ask("More", previous_response_id=first["id"], tools=[])
    assert (cached(none), none["tools"]) == (0, [])


def test_structured_output_fits_its_schema(api: Responding) -> None:
    schema = {**CITY, "properties": {**CITY["properties"], "sure": {"type": "boolean"}}, "required": ["sure"]}
    wanted = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    response = api.ask("Where?", text=wanted, max_output_tokens=200)
    Response.model_validate(response)
    assert response["status"] == "completed"
    assert isinstance(json.loads(text_of(response))["sure"], bool)
    assert response["text"]["format"]["schema"] == schema
    again = api.ask("Again", text=wanted, max_output_tokens=200, previous_response_id=response["id"])
    assert cached(again) == history(response) - 1
    assert isinstance(json.loads(text_of(again))["sure"], bool)
    anything = api.ask("Anything", text={"format": {"type": "json_object"}})
    assert text_of(anything).lstrip().startswith("{")


def test_the_official_client_parses_structured_output(api: Responding) -> None:
    class Place(BaseModel):
        sure: bool

    parsed = api.openai.responses.parse(
        model=api.runtime.describe().model,
        input="Where?",
        text_format=Place,
        temperature=0,
        max_output_tokens=200,
    )
    assert isinstance(parsed.output_parsed, Place)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [WEATHER], "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"tools": [{**WEATHER, "name": "two words"}]}, "tools.0.name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        (
            {"input": [{"type": "function_call_output", "call_id": "call_x", "output": "y"}]},
            "input.0.call_id",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(api: Responding, fields: dict[str, Any], param: str) -> None:
    error = api.refused(400, **{"input": "Hello", **fields})
    assert error["param"] == param
    assert api.sessions() == {}


def test_a_schema_that_cannot_be_compiled_says_where(api: Responding) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "strange"}}}
    wanted = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    error = api.refused(400, input="Hello", text=wanted)
    assert "/properties/a" in error["message"]
    assert error["param"] == "text.format"
    error = api.refused(400, input="Hello", tools=[{**WEATHER, "parameters": schema}])
    assert "get_weather" in error["message"]
    assert error["param"] == "tools"
    assert api.sessions() == {}
