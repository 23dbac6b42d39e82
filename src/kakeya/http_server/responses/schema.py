"""What clients send to the Responses and Conversations routes. What is not supported is refused by name."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from kakeya.http_server.schema import (
    MOST_TOOLS,
    MOST_TOP_LOGPROBS,
    Arguments,
    MaxTokens,
    Metadata,
    Name,
    SamplingFields,
    Strict,
    refuses,
)
from kakeya.http_server.tools import JsonFormat

_MOST_ITEMS = 20


def _of_type(noun: str, *supported: str) -> Callable[[Any], Any]:
    """A check, made before all others, that an object is of a type that is supported."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") not in supported:
            known = ", ".join(map(repr, supported))
            raise ValueError(f"{noun} of type {value.get('type')!r} are not supported, only {known}")
        return value

    return check


Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(Strict):
    """A piece of text. What the server sent along with a text of its own may come back with it."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _as_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


_Part = Annotated[TextPart, BeforeValidator(_of_type("parts", "input_text", "output_text", "text"))]
Parts = Annotated[list[_Part], BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])]


class MessageItem(Strict):
    """A message, by whomever."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: str | None = None
    status: Status | None = None


class FunctionCallItem(Strict):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: Name
    arguments: Arguments
    id: str | None = None
    status: Status | None = None


class FunctionCallOutputItem(Strict):
    """What such a call gave."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: Parts
    id: str | None = None
    status: Status | None = None


_item_types = _of_type("items", "message", "function_call", "function_call_output")


def _typed(item: Any) -> Any:
    """Messages may leave their type out."""
    untyped = isinstance(item, dict) and item.get("type") is None and "role" in item
    return _item_types({**item, "type": "message"} if untyped else item)


InputItem = Annotated[
    MessageItem | FunctionCallItem | FunctionCallOutputItem,
    Field(discriminator="type"),
    BeforeValidator(_typed),
]


def _as_items(given: Any) -> Any:
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


InputItems = Annotated[
    list[InputItem],
    Field(min_length=1),
    BeforeValidator(
        _as_items, json_schema_input_type=str | list[MessageItem | FunctionCallItem | FunctionCallOutputItem]
    ),
]


class ResponsesFunctionTool(Strict, title="FunctionTool"):
    """A function that the model may call. Its arguments always fit the schema, strict or not."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


Tool = Annotated[ResponsesFunctionTool, BeforeValidator(_of_type("tools", "function"))]


class ResponsesNamedFunction(Strict, title="NamedFunction"):
    """One function, by name."""

    type: Literal["function"]
    name: Name


class AllowedTools(Strict):
    """Some of the functions only."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Annotated[ResponsesNamedFunction, BeforeValidator(_of_type("tools", "function"))]] = Field(
        min_length=1
    )


ChosenTool = Annotated[
    Literal["none", "auto", "required"] | ResponsesNamedFunction | AllowedTools,
    BeforeValidator(_of_type("tool choices", "function", "allowed_tools")),
]


class PlainText(Strict):
    """Whatever the model says."""

    type: Literal["text"]


class JsonObject(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Strict):
    """A JSON value that fits the schema, strict or not."""

    type: Literal["json_schema"]
    name: Name
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


TextFormat = Annotated[
    PlainText | JsonObject | JsonSchema,
    Field(discriminator="type"),
    BeforeValidator(_of_type("formats", "text", "json_object", "json_schema")),
]


class TextOptions(Strict):
    """How the answer is written."""

    format: TextFormat = PlainText(type="text")
    verbosity: Literal["medium"] | None = None


class ResponsesStreamOptions(Strict, title="StreamOptions"):
    """Nothing is obfuscated here, so that can only be declined."""

    include_obfuscation: Literal[False] | None = None


class ConversationName(Strict):
    """A conversation, by its id."""

    id: str


def _as_conversation(given: Any) -> Any:
    return {"id": given} if isinstance(given, str) else given


def _not_in_background(background: bool | None) -> None:
    if background:
        raise ValueError("background is not supported by this server; leave it out")


@refuses(
    "context_management max_tool_calls moderation prompt "
    "prompt_cache_options prompt_cache_retention reasoning"
)
class ResponseRequest(SamplingFields):
    """The body of POST /v1/responses."""

    input: InputItems
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Annotated[
        ConversationName | None,
        BeforeValidator(_as_conversation, json_schema_input_type=str | ConversationName | None),
    ] = None
    tools: list[Tool] | None = Field(default=None, max_length=MOST_TOOLS)
    tool_choice: ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    max_output_tokens: MaxTokens = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP_LOGPROBS)
    include: list[Literal["message.output_text.logprobs"]] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    metadata: Metadata = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    background: Annotated[bool | None, AfterValidator(_not_in_background)] = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.include) or bool(self.top_logprobs)

    @property
    def json_format(self) -> JsonFormat | None:
        """What JSON the answer must be; None for text."""
        wanted = None if self.text is None else self.text.format
        if wanted is None or isinstance(wanted, PlainText):
            return None
        return JsonFormat("text.format", wanted.schema_ if isinstance(wanted, JsonSchema) else None)

    @property
    def is_kept(self) -> bool:
        return self.store is not False


class NewConversation(Strict):
    """The body of POST /v1/conversations."""

    items: list[InputItem] | None = Field(default=None, max_length=_MOST_ITEMS)
    metadata: Metadata = None


class ConversationChange(Strict):
    """The body of POST /v1/conversations/{id}."""

    metadata: Metadata


class ConversationFork(Strict):
    """The body of POST /v1/conversations/{id}/fork: where to branch, the newest response if left out."""

    response_id: str | None = None
    metadata: Metadata = None
