"""openai-agents: a conversation over Responses that the server holds, and the same over chat completions."""

import asyncio
import os

from agents import (
    Agent,
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


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    CALLED.append(city)
    return "It is sunny."


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=os.environ["KAKEYA_URL"] + "/v1", api_key="none")
    # What these agents send to every server.
    settings = ModelSettings(max_tokens=400, reasoning=Reasoning(effort="low"), verbosity="low")
    for model in (OpenAIResponsesModel(MODEL, client), OpenAIChatCompletionsModel(MODEL, client)):
        agent = Agent("guide", instructions="Be brief.", model=model, model_settings=settings)
        first = await Runner.run(agent, "Name a river.")
        assert first.final_output, first
        second = await Runner.run(
            agent, [*first.to_input_list(), {"role": "user", "content": "Another one."}]
        )
        assert second.final_output, second
        streamed = Runner.run_streamed(agent, "Name a city.")
        assert [event async for event in streamed.stream_events()]
        forced = ModelSettings(max_tokens=80, tool_choice="weather")
        caller = Agent("caller", model=model, tools=[weather], model_settings=forced)
        assert (
            await Runner.run(caller, "How is the weather in Paris?", max_turns=3)
        ).final_output is not None
    assert CALLED, "no tool was called"


asyncio.run(main())
