"""The official Python package: responses that go on from each other, and conversations."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from openai import AsyncOpenAI, NotFoundError, OpenAI
from openai.types.responses import Response, ResponseFunctionToolCall

from support.clients import REMEMBERED, WEATHER_PARAMETERS, City

pytestmark = pytest.mark.untraced

RunAsync = Callable[[Callable[[AsyncOpenAI], Awaitable[None]]], None]
TURNS = 50
SHORT: Any = {"max_output_tokens": 4, "temperature": 0}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": WEATHER_PARAMETERS,
    "strict": True,
}


def history(response: Response) -> int:
    """How long the history is after a response."""
    assert response.usage is not None
    return response.usage.total_tokens


def cached(response: Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens


def computed(response: Response) -> int:
    """How much of the input had not been computed before."""
    assert response.usage is not None
    return response.usage.input_tokens - cached(response)


def dropped(response: Response) -> int:
    assert response.usage is not None
    return response.usage.model_dump()["dropped_tokens"]


def test_fifty_turns_compute_only_what_is_new(client: OpenAI, model: str) -> None:
    """Also when the history has outgrown the window."""
    last: Response | None = None
    for turn in range(TURNS):
        response = client.responses.create(
            model=model,
            input=f"Of fifty messages this is number {turn + 100}. Please answer it.",
            previous_response_id=last and last.id,
            **SHORT,
        )
        if last is not None:
            # The last token of an answer is computed with what follows it, or copied from a session alike.
            assert history(last) - 1 <= cached(response)
            assert 0 < computed(response) < 40
        last = response
    assert last is not None
    assert history(last) > 2 * REMEMBERED
    assert dropped(last) == history(last) - REMEMBERED
    client.responses.delete(last.id)


def test_an_earlier_response_is_a_branch_point(client: OpenAI, model: str) -> None:
    first = client.responses.create(model=model, input="I am Ada.", instructions="Be brief.", **SHORT)
    once = client.responses.create(model=model, input="Who am I?", previous_response_id=first.id, **SHORT)
    twice = client.responses.create(model=model, input="Who am I?", previous_response_id=first.id, **SHORT)
    assert once.id != twice.id
    assert once.output_text == twice.output_text
    assert once.instructions == "Be brief."
    assert cached(twice) >= history(first) - 1


def test_responses_are_kept_until_they_are_deleted(client: OpenAI, model: str) -> None:
    made = client.responses.create(model=model, input="Hello", metadata={"a": "b"}, **SHORT)
    found = client.responses.retrieve(made.id)
    assert found == made
    (item,) = client.responses.input_items.list(made.id).data
    assert item.model_dump(exclude_none=True)["content"] == [{"type": "input_text", "text": "Hello"}]
    client.responses.delete(made.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(made.id)
    passing = client.responses.create(model=model, input="Hello", store=False, **SHORT)
    assert passing.output_text == made.output_text
    with pytest.raises(NotFoundError):
        client.responses.retrieve(passing.id)


def test_a_stream_has_typed_events(client: OpenAI, model: str) -> None:
    stream = client.responses.create(model=model, input="Count to three.", stream=True, **SHORT)
    events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1]
    assert final.type in ("response.completed", "response.incomplete")
    assert final.response.output_text == told != ""
    assert client.responses.retrieve(final.response.id).output_text == told


def test_the_stream_helper_parses(client: OpenAI, model: str) -> None:
    with client.responses.stream(
        model=model, input="Paris as JSON.", text_format=City, max_output_tokens=200, temperature=0
    ) as stream:
        for event in stream:
            assert event.type != "error"
        assert isinstance(stream.get_final_response().output_parsed, City)


def test_formats(client: OpenAI, model: str) -> None:
    wanted: Any = {"model": model, "input": "Tell me about Paris as JSON.", "temperature": 0}
    parsed = client.responses.parse(**wanted, text_format=City, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, City)
    given: Any = {"type": "json_schema", "name": "city", "schema": City.model_json_schema()}
    plain = client.responses.create(**wanted, text={"format": given}, max_output_tokens=200)
    assert plain.status == "completed"
    City.model_validate_json(plain.output_text)


def test_a_tool_is_called_and_answers(client: OpenAI, model: str) -> None:
    asked = client.responses.create(
        model=model,
        input="What is the weather in Paris?",
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=80,
        temperature=0,
    )
    (call,) = asked.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert json.loads(call.arguments).keys() == {"city", "unit"}
    answered = client.responses.create(
        model=model,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}],
        previous_response_id=asked.id,
        **SHORT,
    )
    assert cached(answered) >= history(asked) - 1


def test_a_tool_is_called_in_a_stream(client: OpenAI, model: str) -> None:
    with client.responses.stream(
        model=model,
        input="What is the weather in Paris?",
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "get_weather"},
        max_output_tokens=80,
        temperature=0,
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (call,) = final.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert "".join(pieces) == call.arguments
    assert json.loads(call.arguments)["unit"] in ("C", "F")


def test_conversations(client: OpenAI, model: str) -> None:
    conversation = client.conversations.create(metadata={"about": "rivers"})
    first = client.responses.create(model=model, input="Name one.", conversation=conversation.id, **SHORT)
    second = client.responses.create(
        model=model, input="And another.", conversation={"id": conversation.id}, **SHORT
    )
    assert first.conversation is not None
    assert first.conversation.id == conversation.id
    assert cached(second) >= history(first) - 1
    items = client.conversations.items.list(conversation.id, order="asc").data
    roles = [item.model_dump()["role"] for item in items]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert client.conversations.retrieve(conversation.id).metadata == {"about": "rivers"}
    client.conversations.delete(conversation.id)
    with pytest.raises(NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_the_asynchronous_client_goes_on_too(run_async: RunAsync, model: str) -> None:
    async def test(client: AsyncOpenAI) -> None:
        first = await client.responses.create(model=model, input="I am Ada.", **SHORT)
        stream = await client.responses.create(
            model=model, input="Who am I?", previous_response_id=first.id, stream=True, **SHORT
        )
        events = [event async for event in stream]
        final = events[-1]
        assert final.type in ("response.completed", "response.incomplete")
        assert cached(final.response) >= history(first) - 1
        conversation = await client.conversations.create()
        inside = await client.responses.create(
            model=model, input="Hello", conversation=conversation.id, **SHORT
        )
        assert inside.conversation is not None
        assert inside.conversation.id == conversation.id
        await client.conversations.delete(conversation.id)

    run_async(test)
