"""What clients send to chat completions and completions. What is not supported is refused by name."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from kakeya.http_server.completions.asked import Asked
from kakeya.http_server.errors import invalid
from kakeya.http_server.generation import Reading
from kakeya.http_server.schema import (
    MOST_TOKENS,
    MOST_TOOLS,
    MOST_TOP_LOGPROBS,
    Arguments,
    Function,
    JsonSchemaFormat,
    MaxTokens,
    Metadata,
    Name,
    ReasoningEffort,
    RequestFields,
    Stops,
    StreamOptions,
    Strict,
    TemplateVariables,
    Verbosity,
    conversation_end,
    of_type,
    refuses,
)
from kakeya.http_server.tools import JsonFormat, ToolChoice, choose_tools, function_tool
from kakeya.text.prompting import Message, ToolCall

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

MOST_CHOICES = 128
# What the original has.
_DEFAULT_MAX_TOKENS = 16


class CompletionStreamOptions(StreamOptions, title="StreamOptions"):
    """What a stream tells besides the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every chunk counts the tokens so far."""


class CompletionFields(RequestFields):
    """What both kinds of completion share."""

    model: str
    n: Annotated[int | None, Field(ge=1, le=MOST_CHOICES)] = None
    stop: Stops = Field(default_factory=list)
    stream_options: CompletionStreamOptions | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None

    @property
    def reading(self) -> Reading:
        """How the answer's tokens become text."""
        return Reading(
            self.stop,
            special=self.skip_special_tokens is False,
            shows_stop=bool(self.include_stop_str_in_output),
        )

    @property
    def choice_count(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_continuously(self) -> bool:
        return self.includes_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def check(self, runtime: "Runtime") -> None:
        super().check(runtime)
        capacity = runtime.describe().capacity
        if self.choice_count > capacity:
            message = f"n must be at most {capacity}, as many as this server has sessions, got {self.n}"
            raise invalid("n", message)


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


def _some_text(content: str | None) -> str:
    if content is None:
        raise ValueError("content must be a string or a list of text parts")
    return content


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
            tool_calls=tuple(
                ToolCall(call.id, call.function.name, call.function.arguments)
                for call in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
        )


class ChatFunctionTool(Strict, title="FunctionTool"):
    """The only kind of tool there is."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """A function, by name."""

    name: Name


class ChatNamedFunction(Strict, title="NamedFunction"):
    """The one function to call."""

    type: Literal["function"]
    function: FunctionName


class ResponseFormat(Strict):
    """How the answer is written: text, any JSON object, or JSON of one schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and with no other")
        return self


class Prediction(Strict):
    """What the answer is expected to be, such as a file of which little is to change."""

    type: Literal["content"]
    content: Annotated[Text, AfterValidator(_some_text)]


ChosenTool = Annotated[
    Literal["none", "auto", "required"] | ChatNamedFunction | None,
    BeforeValidator(of_type("tool choices", "function")),
]


def _text_only(modalities: list[str] | None) -> list[str] | None:
    if modalities not in (None, ["text"]):
        raise ValueError("only the modality text is supported")
    return modalities


@refuses("audio function_call functions moderation prompt_cache_options web_search_options")
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
    prediction: Prediction | None = None
    modalities: Annotated[list[str] | None, AfterValidator(_text_only)] = None
    metadata: Metadata = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None
    chat_template_kwargs: TemplateVariables = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def asked(self) -> Asked:
        """What is to be answered. Raises ApiError, naming the field, for what does not fit together."""
        messages, choice = [message.to_message() for message in self.messages], self.choose_tools()
        return Asked(
            messages,
            self.samplings(self.choice_count),
            self.most_tokens,
            # The model hears of no tools if it must not call any.
            [function_tool(tool.function.model_dump()) for tool in self.tools or () if choice.names],
            choice,
            self.json_format,
            self.chat_template_kwargs,
            conversation_end(
                opens_answer=self.add_generation_prompt,
                continues_last=self.continue_final_message,
                last=messages[-1],
            ),
            self.reading,
            (self.prediction and self.prediction.content) or "",
        )

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def most_probable(self) -> int:
        return self.top_logprobs or 0

    def choose_tools(self) -> ToolChoice:
        """What the model may do with the tools. Raises ApiError when it is told to do what it cannot."""
        names = [tool.function.name for tool in self.tools or ()]
        chosen, parallel = self.tool_choice, self.parallel_tool_calls is not False
        wanted: list[str] | None = None
        if isinstance(chosen, ChatNamedFunction):
            wanted, parallel, chosen = [chosen.function.name], False, "required"
        return choose_tools(names, chosen, wanted, parallel=parallel, json_format=self.json_format)

    @property
    def json_format(self) -> JsonFormat | None:
        """What JSON the answer must be; None for text."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        schema = None if wanted.json_schema is None else wanted.json_schema.schema_
        return JsonFormat("response_format", schema)

    def check(self, runtime: "Runtime") -> None:
        super().check(runtime)
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.most_tokens:
            raise invalid("max_tokens", "max_tokens is the old name of max_completion_tokens: give only one")
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
        _check_results(self.messages)


def _check_results(messages: Sequence[ChatMessage]) -> None:
    """Every tool's message answers a call that was made before it."""
    made: dict[str, str] = {}
    for index, message in enumerate(messages):
        made |= {call.id: call.function.name for call in message.tool_calls or ()}
        if message.tool_call_id is None:
            continue
        if message.tool_call_id not in made:
            where = f"messages.{index}.tool_call_id"
            raise invalid(where, "tool_call_id answers no call of an earlier message")
        if message.name is not None and message.name != made[message.tool_call_id]:
            raise invalid(f"messages.{index}.name", "name is not the function of the call it answers")


GivenPrompt = str | list[int]


def _read_prompts(value: Any) -> Any:
    """A list of prompts, whichever of the four ways they were given in."""
    if isinstance(value, str) or _is_list_of(int, value):
        return [value]
    if _is_list_of(str, value) or (_is_list_of(list, value) and all(_is_list_of(int, ids) for ids in value)):
        return value
    raise ValueError(
        "prompt must be a string, a list of strings, a list of token ids, or a list of such lists"
    )


def _is_list_of(kind: type, value: object) -> bool:
    """Not empty, and `True` is not an int."""
    return isinstance(value, list) and bool(value) and all(type(each) is kind for each in value)


_TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_Given = (
    str
    | Annotated[list[str], Field(min_length=1)]
    | _TokenIds
    | Annotated[list[_TokenIds], Field(min_length=1)]
)
Prompts = Annotated[list[GivenPrompt], BeforeValidator(_read_prompts, json_schema_input_type=_Given)]


@refuses("suffix")
class CompletionRequest(CompletionFields):
    """The body of POST /v1/completions."""

    prompt: Prompts
    max_tokens: Annotated[int | None, Field(ge=0, le=MOST_TOKENS)] = None
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

    def check(self, runtime: "Runtime") -> None:
        super().check(runtime)
        if self.most_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "max_tokens may be 0 only with echo: there would be nothing to say")
        if self.best_of is not None and self.best_of != self.choice_count:
            raise invalid("best_of", "best_of is not supported beyond n: every choice is returned")
        if len(self.prompt) * self.choice_count > MOST_CHOICES:
            raise invalid("prompt", f"at most {MOST_CHOICES} choices are generated for all prompts together")
