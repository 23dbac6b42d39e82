"""What clients send to the Messages routes. What is not supported is refused by name."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from kakeya.http_server.completions.asked import Asked
from kakeya.http_server.errors import invalid
from kakeya.http_server.generation import Reading
from kakeya.http_server.schema import (
    MOST_TOKENS,
    MOST_TOOLS,
    AnswerFields,
    Name,
    Strict,
    of_type,
    refuses,
)
from kakeya.http_server.tools import JsonFormat, ToolChoice, choose_tools, function_tool
from kakeya.text.prompting import Message, ToolCall
from kakeya.text.turns import End
from kakeya.types import SamplingParams

MOST_STOP_SEQUENCES = 64
_CALL_PREFIX = "toolu_"


class CacheControl(Strict):
    """Where the original would cache. Here sessions are held anyway, so nothing depends on it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(Strict):
    cache_control: CacheControl | None = None


class TextBlock(_Block):
    """A piece of text."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any] | None, Field(max_length=0)] = None


class ToolUseBlock(_Block):
    """A call that the model made earlier."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Name
    input: dict[str, Any]


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_texts(content: Any) -> Any:
    return [] if content is None else _as_blocks(content)


_Text = Annotated[TextBlock, BeforeValidator(of_type("blocks", "text"))]
TextBlocks = Annotated[
    list[_Text], BeforeValidator(_as_texts, json_schema_input_type=str | list[TextBlock] | None)
]


class ToolResultBlock(_Block):
    """What such a call gave."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: TextBlocks = Field(default_factory=list)
    is_error: bool | None = None

    def to_message(self, name: str) -> Message:
        text = _text_of(self.content)
        return Message("tool", f"Error: {text}" if self.is_error else text, (), self.tool_use_id, name)


AnyBlock = TextBlock | ToolUseBlock | ToolResultBlock
_Content = Annotated[
    AnyBlock,
    Field(discriminator="type"),
    BeforeValidator(of_type("blocks", "text", "tool_use", "tool_result")),
]
Content = Annotated[list[_Content], BeforeValidator(_as_blocks, json_schema_input_type=str | list[AnyBlock])]


def _text_of(blocks: Sequence[AnyBlock]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


class MessageParam(Strict):
    """A message, by whomever. The results of tools come first in the user's."""

    role: Literal["user", "assistant"]
    content: Content

    @model_validator(mode="after")
    def _fits_its_role(self) -> "MessageParam":
        foreign = ToolUseBlock if self.role == "user" else ToolResultBlock
        if any(isinstance(block, foreign) for block in self.content):
            kind = "tool_use" if self.role == "user" else "tool_result"
            raise ValueError(f"{kind} blocks are not the {self.role}'s")
        results = [isinstance(block, ToolResultBlock) for block in self.content]
        if results != sorted(results, reverse=True):
            raise ValueError("tool_result blocks come before the text of a message")
        return self

    @property
    def results(self) -> list[ToolResultBlock]:
        return [block for block in self.content if isinstance(block, ToolResultBlock)]

    def calls(self) -> tuple[ToolCall, ...]:
        used = (block for block in self.content if isinstance(block, ToolUseBlock))
        return tuple(ToolCall(block.id, block.name, json.dumps(block.input)) for block in used)


def _custom(tool: Any) -> Any:
    if isinstance(tool, dict) and tool.get("type") not in (None, "custom"):
        raise ValueError(f"tools of type {tool.get('type')!r} are not supported, only your own ones are")
    return tool


class CustomTool(_Block):
    """A tool that the client runs. Its input always fits the schema, strict or not."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None


class ChosenTool(Strict):
    """What the model may do with the tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _has_its_name(self) -> "ChosenTool":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name goes with the type tool, and with no other")
        return self


class Thinking(Strict):
    """How to think before answering. The model is not told of it, and no thinking is made into blocks."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Field(ge=1, le=MOST_TOKENS)] = None
    display: Literal["summarized", "omitted"] | None = None


class JsonOutput(Strict):
    """JSON that fits the schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """How the answer is written. How much effort it should take, the model is not told."""

    format: JsonOutput | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Tags(Strict):
    """Who is behind the request; nothing depends on it."""

    user_id: str | None = None


class CountRequest(Strict):
    """The body of POST /v1/messages/count_tokens: a conversation."""

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: TextBlocks = Field(default_factory=list)
    tools: Annotated[
        list[Annotated[CustomTool, BeforeValidator(_custom)]] | None, Field(max_length=MOST_TOOLS)
    ] = None
    tool_choice: ChosenTool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    def asked(self, samplings: Sequence[SamplingParams] = (), **settings: Any) -> Asked:
        """What is to be answered. Raises ApiError, naming the field, for what does not fit together."""
        choice = self._choose_tools()
        return Asked(
            self._conversation(),
            samplings,
            tools=[_tool(tool) for tool in self.tools or () if choice.names],
            choice=choice,
            json_format=self._json_format,
            end=End.WITHIN if self.messages[-1].role == "assistant" else End.ANSWER,
            call_prefix=_CALL_PREFIX,
            **settings,
        )

    def _conversation(self) -> list[Message]:
        system = _text_of(self.system)
        messages, made = [Message("system", system)] if system else [], dict[str, str]()
        for index, message in enumerate(self.messages):
            for result in message.results:
                if result.tool_use_id not in made:
                    where = f"messages.{index}.content"
                    raise invalid(where, f"{where}: tool_use_id answers no call of an earlier message")
                messages.append(result.to_message(made[result.tool_use_id]))
            calls, text = message.calls(), _text_of(message.content)
            made |= {call.id: call.name for call in calls}
            if text or not message.results:
                messages.append(Message(message.role, text, calls))
        if messages[-1].tool_calls:
            raise invalid("messages", "the last message calls tools: their results must follow it")
        return messages

    def _choose_tools(self) -> ToolChoice:
        names, chosen = [tool.name for tool in self.tools or ()], self.tool_choice or ChosenTool(type="auto")
        modes = {"any": "required", "tool": "required"}
        wanted = None if chosen.name is None else [chosen.name]
        parallel = not chosen.disable_parallel_tool_use and wanted is None
        mode = modes.get(chosen.type, chosen.type)
        return choose_tools(names, mode, wanted, parallel=parallel, json_format=self._json_format)

    @property
    def _json_format(self) -> JsonFormat | None:
        if self.output_config is None or self.output_config.format is None:
            return None
        return JsonFormat("output_config.format", self.output_config.format.schema_)


def _tool(tool: CustomTool) -> dict[str, Any]:
    return function_tool({**tool.model_dump(), "parameters": tool.input_schema})


@refuses("container context_management diagnostics inference_geo mcp_servers user_profile_id workspace_id")
class MessagesRequest(AnswerFields, CountRequest):
    """The body of POST /v1/messages."""

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1)]] | None,
        Field(max_length=MOST_STOP_SEQUENCES),
    ] = None
    metadata: Tags | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return False

    @property
    def most_probable(self) -> int:
        return 0

    def to_answer(self) -> Asked:
        """What is to be answered, and how. Raises ApiError as `asked` does."""
        reading = Reading(self.stop_sequences or ())
        return self.asked(self.samplings(), most_tokens=self.max_tokens, reading=reading)
