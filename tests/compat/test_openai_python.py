"""The official Python package: chat completions, completions and models."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion

from support.clients import REMEMBERED, WEATHER_PARAMETERS, WEATHER_QUESTION, WEATHER_TOOL, City

pytestmark = pytest.mark.untraced

RunAsync = Callable[[Callable[[AsyncOpenAI], Awaitable[None]]], None]
HELLO: Any = [{"role": "user", "content": "Say hello."}]
ABOUT_PARIS: Any = [{"role": "user", "content": "Tell me about Paris as JSON."}]
CITY_FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "city", "schema": City.model_json_schema(), "strict": True},
}


def check_call(name: str, arguments: str) -> None:
    assert name == "get_weather"
    told = json.loads(arguments)
    assert told.keys() == WEATHER_PARAMETERS["properties"].keys()
    assert told["unit"] in ("C", "F")
    assert 0 <= len(told["city"]) <= 16


def check_usage(completion: ChatCompletion) -> None:
    usage = completion.usage
    assert usage is not None
    assert usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None


def test_models_are_listed_and_found(client: OpenAI, model: str) -> None:
    listed = client.models.list().data
    assert [each.id for each in listed] == [model]
    found = client.models.retrieve(model)
    assert found == listed[0]
    assert found.model_dump()["context_length"] == REMEMBERED


def test_a_chat_is_answered(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.create(
        model=model, messages=HELLO, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = completion.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("length", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    check_usage(completion)


def test_a_chat_goes_on_where_it_was(client: OpenAI, model: str) -> None:
    """What was computed for the first answer is not computed for the second."""
    messages: Any = [*HELLO]
    first = client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0)
    messages += [first.choices[0].message, {"role": "user", "content": "And goodbye?"}]
    second = client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached >= first.usage.total_tokens - 1
    assert second.usage.prompt_tokens - cached < 30


def test_a_stream_says_the_same_and_ends_with_usage(client: OpenAI, model: str) -> None:
    wanted: Any = {"model": model, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**wanted)
    stream = client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert told == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 12


def test_leaving_a_stream_frees_its_place(client: OpenAI, model: str) -> None:
    # Twice as many as there are places.
    for _ in range(8):
        with client.chat.completions.create(
            model=model, messages=HELLO, max_tokens=10_000, stream=True
        ) as stream:
            next(iter(stream))
    client.with_options(max_retries=4).chat.completions.create(model=model, messages=HELLO, max_tokens=1)


def test_stop_strings_and_several_choices(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Count: 1 2 3"}],
        max_tokens=40,
        n=3,
        stop=["e"],
        seed=1,
    )
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert all("e" not in (choice.message.content or "") for choice in completion.choices)
    assert any(choice.finish_reason == "stop" for choice in completion.choices)
    check_usage(completion)


def test_a_required_tool_is_called(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.create(
        model=model,
        messages=WEATHER_QUESTION,
        tools=[WEATHER_TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
        temperature=0,
    )
    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    check_call(call.function.name, call.function.arguments)

    # The tool's answer goes back, and the model may talk again.
    messages: Any = [
        *WEATHER_QUESTION,
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"},
    ]
    answered = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[WEATHER_TOOL],
        tool_choice="auto",
        max_tokens=12,
        temperature=0,
    )
    assert answered.usage is not None
    assert completion.usage is not None
    assert answered.usage.prompt_tokens > completion.usage.total_tokens


def test_a_required_tool_is_called_in_a_stream(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model,
        messages=WEATHER_QUESTION,
        tools=[WEATHER_TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=80,
        temperature=0,
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    calls = final.choices[0].message.tool_calls
    assert calls
    check_call(calls[0].function.name, calls[0].function.arguments)
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(pieces) > 1
    assert "".join(piece.arguments_delta for piece in pieces) == calls[0].function.arguments


@pytest.mark.parametrize("seed", range(3))
def test_a_json_schema_is_kept_to(client: OpenAI, model: str, seed: int) -> None:
    """Also at a temperature at which the model talks nonsense."""
    completion = client.chat.completions.create(
        model=model,
        messages=ABOUT_PARIS,
        response_format=CITY_FORMAT,
        max_tokens=200,
        temperature=1.5,
        seed=seed,
    )
    assert completion.choices[0].finish_reason == "stop"
    City.model_validate_json(completion.choices[0].message.content or "")


def test_pydantic_models_are_parsed(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.parse(
        model=model, messages=ABOUT_PARIS, response_format=City, max_tokens=200, temperature=0
    )
    assert isinstance(completion.choices[0].message.parsed, City)


def test_json_objects_are_objects(client: OpenAI, model: str) -> None:
    """The model need not find an end to an object without a schema; where it does, it is one."""
    answers = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": 'Answer with {"a": 1} only.'}],
        response_format={"type": "json_object"},
        max_tokens=60,
        n=8,
        seed=3,
    ).choices
    assert all((answer.message.content or "").startswith("{") for answer in answers)
    ended = [answer.message.content for answer in answers if answer.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(text or ""), dict) for text in ended)


def test_text_is_scored(client: OpenAI, model: str) -> None:
    """What evaluation harnesses ask for: no new token, the prompt's log-probabilities."""
    text = "The capital of France is Paris"
    scored = client.completions.create(model=model, prompt=text, echo=True, logprobs=1, max_tokens=0)
    choice = scored.choices[0]
    assert choice.text == text
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.text_offset is not None
    assert "".join(told.tokens) == text
    assert told.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in told.token_logprobs[1:])
    assert all(
        text[start:].startswith(token) for start, token in zip(told.text_offset, told.tokens, strict=True)
    )

    ids = [1, 2, 3]
    by_ids = client.completions.create(model=model, prompt=ids, logprobs=0, max_tokens=2, temperature=0)
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == len(ids)
    both = client.completions.create(
        model=model, prompt=[text, "Once"], echo=True, max_tokens=2, temperature=0
    )
    assert all(
        choice.text.startswith(given) for choice, given in zip(both.choices, (text, "Once"), strict=True)
    )
    assert all(choice.logprobs is None for choice in both.choices)


def test_the_asynchronous_client(run_async: RunAsync, model: str) -> None:
    async def test(client: AsyncOpenAI) -> None:
        wanted: Any = {"model": model, "messages": HELLO, "max_tokens": 8, "temperature": 0}
        whole = await client.chat.completions.create(**wanted)
        stream = await client.chat.completions.create(**wanted, stream=True)
        told = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(told) == whole.choices[0].message.content
        called = await client.chat.completions.create(
            model=model,
            messages=WEATHER_QUESTION,
            tools=[WEATHER_TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=80,
            temperature=0,
        )
        (call,) = called.choices[0].message.tool_calls or ()
        assert call.type == "function"
        check_call(call.function.name, call.function.arguments)
        parsed = await client.chat.completions.parse(
            model=model, messages=ABOUT_PARIS, response_format=City, max_tokens=200, temperature=0
        )
        assert isinstance(parsed.choices[0].message.parsed, City)
        assert [each.id async for each in client.models.list()] == [model]

    run_async(test)
