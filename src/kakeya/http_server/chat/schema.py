"""What clients send to chat completions. What is not supported is refused by name."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from kakeya.http_server.checks import check_stream_options, invalid
from kakeya.http_server.prompting import Message, ToolCall
from kakeya.http_server.schema import (
    MOST_TOOLS,
    MOST_TOP_LOGPROBS,
    Arguments,
    CommonFields,
    MaxTokens,
    Metadata,
    Name,
    Refused,
    Strict,
)
from kakeya.http_server.tools import ToolChoice, function_tool


def _read_text(content: object) -> object:
    """A message's text: a string, or parts that are all text."""
    if not isinstance(content, list):
        return content
    return "".join(_part_text(index, part) for index, part in enumerate(content))


def _part_text(index: int, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise ValueError(f"part {index} must be an object with a type")
    if kind != "text":
        raise ValueError(f"part {index} is of type {kind[:40]!r}, which is not supported; only text is")
    if set(part) != {"type", "text"} or not isinstance(part["text"], str):
        raise ValueError(f"part {index} must have a type, a text, which is a string, and nothing else")
    return part["text"]


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
Text = Annotated[
    str | None,
    BeforeValidator(_read_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]}),
]


class CalledFunction(Strict):
    """Which function the model wanted, and with what."""

    name: Name
    arguments: Arguments


class MadeCall(Strict):
    """A call that the model made earlier."""

    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"]
    function: CalledFunction

    def to_call(self) -> ToolCall:
        return ToolCall(self.id, self.function.name, self.function.arguments)


class ChatMessage(Strict):
    """A message, by whomever. What the server's own answers hold besides may come back with them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = None
    tool_calls: Annotated[list[MadeCall] | None, Field(max_length=MOST_TOOLS)] = None
    tool_call_id: str | None = None
    name: str | None = None
    """Only a tool's message has one: the function that answers."""
    refusal: Refused = None
    audio: Refused = None
    function_call: Refused = None
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> "ChatMessage":
        if self.content is None and not self.tool_calls:
            raise ValueError("content must be a string or a list of text parts")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are the assistant's, not the {self.role}'s")
        if (self.role == "tool") != bool(self.tool_call_id):
            raise ValueError("tool_call_id says which call a tool answers: it needs one, nobody else has one")
        if self.name is not None and self.role != "tool":
            raise ValueError("name is not supported here: the model is not told who speaks")
        return self

    def to_message(self) -> Message:
        return Message(
            role="system" if self.role == "developer" else self.role,
            content=self.content or "",
            tool_calls=tuple(call.to_call() for call in self.tool_calls or ()),
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
        )


class Function(Strict):
    """A function that the model may call. Its arguments always fit the schema, strict or not."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Strict):
    """The only kind of tool there is."""

    type: Literal["function"]
    function: Function

    def to_tool(self) -> dict[str, Any]:
        function = self.function
        return function_tool(function.name, function.description, function.parameters, strict=function.strict)


class FunctionName(Strict):
    """A function, by name."""

    name: Name


class NamedFunction(Strict):
    """The one function to call."""

    type: Literal["function"]
    function: FunctionName


class JsonSchemaFormat(Strict):
    """The schema, under the field that OpenAI has it in."""

    name: Name
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None
    """The answer fits the schema in either case."""


class ResponseFormat(Strict):
    """How the answer is written: text, any JSON object, or JSON of one schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and with no other")
        return self


def _function_only(choice: object) -> object:
    if isinstance(choice, dict) and choice.get("type") != "function":
        raise ValueError(f"a tool_choice of type {str(choice.get('type'))[:40]!r} is not supported")
    return choice


ChosenTool = Annotated[
    Literal["none", "auto", "required"] | NamedFunction | None, BeforeValidator(_function_only)
]


def _text_only(modalities: list[str] | None) -> list[str] | None:
    if modalities not in (None, ["text"]):
        raise ValueError("only the modality text is supported")
    return modalities


class ChatRequest(CommonFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: MaxTokens = None
    max_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MOST_TOP_LOGPROBS)] = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[FunctionTool] | None, Field(max_length=MOST_TOOLS)] = None
    tool_choice: ChosenTool = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[str] | None, AfterValidator(_text_only)] = None
    metadata: Metadata = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    audio: Refused = None
    function_call: Refused = None
    functions: Refused = None
    moderation: Refused = None
    prediction: Refused = None
    prompt_cache_options: Refused = None
    prompt_cache_retention: Refused = None
    reasoning_effort: Refused = None
    verbosity: Refused = None
    web_search_options: Refused = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def choice(self) -> ToolChoice:
        """What the model may do with the tools."""
        wanted = self.tool_choice
        if not self.tools or wanted == "none":
            return ToolChoice()
        names = tuple(tool.function.name for tool in self.tools)
        if isinstance(wanted, NamedFunction):
            return ToolChoice((wanted.function.name,), required=True, parallel=False)
        return ToolChoice(
            names, required=wanted == "required", parallel=self.parallel_tool_calls is not False
        )


def check_chat(request: ChatRequest) -> None:
    """Raises ApiError, naming the field, where fields that are right by themselves contradict each other."""
    if request.max_tokens and request.max_completion_tokens and request.max_tokens != request.most_tokens:
        raise invalid("max_tokens", "max_tokens is the old name of max_completion_tokens: give one of them")
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    check_stream_options(request)
    _check_tools(request)
    _check_results(request.messages)


def _check_tools(request: ChatRequest) -> None:
    names = [tool.function.name for tool in request.tools or ()]
    wanted = request.tool_choice
    if len(set(names)) < len(names):
        raise invalid("tools", "tools must have different names")
    if isinstance(wanted, NamedFunction) and wanted.function.name not in names:
        raise invalid(
            "tool_choice", f"tool_choice names {wanted.function.name!r}, which is none of the tools"
        )
    if wanted == "required" and not names:
        raise invalid("tool_choice", "tool_choice is required, but there are no tools")
    has_form = request.response_format is not None and request.response_format.type != "text"
    if has_form and names and wanted != "none":
        raise invalid(
            "response_format", "response_format cannot be combined with tools, unless tool_choice is none"
        )


def _check_results(messages: Sequence[ChatMessage]) -> None:
    """Every tool's message answers a call that was made before it."""
    made: dict[str, str] = {}
    for index, message in enumerate(messages):
        made |= {call.id: call.function.name for call in message.tool_calls or ()}
        if message.tool_call_id is None:
            continue
        if message.tool_call_id not in made:
            raise invalid(
                f"messages.{index}.tool_call_id", "tool_call_id answers no call of an earlier message"
            )
        if message.name is not None and message.name != made[message.tool_call_id]:
            raise invalid(f"messages.{index}.name", "name is not the function of the call it answers")
