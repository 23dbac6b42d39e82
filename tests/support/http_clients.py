"""Short ways to ask the HTTP server: chats, completions and responses."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from kakeya.config import CacheConfig, EngineConfig, RuntimeConfig
from kakeya.http_server import HttpServer
from kakeya.http_server.responses.records import Record, Tree
from kakeya.http_server.text_sessions import TextSession
from kakeya.runtime import Runtime
from kakeya.serving.config import AdmissionConfig, HttpConfig
from kakeya.text.prompting import Message
from kakeya.types import SamplingParams, TokenEvent
from support import serving
from support.http_serving import ANY_PORT, serving_http

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


def counted(body: dict[str, Any]) -> dict[str, Any]:
    """The usage without the drafts, of which there are as many as paid at the time."""
    return {name: value for name, value in body["usage"].items() if name != "completion_tokens_details"}


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


OWNER = "local"
# Of 8 slabs, 2 may be branch points.
ENGINE = replace(serving.ENGINE, cache=CacheConfig(sink=2, window=398, spare=8), capacity=8)
GREEDY = {"temperature": 0, "max_output_tokens": 6}


@dataclass
class Responding:
    """A server, its runtime, and clients of it."""

    server: HttpServer
    runtime: Runtime
    http: httpx.Client
    openai: OpenAI

    def ask(self, asked: Any, /, **fields: Any) -> dict[str, Any]:
        """The response to `asked`: greedy and short, unless said otherwise."""
        answer = self._post("/v1/responses", {"input": asked, **GREEDY, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, status: int, path: str = "/v1/responses", **fields: Any) -> dict[str, Any]:
        """The error that a request meets."""
        answer = self._post(path, fields)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]

    def _post(self, path: str, fields: dict[str, Any]) -> httpx.Response:
        # ASCII, as other clients than httpx write it: what is not Unicode text must get there, too.
        headers = {"content-type": "application/json"}
        return self.http.post(path, content=json.dumps(fields), headers=headers)

    def sessions(self, owner: str = OWNER) -> dict[str, int]:
        """The history length of every session there is, by id."""
        infos = self.runtime.list_sessions(owner=owner)[0]
        return {info.session_id: info.history_length for info in infos}


@contextmanager
def responding(
    model: Path,
    engine: EngineConfig = ENGINE,
    config: HttpConfig = ANY_PORT,
    sessions: RuntimeConfig = RuntimeConfig(),  # noqa: B008 (frozen)
    admission: AdmissionConfig = AdmissionConfig(),  # noqa: B008 (frozen)
    key: str = "",
) -> Iterator[Responding]:
    """A server of its own, and clients that use it with `key`."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with (
        serving_http(model, config, engine, sessions, admission) as (server, runtime),
        httpx.Client(base_url=server.url, headers=headers, timeout=30, trust_env=False) as http,
        httpx.Client(timeout=30, trust_env=False) as transport,
        OpenAI(
            base_url=f"{server.url}/v1", api_key=key or "none", max_retries=0, http_client=transport
        ) as openai,
    ):
        yield Responding(server, runtime, http, openai)


def record_of(name: str, parent: Record | None = None, **fields: Any) -> Record:
    """A stored response, not yet in a store."""
    made = {
        "id": name,
        "owner": "me",
        "tree": Tree() if parent is None else parent.tree,
        "parent": parent,
        "conversation_id": None,
        "instructions": None,
        "tools": (),
        "messages": (Message("user", name), Message("assistant", name.upper())),
        "input_items": [{"id": name}],
        "body": {"output": [{"id": name.upper()}]},
        "session": TextSession("me", frozenset(), session_id=name),
    }
    return Record(**{**made, **fields})


def text_of(response: dict[str, Any]) -> str:
    """All that was said."""
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def history(response: dict[str, Any]) -> int:
    """How long the history is after a response."""
    return response["usage"]["total_tokens"]


def cached(response: dict[str, Any]) -> int:
    return response["usage"]["input_tokens_details"]["cached_tokens"]
