"""An answer as the Messages API tells it: in one object, or as the events that build it up."""

import json
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from kakeya.http_server.completions.chat import ChatChoice
from kakeya.http_server.completions.completion import Delta
from kakeya.http_server.errors import MESSAGES, error_event
from kakeya.http_server.generation import Usage
from kakeya.http_server.streaming import named_sse
from kakeya.text.prompting import ToolCall

Event = dict[str, Any]

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageAnswer:
    """Tells one choice. Text and each call are content blocks of their own."""

    def __init__(self, model: str, choice: ChatChoice) -> None:
        self._choice = choice
        self._head: Event = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._has_begun = False
        self._blocks = 0
        self._open: str | None = None
        """What kind the block is that is being told: of text, or of a call."""

    async def whole(self) -> dict[str, Any]:
        """The message in one object, when all of it is there. A call that was cut off is no part of it."""
        async with aclosing(self._choice.deltas()) as deltas:
            async for _ in deltas:
                pass  # the choice remembers what it said
        text = [{"type": "text", "text": self._choice.text}] if self._choice.text else []
        calls = [_told_call(call, json.loads(call.arguments)) for call in self._choice.whole_calls]
        usage = self._choice.usage.to_messages()
        return {**self._head, "content": [*text, *calls], **self._told_end(), "usage": usage}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The message as server-sent events. An error is the last of them."""
        try:
            async with aclosing(self._choice.deltas()) as deltas:
                async for delta in deltas:
                    yield _written(self._tell(delta))
        except Exception as error:
            yield error_event(error, MESSAGES)

    def _begin(self) -> Iterator[Event]:
        # Not before the first token: until then other sessions may still spare it parts of the prompt.
        self._has_begun = True
        answer = self._choice.answer
        usage = Usage(answer.token_counts[0], cached_tokens=answer.cached_tokens).to_messages()
        no_end = {"stop_reason": None, "stop_sequence": None}
        message = {**self._head, "content": [], **no_end, "usage": usage}
        yield {"type": "message_start", "message": message}
        yield {"type": "ping"}

    def _tell(self, delta: Delta) -> Iterator[Event]:
        call = delta.call
        if not self._has_begun:
            yield from self._begin()
        if delta.text:
            if self._open != "text":
                yield from self._start({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta.text})
        if call is not None and call.id:
            yield from self._start(_told_call(ToolCall(call.id, call.name, ""), {}))
        elif call is not None:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        if delta.finish_reason is not None:
            yield from self._stop()
            usage = self._choice.usage.to_messages()
            yield {"type": "message_delta", "delta": self._told_end(), "usage": usage}
            yield {"type": "message_stop"}

    def _start(self, block: Event) -> Iterator[Event]:
        yield from self._stop()
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._blocks, "content_block": block}

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}

    def _stop(self) -> Iterator[Event]:
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._blocks}
            self._open = None
            self._blocks += 1

    def _told_end(self) -> Event:
        stop = self._choice.answer.stopped_by
        reason = "stop_sequence" if stop is not None else _STOP_REASONS[self._choice.finish_reason]
        return {"stop_reason": reason, "stop_sequence": stop}


def _told_call(call: ToolCall, arguments: Any) -> Event:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _written(events: Iterator[Event]) -> bytes:
    return b"".join(named_sse(event["type"], event) for event in events)
