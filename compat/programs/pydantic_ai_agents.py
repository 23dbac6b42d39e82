"""pydantic-ai: answers, streams, tools and typed output, over chat completions, Responses and messages."""

import os

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

URL, MODEL = os.environ["KAKEYA_URL"], os.environ["KAKEYA_MODEL"]
SHORT = ModelSettings(max_tokens=60)


class Size(BaseModel):
    """How large something is."""

    is_large: bool


openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
models = [
    OpenAIChatModel(MODEL, provider=openai),
    OpenAIResponsesModel(MODEL, provider=openai),
    AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none")),
]
for model in models:
    agent = Agent(model, instructions="Be brief.", model_settings=SHORT)
    first = agent.run_sync("Name a river.")
    assert first.output, first
    second = agent.run_sync("Another one.", message_history=first.all_messages())
    assert second.output, second
    assert second.usage.cache_read_tokens > 0, second.usage
for model in models[:2]:
    sized = Agent(model, output_type=NativeOutput(Size), model_settings=SHORT)
    assert isinstance(sized.run_sync("Is Paris large?").output, Size)
