"""A response as the Responses API tells it: its body, its output items, and the events that build them up."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kakeya.http_server.generation import Usage, logprob_of
from kakeya.http_server.responses.items import Item, new_id, output_text
from kakeya.http_server.responses.plan import Plan
from kakeya.text.answer import Piece, TextToken
from kakeya.text.prompting import Message, ToolCall
from kakeya.text.tool_calls import ArgumentsPiece, CallBegin, TextPiece, ToolCallParser, ToolEvent

Event = dict[str, Any]


def new_body(plan: Plan, response_id: str, created_at: int, model: str) -> dict[str, Any]:
    """A response that has just begun: what it was asked, and no answer yet."""
    request = plan.request
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
        "previous_response_id": request.previous_response_id,
        "conversation": None if conversation is None else {"id": conversation.id},
        "instructions": plan.instructions,
        "output": [],
        "usage": None,
        **_settings(plan),
    }


def _settings(plan: Plan) -> dict[str, Any]:
    """How it was to be answered, the defaults filled in."""
    request = plan.request
    sampling = plan.sampling
    return {
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.is_kept,
        "temperature": sampling.temperature,
        "text": _text(plan),
        "tool_choice": _tool_choice(plan),
        "tools": list(plan.tools),
        "top_logprobs": sampling.top_logprobs,
        "top_p": sampling.top_p,
        "truncation": request.truncation or "auto",
        "user": request.user,
    }


def _text(plan: Plan) -> dict[str, Any]:
    text = plan.request.text
    wanted = {"type": "text"} if text is None else text.format.model_dump(by_alias=True)
    return {"format": wanted, "verbosity": "medium"}


def _tool_choice(plan: Plan) -> Any:
    wanted = plan.request.tool_choice
    if wanted is None or isinstance(wanted, str):
        return wanted or "auto"
    return wanted.model_dump()


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


def failed(body: dict[str, Any], output: list[Item], message: str, status: int) -> dict[str, Any]:
    """The response, broken off by an error that HTTP would tell as `status`."""
    code = "rate_limit_exceeded" if status == 429 else "server_error"
    return body | {"status": "failed", "error": {"code": code, "message": message}, "output": output}


class EventWriter:
    """Writes one stream's events: typed, and numbered from 0."""

    def __init__(self) -> None:
        self._next = 0

    def write(self, events: Iterable[Event]) -> bytes:
        """The events as they go over the wire, in one piece."""
        return b"".join(self._write(event) for event in events)

    def _write(self, event: Event) -> bytes:
        numbered = {**event, "sequence_number": self._next}
        self._next += 1
        # ASCII, because a client may have sent half of a surrogate pair and gets it back.
        data = json.dumps(numbered, separators=(",", ":"))
        return f"event: {event['type']}\ndata: {data}\n\n".encode("ascii")


class OutputWriter:
    """Takes an answer piece by piece, and gives the events that tell it if `tells_events`.

    With `reads_calls`, function calls in the text become items of their own. `output` is what there is so
    far, as the API lists it.
    """

    def __init__(self, *, reads_calls: bool, with_logprobs: bool, tells_events: bool) -> None:
        self.output: list[Item] = []
        self._parser = ToolCallParser() if reads_calls else None
        self._with_logprobs = with_logprobs
        self._tells_events = tells_events
        self._events: list[Event] = []
        self._text = ""
        self._is_cut = False
        self._open: _OpenMessage | _OpenCall | None = None
        # Tokens whose text the parser still holds back; they go with the text that it lets go next.
        self._tokens: list[TextToken] = []

    def feed(self, piece: Piece) -> list[Event]:
        """What this piece adds."""
        self._text += piece.text
        if self._with_logprobs:
            self._tokens += piece.tokens
        if self._parser is not None:
            self._read(self._parser.feed(piece.text))
        elif piece.text:
            self._say(piece.text)
        return self._take_events()

    def finish(self, *, is_complete: bool) -> list[Event]:
        """What ends the answer. One that was cut short leaves its last item incomplete."""
        self._is_cut = not is_complete
        if self._parser is not None:
            self._read(self._parser.finish())
        if not self.output:
            self._message()
        if self._tokens and isinstance(self._open, _OpenMessage):
            self._say("")
        self._close("completed" if is_complete else "incomplete")
        return self._take_events()

    def message(self) -> Message:
        """The answer as the message that a conversation keeps."""
        calls = [item for item in self.output if item["type"] == "function_call"]
        whole = [item for item in calls if item["status"] == "completed"]
        if self._is_cut and self._parser is not None and not whole:
            return Message("assistant", self._text)  # half a call is no call, but it was said
        said = [item["content"][0]["text"] for item in self.output if item["type"] == "message"]
        called = tuple(ToolCall(item["call_id"], item["name"], item["arguments"]) for item in whole)
        return Message("assistant", "\n".join(said), tool_calls=called)

    def _read(self, events: Sequence[ToolEvent]) -> None:
        for event in events:
            match event:
                case TextPiece(text):
                    self._say(text)
                case CallBegin(_, name):
                    self._begin(_OpenCall(len(self.output), name))
                case ArgumentsPiece(_, text):
                    self._argue(text)
                case _:
                    self._close("completed")

    def _say(self, text: str) -> None:
        message = self._message()
        logprobs = [logprob_of(token) for token in self._tokens]
        self._tokens.clear()
        message.say(text, logprobs)
        self._tell(message.said(text, logprobs))

    def _argue(self, text: str) -> None:
        call = self._open
        assert isinstance(call, _OpenCall), "arguments belong to a call"
        self._tokens.clear()
        call.argue(text)
        self._tell(call.argued(text))

    def _message(self) -> "_OpenMessage":
        """The message that is being said, begun if there is none."""
        message = self._open
        if not isinstance(message, _OpenMessage):
            message = _OpenMessage(len(self.output))
            self._begin(message)
        return message

    def _begin(self, item: "_OpenMessage | _OpenCall") -> None:
        self._close("completed")
        self._open = item
        self.output.append(item.item)
        self._tell(item.begun())

    def _close(self, status: str) -> None:
        if self._open is not None:
            self._open.close(status)
            self._tell(self._open.closed())
            self._open = None

    def _tell(self, events: Iterator[Event]) -> None:
        """These are generators: events that nobody reads are never made."""
        if self._tells_events:
            self._events += events

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class _OpenMessage:
    """A message that is being said."""

    def __init__(self, index: int) -> None:
        self.item: Item = {
            "id": new_id("msg"),
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        self._at = {"item_id": self.item["id"], "output_index": index, "content_index": 0}
        self._index = index
        self._said: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def say(self, text: str, logprobs: Sequence[dict[str, Any]]) -> None:
        self._said.append(text)
        self._logprobs += logprobs

    def close(self, status: str) -> None:
        part = output_text("".join(self._said), self._logprobs)
        self.item |= {"status": status, "content": [part]}

    def begun(self) -> Iterator[Event]:
        yield _item_event("added", self._index, self.item)
        yield {"type": "response.content_part.added", **self._at, "part": output_text("")}

    def said(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        yield {"type": "response.output_text.delta", **self._at, "delta": text, "logprobs": list(logprobs)}

    def closed(self) -> Iterator[Event]:
        [part] = self.item["content"]
        yield {
            "type": "response.output_text.done",
            **self._at,
            "text": part["text"],
            "logprobs": self._logprobs,
        }
        yield {"type": "response.content_part.done", **self._at, "part": part}
        yield _item_event("done", self._index, self.item)


class _OpenCall:
    """A function call that is being written."""

    def __init__(self, index: int, name: str) -> None:
        self.item: Item = {
            "id": new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": new_id("call"),
            "name": name,
            "arguments": "",
        }
        self._at = {"item_id": self.item["id"], "output_index": index}
        self._index = index
        self._written: list[str] = []

    def argue(self, text: str) -> None:
        self._written.append(text)

    def close(self, status: str) -> None:
        self.item |= {"status": status, "arguments": "".join(self._written)}

    def begun(self) -> Iterator[Event]:
        yield _item_event("added", self._index, self.item)

    def argued(self, text: str) -> Iterator[Event]:
        yield {"type": "response.function_call_arguments.delta", **self._at, "delta": text}

    def closed(self) -> Iterator[Event]:
        yield {
            "type": "response.function_call_arguments.done",
            **self._at,
            "name": self.item["name"],
            "arguments": self.item["arguments"],
        }
        yield _item_event("done", self._index, self.item)


def _item_event(what: str, index: int, item: Item) -> Event:
    # A copy: the item goes on, and an event tells one moment.
    return {"type": f"response.output_item.{what}", "output_index": index, "item": dict(item)}
