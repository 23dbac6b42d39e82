"""LangChain's OpenAI chat model, pointed at the server."""

import json
from typing import Annotated

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import Field, SecretStr

from support.clients import KEY, City, Served

pytestmark = pytest.mark.untraced


@tool
def get_weather(city: Annotated[str, Field(max_length=16)]) -> str:
    """The weather in a city."""
    return f"18 degrees in {city}"


@pytest.fixture(scope="module")
def chat(served: Served) -> ChatOpenAI:
    return ChatOpenAI(
        model=served.model,
        base_url=served.url,
        api_key=SecretStr(KEY),
        max_completion_tokens=60,
        temperature=0,
        max_retries=0,
    )


def test_a_chat_is_answered_and_goes_on(chat: ChatOpenAI) -> None:
    messages: list[SystemMessage | HumanMessage | AIMessage] = [
        SystemMessage("You are brief."),
        HumanMessage("Say hello."),
    ]
    first = chat.invoke(messages, max_completion_tokens=8)
    assert first.content
    assert first.usage_metadata is not None
    messages += [first, HumanMessage("And goodbye?")]
    second = chat.invoke(messages, max_completion_tokens=8)
    assert second.usage_metadata is not None
    cached = second.usage_metadata["input_token_details"]["cache_read"]
    assert cached >= first.usage_metadata["total_tokens"] - 1


def test_a_stream_says_the_same(chat: ChatOpenAI) -> None:
    chunks = list(chat.stream("Count to three.", max_completion_tokens=8, stream_usage=True))
    assert len(chunks) > 3
    told = "".join(str(chunk.content) for chunk in chunks)
    assert told == chat.invoke("Count to three.", max_completion_tokens=8).content
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 8


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: ChatOpenAI, method: str) -> None:
    answer = chat.with_structured_output(City, method=method).invoke("Tell me about Paris.")  # type: ignore[arg-type]
    assert isinstance(answer, City)


def test_tools_are_called(chat: ChatOpenAI) -> None:
    question = HumanMessage("What is the weather in Paris?")
    bound = chat.bind_tools([get_weather], tool_choice="required", strict=True, parallel_tool_calls=False)
    asked = bound.invoke([question])
    (call,) = asked.tool_calls
    assert call["name"] == "get_weather"
    assert isinstance(call["args"]["city"], str)
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    answered = chat.bind_tools([get_weather]).invoke([question, asked, result], max_completion_tokens=8)
    assert isinstance(answered, AIMessage)


def test_tools_are_called_in_a_stream(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([get_weather], tool_choice="get_weather", strict=True)
    pieces = [
        piece
        for chunk in bound.stream("Weather in Paris?")
        for piece in getattr(chunk, "tool_call_chunks", ())
    ]
    assert pieces[0]["name"] == "get_weather"
    assert json.loads("".join(piece["args"] or "" for piece in pieces)).keys() == {"city"}


def test_the_responses_api(served: Served) -> None:
    chat = ChatOpenAI(
        model=served.model,
        base_url=served.url,
        api_key=SecretStr(KEY),
        use_responses_api=True,
        use_previous_response_id=True,
        max_retries=0,
        temperature=0,
    )
    first = chat.invoke([HumanMessage("I am Ada.")], max_output_tokens=8)
    second = chat.invoke([HumanMessage("I am Ada."), first, HumanMessage("Who am I?")], max_output_tokens=8)
    assert first.usage_metadata is not None
    assert second.usage_metadata is not None
    assert (
        second.usage_metadata["input_token_details"]["cache_read"] >= first.usage_metadata["total_tokens"] - 1
    )
