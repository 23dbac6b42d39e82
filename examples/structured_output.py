"""Structured output: tokens that would break the schema cannot be chosen, so the answer always parses."""

import sys
from typing import Annotated, Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    """What we want to know. Short strings help a small model to find an end."""

    name: Annotated[str, Field(max_length=30)]
    country: Annotated[str, Field(max_length=30)]
    size: Literal["small", "large"]


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=url, api_key="none")
    answer = client.responses.parse(
        model=client.models.list().data[0].id,
        input="Tell me about the city of Paris.",
        text_format=City,
        max_output_tokens=200,
    )
    city = answer.output_parsed
    assert city is not None
    print(f"{city.name}, {city.country}: {city.size}")


if __name__ == "__main__":
    main(*sys.argv[1:])
