"""The Responses API over a tiny model that can talk, and short ways to ask it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from kakeya.config import AdmissionConfig, CacheConfig, EngineConfig, HttpConfig, RuntimeConfig
from kakeya.http_server import HttpServer
from kakeya.runtime import Runtime
from support import serving
from support.http_serving import ANY_PORT, serving_http

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


def text_of(response: dict[str, Any]) -> str:
    """All that was said."""
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def history(response: dict[str, Any]) -> int:
    """How long the history is after a response."""
    return response["usage"]["total_tokens"]


def cached(response: dict[str, Any]) -> int:
    return response["usage"]["input_tokens_details"]["cached_tokens"]
