"""openai-agents: a conversation over Responses that the server holds, and the same over chat completions."""

import asyncio
import os
from typing import Literal

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.shared import Reasoning

MODEL = os.environ["KAKEYA_MODEL"]
CALLED: list[str] = []
# These agents raise on an answer that reached its token limit, and at temperature 1 a small model may ramble.
SETTINGS = ModelSettings(temperature=0, max_tokens=400, reasoning=Reasoning(effort="low"), verbosity="low")
FRANCE, SPAIN = (f"What is the capital of {country}?" for country in ("France", "Spain"))


@function_tool
def weather(city: Literal["Paris", "Madrid"]) -> str:
    """The weather in a city."""
    CALLED.append(city)
    return "It is sunny."


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=os.environ["KAKEYA_URL"] + "/v1", api_key="none")
    held, resent = OpenAIResponsesModel(MODEL, client), OpenAIChatCompletionsModel(MODEL, client)
    await _talk_held(held)
    for model in (held, resent):
        await _talk_resent(model)
        await _stream(model)
        await _call_a_tool(model)


async def _talk_held(model: OpenAIResponsesModel) -> None:
    """Only what is new is sent."""
    first = await Runner.run(_guide(model), FRANCE)
    second = await Runner.run(_guide(model), SPAIN, previous_response_id=first.last_response_id)
    assert second.final_output, second
    [answered] = second.raw_responses
    assert answered.usage.input_tokens_details.cached_tokens > 0, answered.usage


async def _talk_resent(model: Model) -> None:
    first = await Runner.run(_guide(model), FRANCE)
    assert "Paris" in first.final_output, first
    longer = [*first.to_input_list(), {"role": "user", "content": SPAIN}]
    assert (await Runner.run(_guide(model), longer)).final_output


async def _stream(model: Model) -> None:
    streamed = Runner.run_streamed(_guide(model), FRANCE)
    told = [event.data async for event in streamed.stream_events() if event.type == "raw_response_event"]
    text = "".join(each.delta for each in told if each.type == "response.output_text.delta")
    assert text == streamed.final_output != "", (text, streamed.final_output)


async def _call_a_tool(model: Model) -> None:
    """The first answer must be a call; the second may be anything that ends."""
    CALLED.clear()
    settings = SETTINGS.resolve(ModelSettings(tool_choice="weather"))
    caller = Agent("caller", model=model, tools=[weather], model_settings=settings)
    ended = await Runner.run(caller, "How is the weather in Paris?", max_turns=5)
    assert CALLED, "no tool was called"
    assert ended.final_output is not None, ended


def _guide(model: Model) -> Agent:
    return Agent("guide", instructions="Answer in one sentence.", model=model, model_settings=SETTINGS)


asyncio.run(main())
