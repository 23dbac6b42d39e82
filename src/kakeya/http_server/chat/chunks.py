"""Chat completions as they go over the wire: one object, or a stream of chunks."""

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from kakeya.http_server.chat.choice import Choice, Delta
from kakeya.http_server.generation import TextToken, Usage
from kakeya.http_server.sse import STREAM_END, sse


def total_usage(usages: Iterable[Usage]) -> Usage:
    """What several answers to one prompt took together: the prompt counts once."""
    first, *others = usages
    return Usage(
        prompt_tokens=first.prompt_tokens,
        completion_tokens=first.completion_tokens + sum(each.completion_tokens for each in others),
        cached_tokens=first.cached_tokens,
        dropped_tokens=max([first.dropped_tokens, *(each.dropped_tokens for each in others)]),
    )


class ChatWriter:
    """Writes one chat completion. Log-probabilities are there if they were asked for."""

    def __init__(self, model: str, fingerprint: str, *, logprobs: bool, includes_usage: bool) -> None:
        self._logprobs = logprobs
        self._includes_usage = includes_usage
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The completion in one object."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(choice) for choice in choices],
            "usage": total_usage(choice.answer.usage for choice in choices).to_chat(),
        }

    def opening(self, index: int) -> bytes:
        """The chunk that comes before anything a choice says."""
        return self._chunk(index, {"role": "assistant", "content": "", "refusal": None}, (), None)

    def delta(self, index: int, delta: Delta) -> bytes:
        """What is new."""
        said: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.call is not None:
            said["tool_calls"] = [_call_delta(delta)]
        return self._chunk(index, said, delta.tokens, delta.finish_reason)

    def ending(self, choices: Sequence[Choice]) -> bytes:
        """What comes after the last choice has ended."""
        if not self._includes_usage:
            return STREAM_END
        usage = total_usage(choice.answer.usage for choice in choices).to_chat()
        return (
            sse({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}) + STREAM_END
        )

    def _chunk(
        self, index: int, delta: dict[str, Any], tokens: Sequence[TextToken], finish_reason: str | None
    ) -> bytes:
        logprobs = {"content": [_logprob(token) for token in tokens], "refusal": None} if tokens else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return sse({**chunk, "usage": None} if self._includes_usage else chunk)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        said = choice.content if choice.content or not choice.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
        if choice.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in choice.calls
            ]
        logprobs = {"content": [_logprob(token) for token in choice.tokens], "refusal": None}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs if self._logprobs else None,
            "finish_reason": choice.finish_reason,
        }


def _call_delta(delta: Delta) -> dict[str, Any]:
    assert delta.call is not None
    call = delta.call
    if call.id:
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": call.id, "type": "function", "function": function}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _logprob(token: TextToken) -> dict[str, Any]:
    return {
        "token": token.text,
        "bytes": token.bytes,
        "logprob": token.logprob,
        "top_logprobs": [
            {"token": text, "bytes": data, "logprob": logprob} for text, data, logprob in token.top
        ],
    }
