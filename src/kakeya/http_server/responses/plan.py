"""A request to respond, checked against what it continues. Nothing has been changed yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kakeya.http_server.checks import invalid
from kakeya.http_server.errors import ApiError
from kakeya.http_server.prompting import Message
from kakeya.http_server.responses.items import calls_in, messages_of
from kakeya.http_server.responses.schema import (
    AllowedTools,
    FunctionCallOutputItem,
    FunctionTool,
    NamedFunction,
    ResponseRequest,
)
from kakeya.http_server.responses.store import Conversation, Record
from kakeya.http_server.tools import ToolChoice, function_tool
from kakeya.types import SamplingParams

if TYPE_CHECKING:  # torch takes a second to import, and the server listens before that
    from kakeya.runtime import Runtime


@dataclass(frozen=True)
class Plan:
    """What is to be answered, and how.

    `opening` are messages that a conversation began with and no response has yet. `tools` are as the API
    shows them. `fits_thread`: what the base's session holds can be gone on with.
    """

    request: ResponseRequest
    base: Record | None
    conversation: Conversation | None
    opening: tuple[Message, ...]
    new: tuple[Message, ...]
    instructions: str | None
    tools: tuple[dict[str, Any], ...]
    choice: ToolChoice
    sampling: SamplingParams

    @property
    def fits_thread(self) -> bool:
        base = self.base
        return base is not None and (base.instructions, base.tools) == (self.instructions, self.tools)

    @property
    def added(self) -> tuple[Message, ...]:
        """What is new since the base."""
        return (*self.opening, *self.new)

    def whole(self) -> list[Message]:
        """The whole conversation, for a session of its own."""
        system = [] if self.instructions is None else [Message("system", self.instructions)]
        before = self.base.conversation_messages() if self.base is not None else []
        return [*system, *before, *self.added]

    def thread_tools(self) -> list[dict[str, Any]]:
        """The tools as threads take them."""
        return [
            function_tool(tool["name"], tool["description"], tool["parameters"], strict=tool["strict"])
            for tool in self.tools
        ]


def plan(
    request: ResponseRequest, base: Record | None, conversation: Conversation | None, runtime: "Runtime"
) -> Plan:
    """The request on top of `base`. Raises ApiError, naming the field, for what does not fit together."""
    _check_combination(request)
    _check_model(request, runtime)
    tools = base.tools if request.tools is None and base is not None else _shown(request.tools or ())
    instructions = request.instructions
    if instructions is None and base is not None:
        instructions = base.instructions
    opening = conversation.messages if conversation is not None and base is None else ()
    choice = _choice(request, [tool["name"] for tool in tools])
    return Plan(
        request=request,
        base=base,
        conversation=conversation,
        opening=opening,
        new=messages_of(request.input, _known_calls(request, base, opening)),
        instructions=instructions,
        tools=tools,
        choice=choice,
        sampling=request.choices(1, logprobs=request.wants_logprobs, top_logprobs=request.top_logprobs or 0)[
            0
        ],
    )


def _check_combination(request: ResponseRequest) -> None:
    if request.conversation is not None and request.previous_response_id is not None:
        raise ApiError(
            400,
            "previous_response_id and conversation exclude each other",
            param="previous_response_id",
            code="mutually_exclusive_parameters",
        )
    if request.conversation is not None and not request.is_kept:
        raise invalid("store", "store must be true with a conversation, which keeps what is said in it")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "stream_options needs stream to be true")


def _check_model(request: ResponseRequest, runtime: "Runtime") -> None:
    served, vocabulary = runtime.describe().model, runtime.model_config.vocab_size
    if request.model not in (None, served):
        raise ApiError(
            404,
            f"there is no model {request.model!r} here; this server serves {served!r}",
            param="model",
            code="model_not_found",
        )
    for token_id in request.logit_bias:
        if token_id >= vocabulary:
            raise invalid("logit_bias", f"{token_id} is not a token id; 0 to {vocabulary - 1} are")


def _known_calls(request: ResponseRequest, base: Record | None, opening: Sequence[Message]) -> dict[str, str]:
    """The calls that outputs in the input may answer; a long history is only looked through when there are
    any."""
    if not any(isinstance(item, FunctionCallOutputItem) for item in request.input):
        return {}
    return calls_in([*(base.conversation_messages() if base is not None else ()), *opening])


def _shown(tools: Sequence[FunctionTool]) -> tuple[dict[str, Any], ...]:
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", "tools must have different names")
    return tuple(tool.model_dump() for tool in tools)


def _choice(request: ResponseRequest, names: Sequence[str]) -> ToolChoice:
    """What the model may do with the tools."""
    wanted = request.tool_choice
    if wanted == "none" or (not names and wanted in (None, "auto")):
        return ToolChoice()
    if request.text is not None and request.text.format.type != "text":
        raise invalid(
            "text.format", "a JSON format cannot be combined with tools, unless tool_choice is none"
        )
    parallel = request.parallel_tool_calls is not False
    if isinstance(wanted, NamedFunction):
        return ToolChoice(_among(names, [wanted]), required=True, parallel=False)
    if isinstance(wanted, AllowedTools):
        return ToolChoice(_among(names, wanted.tools), required=wanted.mode == "required", parallel=parallel)
    if not names:
        raise invalid("tool_choice", "tool_choice is required, but there are no tools")
    return ToolChoice(tuple(names), required=wanted == "required", parallel=parallel)


def _among(names: Sequence[str], wanted: Sequence[NamedFunction]) -> tuple[str, ...]:
    for function in wanted:
        if function.name not in names:
            raise invalid("tool_choice", f"tool_choice names {function.name!r}, which is none of the tools")
    return tuple(function.name for function in wanted)
