"""An answer's text as the Responses API tells it: output items, and the events that build them up."""

from collections.abc import Iterator, Sequence
from typing import Any

from kakeya.http_server.generation import Piece, TextToken
from kakeya.http_server.prompting import Message, ToolCall
from kakeya.http_server.responses.items import Item, new_id, output_text
from kakeya.text.tool_calls import ArgumentsPiece, CallBegin, CallEnd, TextPiece, ToolCallParser

Event = dict[str, Any]


class OutputWriter:
    """Takes an answer piece by piece and gives the events that tell it.

    With `reads_calls`, function calls in the text become items of their own. `output` is what there is so
    far, as the API lists it.
    """

    def __init__(self, *, reads_calls: bool, with_logprobs: bool) -> None:
        self.output: list[Item] = []
        self._parser = ToolCallParser() if reads_calls else None
        self._with_logprobs = with_logprobs
        self._text = ""
        self._is_cut = False
        self._open: _OpenMessage | _OpenCall | None = None
        # Tokens whose text the parser still holds back; they go with the text that it lets go next.
        self._tokens: list[TextToken] = []

    def feed(self, piece: Piece) -> Iterator[Event]:
        """What this piece adds."""
        self._text += piece.text
        if self._with_logprobs:
            self._tokens += piece.tokens
        if self._parser is not None:
            for event in self._parser.feed(piece.text):
                yield from self._told(event)
        elif piece.text:
            yield from self._told(TextPiece(piece.text))

    def finish(self, *, is_complete: bool) -> Iterator[Event]:
        """What ends the answer. One that was cut short leaves its last item incomplete."""
        self._is_cut = not is_complete
        if self._parser is not None:
            for event in self._parser.finish():
                yield from self._told(event)
        if not self.output:
            yield from self._message_opened()
        if self._tokens and isinstance(self._open, _OpenMessage):
            yield from self._say("")
        yield from self._closed("completed" if is_complete else "incomplete")

    def message(self) -> Message:
        """The answer as the message that a conversation keeps."""
        calls = [item for item in self.output if item["type"] == "function_call"]
        whole = [item for item in calls if item["status"] == "completed"]
        if self._is_cut and self._parser is not None and not whole:
            return Message("assistant", self._text)  # half a call is no call, but it was said
        said = [item["content"][0]["text"] for item in self.output if item["type"] == "message"]
        called = tuple(ToolCall(item["call_id"], item["name"], item["arguments"]) for item in whole)
        return Message("assistant", "\n".join(said), tool_calls=called)

    def _told(self, event: TextPiece | CallBegin | ArgumentsPiece | CallEnd) -> Iterator[Event]:
        match event:
            case TextPiece(text=text):
                if not isinstance(self._open, _OpenMessage):
                    yield from self._message_opened()
                yield from self._say(text)
            case CallBegin(name=name):
                yield from self._call_opened(name)
            case ArgumentsPiece(text=text):
                yield from self._argued(text)
            case _:
                yield from self._closed("completed")

    def _say(self, text: str) -> Iterator[Event]:
        message = self._open
        assert isinstance(message, _OpenMessage), "text belongs to a message"
        logprobs = [_logprob(token) for token in self._tokens]
        self._tokens.clear()
        yield message.say(text, logprobs)

    def _argued(self, text: str) -> Iterator[Event]:
        call = self._open
        assert isinstance(call, _OpenCall), "arguments belong to a call"
        self._tokens.clear()
        yield call.argue(text)

    def _message_opened(self) -> Iterator[Event]:
        yield from self._closed("completed")
        message = self._open = _OpenMessage(len(self.output))
        self.output.append(message.item)
        yield from message.opened()

    def _call_opened(self, name: str) -> Iterator[Event]:
        yield from self._closed("completed")
        call = self._open = _OpenCall(len(self.output), name)
        self.output.append(call.item)
        yield from call.opened()

    def _closed(self, status: str) -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.closed(status)
            self._open = None


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

    def opened(self) -> Iterator[Event]:
        yield _item_event("added", self._index, self.item)
        yield {"type": "response.content_part.added", **self._at, "part": output_text("")}

    def say(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Event:
        self._said.append(text)
        self._logprobs += logprobs
        return {"type": "response.output_text.delta", **self._at, "delta": text, "logprobs": list(logprobs)}

    def closed(self, status: str) -> Iterator[Event]:
        text = "".join(self._said)
        part = output_text(text, self._logprobs)
        self.item |= {"status": status, "content": [part]}
        yield {
            "type": "response.output_text.done",
            **self._at,
            "text": text,
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

    def opened(self) -> Iterator[Event]:
        yield _item_event("added", self._index, self.item)

    def argue(self, text: str) -> Event:
        self._written.append(text)
        return {"type": "response.function_call_arguments.delta", **self._at, "delta": text}

    def closed(self, status: str) -> Iterator[Event]:
        arguments = "".join(self._written)
        self.item |= {"status": status, "arguments": arguments}
        yield {
            "type": "response.function_call_arguments.done",
            **self._at,
            "name": self.item["name"],
            "arguments": arguments,
        }
        yield _item_event("done", self._index, self.item)


def _item_event(what: str, index: int, item: Item) -> Event:
    # A copy: the item goes on, and an event tells one moment.
    return {"type": f"response.output_item.{what}", "output_index": index, "item": dict(item)}


def _logprob(token: TextToken) -> dict[str, Any]:
    top = [{"token": text, "bytes": data, "logprob": logprob} for text, data, logprob in token.top]
    return {"token": token.text, "bytes": token.bytes, "logprob": token.logprob, "top_logprobs": top}
