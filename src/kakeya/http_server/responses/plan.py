"""A request to respond, checked against what it continues. Nothing has been changed yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kakeya.http_server.checks import check_bias, check_model, check_stream_options, invalid
from kakeya.http_server.errors import ApiError
from kakeya.http_server.responses.items import calls_in, messages_of
from kakeya.http_server.responses.schema import (
    AllowedTools,
    FunctionCallOutputItem,
    ResponseRequest,
    ResponsesFunctionTool,
    ResponsesNamedFunction,
)
from kakeya.http_server.responses.store import Conversation, Record
from kakeya.http_server.tools import ToolChoice, any_tools, check_names, function_tool, named_tools
from kakeya.text.prompting import Message
from kakeya.types import SamplingParams

if TYPE_CHECKING:  # torch takes a second to import, and the server listens before that
    from kakeya.runtime import Runtime


@dataclass(frozen=True)
class Plan:
    """What is to be answered, and how.

    `opening` are messages that a conversation began with and no response has yet. `tools` are as the API
    shows them. `fits_session`: what the base's session holds can be gone on with.
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
    def fits_session(self) -> bool:
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

    def session_tools(self) -> list[dict[str, Any]]:
        """The tools as text sessions take them."""
        return [
            function_tool(tool["name"], tool["description"], tool["parameters"], strict=tool["strict"])
            for tool in self.tools
        ]


def plan(
    request: ResponseRequest, base: Record | None, conversation: Conversation | None, runtime: "Runtime"
) -> Plan:
    """The request on top of `base`. Raises ApiError, naming the field, for what does not fit together."""
    _check_combination(request)
    check_model(request.model or runtime.describe().model, runtime)
    check_bias(request.logit_bias, runtime)
    tools = base.tools if request.tools is None and base is not None else _shown(request.tools or ())
    instructions = request.instructions
    if instructions is None and base is not None:
        instructions = base.instructions
    opening = conversation.messages if conversation is not None and base is None else ()
    [sampling] = request.choices(1, logprobs=request.wants_logprobs, top_logprobs=request.top_logprobs or 0)
    return Plan(
        request=request,
        base=base,
        conversation=conversation,
        opening=opening,
        new=messages_of(request.input, _known_calls(request, base, opening)),
        instructions=instructions,
        tools=tools,
        choice=_choice(request, [tool["name"] for tool in tools]),
        sampling=sampling,
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
    check_stream_options(request.stream, request.stream_options)


def _known_calls(request: ResponseRequest, base: Record | None, opening: Sequence[Message]) -> dict[str, str]:
    """The calls that outputs in the input may answer; a long history is only looked through when there are
    any."""
    if not any(isinstance(item, FunctionCallOutputItem) for item in request.input):
        return {}
    return calls_in([*(base.conversation_messages() if base is not None else ()), *opening])


def _shown(tools: Sequence[ResponsesFunctionTool]) -> tuple[dict[str, Any], ...]:
    check_names([tool.name for tool in tools])
    return tuple(tool.model_dump() for tool in tools)


def _choice(request: ResponseRequest, names: Sequence[str]) -> ToolChoice:
    """What the model may do with the tools."""
    wanted, parallel = request.tool_choice, request.parallel_tool_calls is not False
    if wanted == "none" or (not names and wanted in (None, "auto")):
        return ToolChoice()
    if request.json_format is not None:
        raise invalid(
            "text.format", "a JSON format cannot be combined with tools, unless tool_choice is none"
        )
    if isinstance(wanted, ResponsesNamedFunction):
        return named_tools(names, [wanted.name], required=True, parallel=False)
    if isinstance(wanted, AllowedTools):
        allowed = [function.name for function in wanted.tools]
        return named_tools(names, allowed, required=wanted.mode == "required", parallel=parallel)
    return any_tools(names, wanted, parallel=parallel)
