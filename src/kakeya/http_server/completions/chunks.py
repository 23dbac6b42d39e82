"""Completions as they go over the wire: one object, or a stream of chunks."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from kakeya.http_server.completions.choice import CompletionChoice, CompletionDelta
from kakeya.http_server.generation import TextToken, Usage
from kakeya.http_server.sse import STREAM_END, sse


class CompletionWriter:
    """Writes one completion. Log-probabilities are there if they were asked for."""

    def __init__(self, model: str, fingerprint: str, *, logprobs: bool, includes_usage: bool) -> None:
        self._logprobs = logprobs
        self._includes_usage = includes_usage
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, choices: Sequence[CompletionChoice]) -> dict[str, Any]:
        """The completion in one object."""
        return {
            **self._head,
            "choices": [
                self._choice(choice.index, choice.text, choice.tokens, choice.finish_reason)
                for choice in choices
            ],
            "usage": _usage(choices),
        }

    def delta(self, index: int, delta: CompletionDelta) -> bytes:
        """What is new."""
        choice = self._choice(index, delta.text, delta.tokens, delta.finish_reason)
        chunk = {**self._head, "choices": [choice]}
        return sse({**chunk, "usage": None} if self._includes_usage else chunk)

    def ending(self, choices: Sequence[CompletionChoice]) -> bytes:
        """What comes after the last choice has ended."""
        if not self._includes_usage:
            return STREAM_END
        return sse({**self._head, "choices": [], "usage": _usage(choices)}) + STREAM_END

    def _choice(
        self, index: int, text: str, tokens: Sequence[TextToken], finish_reason: str | None
    ) -> dict[str, Any]:
        logprobs = _logprobs(tokens) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _usage(choices: Sequence[CompletionChoice]) -> dict[str, Any]:
    """Of all choices together; each prompt counts once."""
    first_of = {id(choice.prompt): choice.usage for choice in reversed(choices)}
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in first_of.values()),
        completion_tokens=sum(choice.usage.completion_tokens for choice in choices),
        cached_tokens=0,
        dropped_tokens=sum(usage.dropped_tokens for usage in first_of.values()),
    ).to_chat()


def _logprobs(tokens: Sequence[TextToken]) -> dict[str, Any]:
    return {
        "tokens": [_name(token.text, token.bytes) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_top(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _top(token: TextToken) -> dict[str, float] | None:
    """The most probable tokens, and the one that it was; nothing for a token that nothing comes before."""
    if token.logprob is None:
        return None
    named = {_name(text, data): logprob for text, data, logprob in reversed(token.top)}
    return {**named, _name(token.text, token.bytes): token.logprob}


def _name(text: str, data: list[int]) -> str:
    """A token's text, or its bytes where they are part of a character only: names must differ."""
    return text if "\ufffd" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
