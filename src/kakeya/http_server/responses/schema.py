"""What clients send to the Responses and Conversations routes. What is not supported is refused by name."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from kakeya.http_server.generation import Reading
from kakeya.http_server.schema import (
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
    StreamOptions,
    Strict,
    TemplateVariables,
    Verbosity,
    of_type,
    refuses,
)
from kakeya.http_server.tools import JsonFormat, ToolChoice, choose_tools

_MOST_ITEMS = 20


class TextPart(Strict):
    """A piece of text. What the server sends with its own texts may come back with them."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _as_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


_Part = Annotated[TextPart, BeforeValidator(of_type("parts", "input_text", "output_text", "text"))]
Parts = Annotated[list[_Part], BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])]


class _Item(Strict):
    """What the server's own items hold besides; it may come back with them."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item):
    """A message, by whomever."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class FunctionCallItem(_Item):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: Name
    arguments: Arguments


class FunctionCallOutputItem(_Item):
    """What such a call gave."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: Parts


_item_types = of_type("items", "message", "function_call", "function_call_output")


def _typed(item: Any) -> Any:
    """Messages may leave their type out."""
    untyped = isinstance(item, dict) and item.get("type") is None and "role" in item
    return _item_types({**item, "type": "message"} if untyped else item)


AnyItem = MessageItem | FunctionCallItem | FunctionCallOutputItem
InputItem = Annotated[AnyItem, Field(discriminator="type"), BeforeValidator(_typed)]


def _as_items(given: Any) -> Any:
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


InputItems = Annotated[
    list[InputItem],
    Field(min_length=1),
    BeforeValidator(_as_items, json_schema_input_type=str | list[AnyItem]),
]


class ResponsesFunctionTool(Function, title="FunctionTool"):
    """A function that the model may call. Its arguments always fit the schema, strict or not."""

    type: Literal["function"]


Tool = Annotated[ResponsesFunctionTool, BeforeValidator(of_type("tools", "function"))]


class ResponsesNamedFunction(Strict, title="NamedFunction"):
    """One function, by name."""

    type: Literal["function"]
    name: Name


NamedTool = Annotated[ResponsesNamedFunction, BeforeValidator(of_type("tools", "function"))]


class AllowedTools(Strict):
    """Some of the functions only."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


ChosenTool = Annotated[
    Literal["none", "auto", "required"] | ResponsesNamedFunction | AllowedTools,
    BeforeValidator(of_type("tool choices", "function", "allowed_tools")),
]


class PlainFormat(Strict):
    """Whatever the model says, or any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchema(JsonSchemaFormat):
    """A JSON value that fits the schema, strict or not."""

    type: Literal["json_schema"]


TextFormat = Annotated[
    PlainFormat | JsonSchema,
    Field(discriminator="type"),
    BeforeValidator(of_type("formats", "text", "json_object", "json_schema")),
]


class TextOptions(Strict):
    """How the answer is written."""

    format: TextFormat = PlainFormat(type="text")
    verbosity: Verbosity | None = None


class ConversationName(Strict):
    """A conversation, by its id."""

    id: str


def _as_conversation(given: Any) -> Any:
    return {"id": given} if isinstance(given, str) else given


def _unless(harmless: bool, reason: str) -> AfterValidator:
    """Refuses, with the reason, what would change something."""

    def check(given: bool | None) -> None:
        if given is not None and given is not harmless:
            raise ValueError(reason)

    return AfterValidator(check)


class ResponseStreamOptions(StreamOptions):
    """What a stream tells besides the answer."""

    continuous_usage_stats: Annotated[
        bool | None,
        _unless(
            False, "continuous_usage_stats is for completions; a response has its usage in its last event"
        ),
    ] = None


class Reasoning(Strict):
    """How to think before answering. The model is not told of it, and no reasoning is made into items."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None


_LOGPROBS = "message.output_text.logprobs"
# All but the log-probabilities belong to items that are never made here.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


@refuses("context_management moderation prompt prompt_cache_options stop")
class ResponseRequest(RequestFields):
    """The body of POST /v1/responses."""

    input: InputItems
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
    include: list[Includable] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    metadata: Metadata = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    reasoning: Reasoning | None = None
    max_tool_calls: Annotated[int | None, Field(ge=1)] = None
    """Bounds calls of tools that the server runs by itself, of which there are none."""
    background: Annotated[
        bool | None, _unless(False, "background is not supported by this server; leave it out")
    ] = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: TemplateVariables = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_generation_prompt: Annotated[
        bool | None, _unless(True, "add_generation_prompt must be true: a response is the assistant's")
    ] = None
    continue_final_message: Annotated[
        bool | None,
        _unless(False, "continue_final_message is for chat completions; a response is a message of its own"),
    ] = None

    @property
    def reading(self) -> Reading:
        """How the answer's tokens become text."""
        return Reading(
            special=self.skip_special_tokens is False, shows_stop=bool(self.include_stop_str_in_output)
        )

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def most_probable(self) -> int:
        return self.top_logprobs or 0

    @property
    def json_format(self) -> JsonFormat | None:
        """What JSON the answer must be; None for text."""
        if self.text is None or self.text.format.type == "text":
            return None
        wanted = self.text.format
        return JsonFormat("text.format", wanted.schema_ if isinstance(wanted, JsonSchema) else None)

    def choose_tools(self, names: Sequence[str]) -> ToolChoice:
        """What the model may do with the tools. Raises ApiError when it is told to do what it cannot."""
        chosen, parallel = self.tool_choice, self.parallel_tool_calls is not False
        wanted: list[str] | None = None
        if isinstance(chosen, ResponsesNamedFunction):
            wanted, parallel, chosen = [chosen.name], False, "required"
        elif isinstance(chosen, AllowedTools):
            wanted, chosen = [tool.name for tool in chosen.tools], chosen.mode
        return choose_tools(names, chosen, wanted, parallel=parallel, json_format=self.json_format)

    @property
    def is_kept(self) -> bool:
        return self.store is not False


class NewConversation(Strict):
    """The body of POST /v1/conversations.

    `model` is an extension: in a cluster of several models it says which one will answer.
    """

    model: str | None = None
    items: list[InputItem] | None = Field(default=None, max_length=_MOST_ITEMS)
    metadata: Metadata = None


class ConversationChange(Strict):
    """The body of POST /v1/conversations/{id}."""

    metadata: Metadata


class ConversationFork(Strict):
    """The body of POST /v1/conversations/{id}/fork: where to branch, the newest response if left out."""

    response_id: str | None = None
    metadata: Metadata = None
