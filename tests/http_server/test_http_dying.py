"""A device that fails for good, seen over HTTP: clients are told, and neither probe passes any more."""

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kakeya import loading
from kakeya.http_server import HttpServer
from kakeya.runtime import Runtime
from support.breaking import REASON, device_of, open_breakable
from support.http_serving import client_of, eventually, serving_http

ENDLESS = {"max_tokens": 2**30, "logit_bias": {"0": -100}}


@pytest.fixture
def breakable(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HttpServer, Runtime]]:
    monkeypatch.setattr(loading, "open_backend", open_breakable)
    with serving_http(model) as live:
        yield live


def chat(client: httpx.Client, **fields: object) -> httpx.Response:
    model = client.get("/v1/models").json()["data"][0]["id"]
    messages = [{"role": "user", "content": "Hello"}]
    return client.post("/v1/chat/completions", json={"model": model, "messages": messages, **fields})


def test_clients_are_told_and_the_probes_fail(breakable: tuple[HttpServer, Runtime]) -> None:
    server, runtime = breakable
    answers: dict[bool, httpx.Response] = {}

    def ask(*, stream: bool) -> None:
        with client_of(server) as client:
            answers[stream] = chat(client, **ENDLESS, stream=stream)

    asking = [threading.Thread(target=ask, kwargs={"stream": stream}) for stream in (False, True)]
    for thread in asking:
        thread.start()
    eventually(lambda: len(server.state.streams) == 2)
    with client_of(server) as client:
        assert client.get("/readyz").status_code == client.get("/healthz").status_code == 200
        device_of(runtime).breaks_at = "result"
        for thread in asking:
            thread.join(20)
        whole, streamed = answers[False], answers[True]
        assert (whole.status_code, whole.json()["error"]["message"]) == (503, REASON)
        assert streamed.status_code == 200
        assert REASON in streamed.text
        for answer in (client.get("/readyz"), client.get("/healthz"), chat(client)):
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, REASON)
        assert client.head("/healthz").status_code == 503
        assert "kakeya_requests_running 0.0" in client.get("/metrics").text
    assert server.state.admission.running == 0
