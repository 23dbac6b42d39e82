"""A response as the Responses API tells it: its body, its output items, and the events that build them up."""

from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

from kakeya.http_server.errors import ApiError
from kakeya.http_server.generation import Part, PartReader, Usage, logprob_of
from kakeya.http_server.responses.items import Item, new_id, output_text
from kakeya.http_server.responses.plan import Plan
from kakeya.http_server.streaming import named_sse
from kakeya.text.answer import Piece, TextToken
from kakeya.text.prompting import Message, ToolCall
from kakeya.text.tool_calls import ArgumentsPiece, CallBegin, TextPiece

Event = dict[str, Any]


def new_body(plan: Plan, response_id: str, created_at: int, model: str) -> dict[str, Any]:
    """A response that has just begun: what it was asked, and no answer yet."""
    conversation = plan.conversation
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "previous_response_id": plan.request.previous_response_id,
        "conversation": None if conversation is None else {"id": conversation.id},
        "instructions": plan.instructions,
        "output": [],
        "usage": None,
        **_settings(plan),
    }


def _settings(plan: Plan) -> dict[str, Any]:
    """How it was to be answered, the defaults filled in."""
    request, sampling = plan.request, plan.sampling
    chosen = request.tool_choice or "auto"
    wanted = {"type": "text"} if request.text is None else request.text.format.model_dump(by_alias=True)
    return {
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.is_kept,
        "temperature": sampling.temperature,
        "text": {"format": wanted, "verbosity": "medium"},
        "tool_choice": chosen if isinstance(chosen, str) else chosen.model_dump(),
        "tools": list(plan.tools),
        "top_logprobs": sampling.top_logprobs,
        "top_p": sampling.top_p,
        "truncation": request.truncation or "auto",
        "user": request.user,
    }


def ended(
    body: dict[str, Any], output: list[Item], usage: Usage, *, is_cut: bool, now: int
) -> dict[str, Any]:
    """The response, answered. `is_cut`: the answer reached its bound."""
    return body | {
        "status": "incomplete" if is_cut else "completed",
        "completed_at": None if is_cut else now,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "usage": usage.to_responses(),
    }


def failed(body: dict[str, Any], output: list[Item], error: ApiError) -> dict[str, Any]:
    """The response, broken off by an error."""
    code = "rate_limit_exceeded" if error.status == HTTPStatus.TOO_MANY_REQUESTS else "server_error"
    return body | {"status": "failed", "error": {"code": code, "message": error.message}, "output": output}


def write_events(events: Iterable[Event], numbers: Iterator[int]) -> bytes:
    """The events as they go over the wire, in one piece, each with the next number."""
    numbered = ({**event, "sequence_number": next(numbers)} for event in events)
    return b"".join(named_sse(event["type"], event) for event in numbered)


class OutputWriter:
    """Takes an answer piece by piece, and gives the events that tell it if `tells_events`.

    With `reads_calls`, function calls in the text become items of their own. `output` is what there is so
    far, as the API lists it. Its last item is the one being written.
    """

    def __init__(self, *, reads_calls: bool, tells_events: bool) -> None:
        self.output: list[Item] = []
        self._reads_calls = reads_calls
        self._reader = PartReader(reads_calls=reads_calls)
        self._tells_events = tells_events
        self._events: list[Event] = []
        self._pieces: list[str] = []
        self._is_cut = False
        self._open = ""  # the type of the item being written
        self._said: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def feed(self, piece: Piece) -> list[Event]:
        """What this piece adds."""
        self._pieces.append(piece.text)
        self._read(self._reader.feed(piece))
        return self._take_events()

    def finish(self, *, is_complete: bool) -> list[Event]:
        """What ends the answer. One that was cut short leaves its last item incomplete."""
        self._is_cut = not is_complete
        self._read(self._reader.finish())
        if not self.output:
            self._begin_message()
        self._close("completed" if is_complete else "incomplete")
        return self._take_events()

    def message(self) -> Message:
        """The answer as the message that a conversation keeps."""
        calls = [item for item in self.output if item["type"] == "function_call"]
        whole = [item for item in calls if item["status"] == "completed"]
        if self._is_cut and self._reads_calls and not whole:
            return Message("assistant", "".join(self._pieces))  # half a call is no call, but it was said
        said = [item["content"][0]["text"] for item in self.output if item["type"] == "message"]
        called = tuple(ToolCall(item["call_id"], item["name"], item["arguments"]) for item in whole)
        return Message("assistant", "\n".join(said), tool_calls=called)

    def _read(self, parts: Iterable[Part]) -> None:
        for event, tokens in parts:
            match event:
                case TextPiece(text):
                    # Tokens that end a call have no text, and are nobody's.
                    if text or self._open == "message" or not self.output:
                        self._say(text, tokens)
                case CallBegin(_, name):
                    self._begin("function_call", "fc", call_id=new_id("call"), name=name, arguments="")
                case ArgumentsPiece(_, text):
                    self._said.append(text)
                    self._tell("function_call_arguments.delta", delta=text)
                case _:
                    self._close("completed")

    def _say(self, text: str, tokens: Sequence[TextToken]) -> None:
        if self._open != "message":
            self._begin_message()
        logprobs = [logprob_of(token) for token in tokens]
        self._said.append(text)
        self._logprobs += logprobs
        self._tell("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _begin_message(self) -> None:
        self._begin("message", "msg", role="assistant", content=[])
        self._tell("content_part.added", content_index=0, part=output_text(""))

    def _begin(self, kind: str, prefix: str, **fields: Any) -> None:
        self._close("completed")
        self._open, self._said, self._logprobs = kind, [], []
        self.output.append({"id": new_id(prefix), "type": kind, "status": "in_progress", **fields})
        self._tell_item("added")

    def _close(self, status: str) -> None:
        if not self._open:
            return
        item, said = self.output[-1], "".join(self._said)
        item["status"] = status
        if self._open == "message":
            part = output_text(said, self._logprobs)
            item["content"] = [part]
            self._tell("output_text.done", content_index=0, text=said, logprobs=self._logprobs)
            self._tell("content_part.done", content_index=0, part=part)
        else:
            item["arguments"] = said
            self._tell("function_call_arguments.done", name=item["name"], arguments=said)
        self._tell_item("done")
        self._open = ""

    def _tell(self, what: str, **fields: Any) -> None:
        if self._tells_events:
            where = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
            self._events.append({"type": f"response.{what}", **where, **fields})

    def _tell_item(self, what: str) -> None:
        if self._tells_events:
            # A copy: the item goes on, and an event tells one moment.
            event = {"output_index": len(self.output) - 1, "item": dict(self.output[-1])}
            self._events.append({"type": f"response.output_item.{what}", **event})

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events
