"""Short ways to talk to the chat and completion routes, and answers that are spelt in one way only."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from kakeya.runtime import Runtime
from kakeya.types import SamplingParams, TokenEvent

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# Letters that the test vocabulary never merges: what is said with them has one tokenization.
LETTERS = "QZKXJW"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def letter_bias(runtime: Runtime) -> dict[str, int]:
    """Makes the model speak in LETTERS alone, without an end."""
    return {str(runtime.tokenizer.encode(letter)[0]): 100 for letter in LETTERS}


class Talker:
    """Posts to one server."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        self.client = client
        self.model = model

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.client.post(path, json={"model": self.model, **fields})

    def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """The completion's body."""
        return _good(self.post(CHAT, messages=messages, **fields))

    def text(self, prompt: object, **fields: Any) -> dict[str, Any]:
        return _good(self.post(TEXT, prompt=prompt, **fields))

    def refusal(self, path: str = CHAT, **fields: Any) -> tuple[int, dict[str, Any]]:
        """The status and the error."""
        answer = self.post(path, **fields)
        assert answer.status_code >= 400, answer.text
        return answer.status_code, answer.json()["error"]

    def stream(self, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
        """Every chunk of a stream that ends well."""
        with self.streaming(path, **fields) as events:
            chunks = list(events)
        assert chunks.pop() == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]

    @contextmanager
    def streaming(self, path: str = CHAT, **fields: Any) -> Iterator[Iterator[str]]:
        """The data of the events, as they come."""
        body = {"model": self.model, "stream": True, **fields}
        with self.client.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield (line.removeprefix("data: ") for line in answer.iter_lines() if line)


def _good(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def spelt(runtime: Runtime, token_id: int) -> list[int]:
    """A token's bytes. The test model has tokens that its tokenizer does not know: they have none."""
    known = token_id < runtime.tokenizer.vocab_size
    return list(runtime.tokenizer.token_bytes(token_id)) if known else []


def decoded(runtime: Runtime, events: list[TokenEvent]) -> str:
    ids = [event.token_id for event in events if event.token_id < runtime.tokenizer.vocab_size]
    return runtime.tokenizer.decode(ids)


def content_of(body: dict[str, Any], index: int = 0) -> str:
    content: str = body["choices"][index]["message"]["content"]
    return content


def streamed_content(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def logprobs_of(body: dict[str, Any], index: int = 0) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = body["choices"][index]["logprobs"]["content"]
    return told


def generated(
    runtime: Runtime, token_ids: list[int], count: int, sampling: SamplingParams, pinned: int | None = None
) -> list[TokenEvent]:
    """What the runtime itself says after these tokens, without a server."""
    session_id = runtime.create_session(owner="reference", pinned_prefix_tokens=pinned)
    try:
        runtime.append(session_id, token_ids, owner="reference")
        events = list(runtime.generate(session_id, count, sampling, owner="reference"))
    finally:
        runtime.close_session(session_id, owner="reference")
    return [event for event in events if isinstance(event, TokenEvent)]
