"""A conversation that is to be answered, in the one form that chat completions and messages share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kakeya.http_server.generation import PLAIN_READING, Reading
from kakeya.http_server.tools import JsonFormat, ToolChoice
from kakeya.text.prompting import Message, Tool
from kakeya.text.turns import End
from kakeya.types import SamplingParams


@dataclass(frozen=True)
class Asked:
    """What is asked, and how it is to be answered: once for each of `samplings`.

    Where it ends within the last message, that message is the beginning of the answer. `call_prefix` begins
    the ids of the calls that are made.
    """

    messages: Sequence[Message]
    samplings: Sequence[SamplingParams]
    most_tokens: int | None = None
    tools: Sequence[Tool] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    json_format: JsonFormat | None = None
    variables: Mapping[str, Any] | None = None
    end: End = End.ANSWER
    reading: Reading = PLAIN_READING
    prediction: str = ""
    call_prefix: str = "call_"

    @property
    def begun(self) -> str:
        """What the answer begins with, and the client has already."""
        return self.messages[-1].content if self.end is End.WITHIN else ""
