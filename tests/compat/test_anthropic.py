"""The official `anthropic` package: messages, streams, tools, counting, errors, as its users write them."""

from collections.abc import Iterator

import anthropic
import pytest

from support.clients import KEY, Served

HELLO = [{"role": "user", "content": "Name a river in France."}]
# The package does not name it any more; servers that have it take it.
GREEDY = {"temperature": 0}
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    url = served.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def test_a_conversation_costs_what_is_new(claude: anthropic.Anthropic, model: str) -> None:
    # Greedy, because a drawn answer may be ids that its own text is not encoded to, and their numbers differ.
    first = claude.messages.create(
        model=model, max_tokens=12, system="Be brief.", messages=HELLO, extra_body=GREEDY
    )
    assert (first.type, first.role, first.model) == ("message", "assistant", model)
    assert first.content[0].type == "text"
    assert first.usage.cache_read_input_tokens is not None
    longer = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": "Why?"}]
    second = claude.messages.create(model=model, max_tokens=6, system="Be brief.", messages=longer)
    # All that was read and said, but for the last token, which was said and not computed.
    usage = first.usage
    before = usage.input_tokens + (usage.cache_read_input_tokens or 0) + usage.output_tokens
    assert second.usage.cache_read_input_tokens >= before - 1
    counted = claude.messages.count_tokens(model=model, system="Be brief.", messages=longer)
    assert counted.input_tokens == second.usage.input_tokens + second.usage.cache_read_input_tokens


def test_a_stream_builds_up_the_message(claude: anthropic.Anthropic, model: str) -> None:
    with claude.messages.stream(model=model, max_tokens=12, messages=HELLO, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].text != ""
    assert message.stop_reason in ("end_turn", "max_tokens")
    whole = claude.messages.create(model=model, max_tokens=12, messages=HELLO, extra_body=GREEDY)
    assert whole.content[0].text == text
    assert message.usage.output_tokens == whole.usage.output_tokens


def test_a_tool_is_called_and_answered(claude: anthropic.Anthropic, model: str) -> None:
    asked = [{"role": "user", "content": "How is the weather in Paris?"}]
    choice = {"type": "tool", "name": "get_weather"}
    with claude.messages.stream(
        model=model, max_tokens=80, messages=asked, tools=[WEATHER], tool_choice=choice
    ) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    [call] = message.content
    assert (call.type, call.name) == ("tool_use", "get_weather")
    assert isinstance(call.input["city"], str)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
    after = [*asked, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = claude.messages.create(model=model, max_tokens=10, messages=after, tools=[WEATHER])
    assert answer.usage.cache_read_input_tokens > message.usage.output_tokens


def test_a_stop_sequence_is_named(claude: anthropic.Anthropic, model: str) -> None:
    whole = claude.messages.create(model=model, max_tokens=12, messages=HELLO, extra_body=GREEDY)
    stop = whole.content[0].text[4:8]
    message = claude.messages.create(
        model=model, max_tokens=12, messages=HELLO, extra_body=GREEDY, stop_sequences=[stop]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_errors_are_the_packages_own(claude: anthropic.Anthropic, model: str) -> None:
    with pytest.raises(anthropic.AuthenticationError) as wrong_key:
        claude.with_options(api_key="wrong").messages.create(model=model, max_tokens=1, messages=HELLO)
    assert wrong_key.value.body["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude-none", max_tokens=1, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match="temperature") as caught:
        claude.messages.create(model=model, max_tokens=1, messages=HELLO, extra_body={"temperature": 3})
    assert caught.value.request_id
