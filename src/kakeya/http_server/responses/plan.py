"""A request to respond, checked against what it continues. Nothing has been changed yet."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kakeya.http_server.errors import ApiError, invalid
from kakeya.http_server.responses.items import calls_in, messages_of
from kakeya.http_server.responses.records import Conversation, Record, Tree
from kakeya.http_server.responses.schema import FunctionCallOutputItem, ResponseRequest
from kakeya.http_server.tools import ToolChoice, function_tool
from kakeya.text.prompting import Message, written_variables
from kakeya.types import SamplingParams

if TYPE_CHECKING:  # torch takes a second to import, and the server listens before that
    from kakeya.runtime import Runtime


@dataclass(frozen=True)
class Plan:
    """What is to be answered, and how.

    `added` is what is new since the base, whose messages come before it. `tools` are as the API shows them,
    and `variables` what the template is told besides.
    """

    request: ResponseRequest
    base: Record | None
    conversation: Conversation | None
    added: tuple[Message, ...]
    instructions: str | None
    tools: tuple[dict[str, Any], ...]
    variables: str
    choice: ToolChoice
    sampling: SamplingParams

    @property
    def fitting_base(self) -> Record | None:
        """The base, if what its session holds can be continued."""
        base = self.base
        if base is None:
            return None
        opening = (base.instructions, base.tools, base.variables)
        return base if opening == (self.instructions, self.tools, self.variables) else None

    @property
    def tree(self) -> Tree:
        """What the response belongs to: a new tree if it continues nothing."""
        grown_from = self.base or self.conversation
        return Tree() if grown_from is None else grown_from.tree

    def whole(self) -> list[Message]:
        """The whole conversation, for a session of its own."""
        system = [] if self.instructions is None else [Message("system", self.instructions)]
        return [*system, *_said_before(self.base), *self.added]

    def session_tools(self) -> list[dict[str, Any]]:
        """The tools as text sessions take them."""
        return [function_tool(tool) for tool in self.tools]


def plan(
    request: ResponseRequest, base: Record | None, conversation: Conversation | None, runtime: "Runtime"
) -> Plan:
    """The request on top of `base`. Raises ApiError, naming the field, for what does not fit together."""
    if request.conversation is not None and request.previous_response_id is not None:
        raise ApiError(
            400,
            "previous_response_id and conversation exclude each other",
            param="previous_response_id",
            code="mutually_exclusive_parameters",
        )
    if request.conversation is not None and not request.is_kept:
        raise invalid("store", "store must be true with a conversation, which keeps what is said in it")
    request.check(runtime)
    tools, instructions = tuple(tool.model_dump() for tool in request.tools or ()), request.instructions
    variables = written_variables(request.chat_template_kwargs)
    if base is not None:
        variables = base.variables if request.chat_template_kwargs is None else variables
        tools = base.tools if request.tools is None else tools
        instructions = base.instructions if instructions is None else instructions
    # What a conversation began with and no response has yet.
    opening = conversation.messages if conversation is not None and base is None else ()
    calls: dict[str, str] = {}
    if any(isinstance(item, FunctionCallOutputItem) for item in request.input):
        calls = calls_in([*_said_before(base), *opening])  # a long history is only looked through if need be
    return Plan(
        request=request,
        base=base,
        conversation=conversation,
        added=(*opening, *messages_of(request.input, calls)),
        instructions=instructions,
        tools=tools,
        variables=variables,
        choice=request.choose_tools([tool["name"] for tool in tools]),
        sampling=request.samplings()[0],
    )


def _said_before(base: Record | None) -> list[Message]:
    return [] if base is None else base.conversation_messages()
