"""What clients send to chat completions and completions. What is not supported is refused by name."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from kakeya.http_server.checks import check_stream_options, invalid
from kakeya.http_server.schema import (
    MOST_TOOLS,
    MOST_TOP_LOGPROBS,
    Arguments,
    CompletionFields,
    MaxTokens,
    Metadata,
    Name,
    Strict,
    refuses,
)
from kakeya.http_server.tools import (
    JsonFormat,
    ToolChoice,
    any_tools,
    check_names,
    function_tool,
    named_tools,
)
from kakeya.text.prompting import Message, ToolCall

MOST_CHOICES = 128
# What the original has.
_DEFAULT_MAX_TOKENS = 16


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


@refuses("refusal audio function_call")
class ChatMessage(Strict):
    """A message, by whomever. What the server's own answers hold besides may come back with them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = None
    tool_calls: Annotated[list[MadeCall] | None, Field(max_length=MOST_TOOLS)] = None
    tool_call_id: str | None = None
    name: str | None = None
    """Only a tool's message has one: the function that answers."""
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


class ChatFunctionTool(Strict, title="FunctionTool"):
    """The only kind of tool there is."""

    type: Literal["function"]
    function: Function

    def to_tool(self) -> dict[str, Any]:
        function = self.function
        return function_tool(function.name, function.description, function.parameters, strict=function.strict)


class FunctionName(Strict):
    """A function, by name."""

    name: Name


class ChatNamedFunction(Strict, title="NamedFunction"):
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
    Literal["none", "auto", "required"] | ChatNamedFunction | None, BeforeValidator(_function_only)
]


def _text_only(modalities: list[str] | None) -> list[str] | None:
    if modalities not in (None, ["text"]):
        raise ValueError("only the modality text is supported")
    return modalities


@refuses(
    "audio function_call functions moderation prediction prompt_cache_options prompt_cache_retention "
    "reasoning_effort verbosity web_search_options"
)
class ChatRequest(CompletionFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: MaxTokens = None
    max_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MOST_TOP_LOGPROBS)] = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ChatFunctionTool] | None, Field(max_length=MOST_TOOLS)] = None
    tool_choice: ChosenTool = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[str] | None, AfterValidator(_text_only)] = None
    metadata: Metadata = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def most_probable(self) -> int:
        return self.top_logprobs or 0

    @property
    def tool_names(self) -> list[str]:
        return [tool.function.name for tool in self.tools or ()]

    @property
    def choice(self) -> ToolChoice:
        """What the model may do with the tools. Raises ApiError when it is told to do what it cannot."""
        wanted, parallel = self.tool_choice, self.parallel_tool_calls is not False
        if isinstance(wanted, ChatNamedFunction):
            return named_tools(self.tool_names, [wanted.function.name], required=True, parallel=False)
        return any_tools(self.tool_names, wanted, parallel=parallel)

    @property
    def json_format(self) -> JsonFormat | None:
        """What JSON the answer must be; None for text."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        schema = None if wanted.json_schema is None else wanted.json_schema.schema_
        return JsonFormat("response_format", schema)


def check_chat(request: ChatRequest) -> None:
    """Raises ApiError, naming the field, where fields that are right by themselves contradict each other."""
    if request.max_tokens and request.max_completion_tokens and request.max_tokens != request.most_tokens:
        raise invalid("max_tokens", "max_tokens is the old name of max_completion_tokens: give one of them")
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    check_stream_options(request.stream, request.stream_options)
    _check_tools(request)
    _check_results(request.messages)


def _check_tools(request: ChatRequest) -> None:
    check_names(request.tool_names)
    if request.choice.names and request.json_format is not None:
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


GivenPrompt = str | list[int]


def _read_prompts(value: object) -> object:
    """A list of prompts, whichever of the four ways they were given in."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(_is_token_id(each) for each in value):
            return [value]
        if all(isinstance(each, str) for each in value) or all(_is_token_list(each) for each in value):
            return value
    raise ValueError(
        "prompt must be a string, a list of strings, a list of token ids, or a list of such lists"
    )


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_token_id(each) for each in value)


_TOKEN_LIST = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Prompts = Annotated[
    list[GivenPrompt],
    BeforeValidator(_read_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _TOKEN_LIST,
                {"type": "array", "items": _TOKEN_LIST, "minItems": 1},
            ]
        }
    ),
]


@refuses("suffix")
class CompletionRequest(CompletionFields):
    """The body of POST /v1/completions."""

    prompt: Prompts
    max_tokens: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=MOST_TOP_LOGPROBS)] = None
    best_of: Annotated[int | None, Field(ge=1, le=MOST_CHOICES)] = None

    @property
    def most_tokens(self) -> int:
        return _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def most_probable(self) -> int:
        return self.logprobs or 0

    @property
    def scores_prompt(self) -> bool:
        return bool(self.echo) and self.wants_logprobs


def check_completion(request: CompletionRequest) -> None:
    """Raises ApiError, naming the field, where fields that are right by themselves contradict each other."""
    check_stream_options(request.stream, request.stream_options)
    if request.most_tokens == 0 and not request.echo:
        raise invalid("max_tokens", "max_tokens may be 0 only with echo: there would be nothing to say")
    if request.best_of is not None and request.best_of != request.choice_count:
        raise invalid("best_of", "best_of is not supported beyond n: every choice is returned")
    if len(request.prompt) * request.choice_count > MOST_CHOICES:
        raise invalid("prompt", f"at most {MOST_CHOICES} choices are generated for all prompts together")
