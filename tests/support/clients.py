"""What the tests of foreign clients share: where the server is, what they ask it, and how to keep it busy."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field

KEY = "a-key-for-clients"
# Requests that the server lets generate at once; it refuses the others.
PLACES = 4
# How much a session remembers: little, so that conversations outgrow it.
SINK, RECALL, WINDOW = 4, 64, 508
REMEMBERED = SINK + RECALL + WINDOW


@dataclass(frozen=True)
class Served:
    """A running server: the base URL that clients are given, and its model."""

    url: str
    model: str


class City(BaseModel):
    """A form that every answer fills in few tokens, whatever the model thinks."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=16)]
    size: Literal["small", "large"]
    rank: Annotated[int, Field(ge=1, le=99)]


WEATHER_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": WEATHER_PARAMETERS,
    },
}
WEATHER_QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


@contextmanager
def all_places_taken(served: Served) -> Iterator[ExitStack]:
    """Long answers run, as many as there are places. Closing the stack that this gives ends them."""
    body = {
        "model": served.model,
        "prompt": "On and on",
        "max_tokens": 100_000,
        "stream": True,
        # Never the end: 0 and 2 are the ids that end a text of the default model.
        "logit_bias": {"0": -100, "2": -100},
    }
    headers = {"authorization": f"Bearer {KEY}"}
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(trust_env=False, timeout=60, headers=headers))
        for _ in range(PLACES):
            answer = stack.enter_context(client.stream("POST", f"{served.url}/completions", json=body))
            assert answer.status_code == 200
        yield stack
