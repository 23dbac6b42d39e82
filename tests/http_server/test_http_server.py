"""The life of an HTTP server: it drains, nobody can hold that up, and clients learn of a lost device."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from kakeya import loading
from kakeya.http_server import HttpServer, app
from kakeya.runtime import Runtime
from kakeya.serving.config import AdmissionConfig
from support import odd_routes
from support.engines import REASON, device_of, open_breakable
from support.http_serving import ANY_PORT, client_of, connection_to, eventually, serving_http, start
from support.odd_routes import seen
from support.serving import ENGINE, on_loop


@pytest.fixture(autouse=True)
def odd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_ROUTERS", (*app._ROUTERS, odd_routes.router))
    seen.clear()


class Asking(threading.Thread):
    """A request that a thread waits for."""

    def __init__(self, server: HttpServer, method: str, path: str, body: object = None) -> None:
        super().__init__()
        self._server, self._method, self._path, self._body = server, method, path, body
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        with client_of(self._server) as client:
            try:
                self.answer = client.request(self._method, self._path, json=self._body)
            except httpx.TransportError:
                pass

    def ended(self) -> httpx.Response | None:
        self.join(20)
        assert not self.is_alive()
        return self.answer


@pytest.fixture
def narrow() -> Iterator[HttpServer]:
    """One place to work in."""
    server = start(ANY_PORT, AdmissionConfig(max_concurrent=1))
    yield server
    on_loop(server.stop(0))


def test_who_waits_for_a_place_is_told(narrow: HttpServer) -> None:
    running = Asking(narrow, "POST", "/odd/work")
    eventually(lambda: seen["begun"] == 1)
    waiting = Asking(narrow, "POST", "/odd/work")
    eventually(lambda: narrow.state.admission.waiting == 1)
    on_loop(narrow.refuse())
    answer = waiting.ended()
    assert answer is not None
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert answer.headers["retry-after"] == "1"
    assert running.is_alive()
    on_loop(narrow.stop(0.1))
    assert running.ended() is None
    assert (seen["ended"], narrow.state.admission.running) == (1, 0)


def test_a_stop_keeps_to_its_grace_whatever_clients_do() -> None:
    server = start()
    with connection_to(server) as flooded, connection_to(server) as idle:
        flooded.sendall(b"GET /odd/flood HTTP/1.1\r\nHost: localhost\r\n\r\n")
        idle.sendall(b"GET /hea")
        eventually(lambda: seen["chunks"] > 1)
        began = time.monotonic()
        on_loop(server.stop(0.5))
        assert time.monotonic() - began < 10
        assert (seen["closed"], seen["released"]) == (1, 1)
    with pytest.raises(ConnectionRefusedError):
        connection_to(server)


def test_a_stop_lets_an_answer_finish() -> None:
    server = start(replace(ANY_PORT, request_timeout_s=0.6))
    asking = Asking(server, "GET", "/odd/stream?ending=wait")
    eventually(lambda: server._uvicorn is not None and server._uvicorn.server_state.tasks)
    on_loop(server.stop(5))
    answer = asking.ended()
    assert answer is not None
    assert answer.text.count("data: ") == 3


def test_a_server_that_never_started_can_be_stopped() -> None:
    async def life() -> None:
        await HttpServer(ANY_PORT).stop(0)

    on_loop(life())


def test_an_interrupt_ends_every_stream() -> None:
    class Stream:
        cancelled = False

        def cancel(self) -> None:
            self.cancelled = True

    server = start()
    streams = [Stream(), Stream()]
    server.state.streams.update(streams)  # type: ignore[arg-type]
    server.interrupt()
    assert [stream.cancelled for stream in streams] == [True, True]
    assert server.state.interrupted
    on_loop(server.drain(0))


# With a model.

ENDLESS = {"max_tokens": 2**30, "logit_bias": {"0": -100}}


def post(server: HttpServer, path: str, **fields: object) -> Asking:
    model = server.state.require_loaded().runtime.describe().model
    return Asking(server, "POST", path, {"model": model, **fields})


def chat(server: HttpServer, **fields: object) -> Asking:
    return post(server, "/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], **fields)


@pytest.fixture
def loaded(model: Path) -> Iterator[HttpServer]:
    """A server with a runtime, which the test drains itself."""
    runtime = Runtime.open(str(model), ENGINE)
    server = start()
    on_loop(server.open(runtime))
    yield server
    runtime.close()


def test_a_drain_lets_finish_what_can(loaded: HttpServer) -> None:
    asked = [chat(loaded, max_tokens=200, logit_bias={"0": -100}, stream=stream) for stream in (False, True)]
    eventually(lambda: len(loaded.state.streams) == 2)
    assert on_loop(loaded.drain(20)) is True
    whole, streamed = (each.ended() for each in asked)
    assert whole is not None
    assert whole.json()["usage"]["completion_tokens"] == 200
    assert streamed is not None
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_a_drain_tells_the_others_and_keeps_to_its_grace(loaded: HttpServer) -> None:
    asked = [
        chat(loaded, **ENDLESS),
        chat(loaded, **ENDLESS, stream=True),
        post(loaded, "/v1/completions", prompt="Hello", **ENDLESS, stream=True),
        post(loaded, "/v1/completions", prompt="Hello", **ENDLESS),
    ]
    eventually(lambda: len(loaded.state.streams) == 4)
    began = time.monotonic()
    assert on_loop(loaded.drain(1.0)) is False
    assert time.monotonic() - began < 10
    answers = [each.ended() for each in asked]
    for answer in answers:
        assert answer is not None
        assert "the server is shutting down" in answer.text
    assert [answer.status_code for answer in answers if answer is not None] == [503, 200, 200, 503]
    assert (loaded.state.admission.running, len(loaded.state.streams)) == (0, 0)


def test_a_draining_server_takes_no_new_work_but_answers(loaded: HttpServer) -> None:
    endless = chat(loaded, **ENDLESS)
    eventually(lambda: loaded.state.streams)
    on_loop(loaded.refuse())
    for path, fields in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/responses", {"input": "Hello"}),
    ):
        refused = post(loaded, path, **fields).ended()
        assert refused is not None
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "the server is shutting down" in refused.json()["error"]["message"]
    with client_of(loaded) as client:
        assert client.get("/readyz").status_code == 503
        assert client.get("/v1/models").status_code == 200
    on_loop(loaded.drain(0.5))
    endless.ended()


# A device that fails for good.


@pytest.fixture
def breakable(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HttpServer, Runtime]]:
    monkeypatch.setattr(loading, "open_backend", open_breakable)
    with serving_http(model) as live:
        yield live


def test_clients_of_a_lost_device_are_told_and_the_probes_fail(
    breakable: tuple[HttpServer, Runtime],
) -> None:
    server, runtime = breakable
    asked = [chat(server, **ENDLESS, stream=stream) for stream in (False, True)]
    eventually(lambda: len(server.state.streams) == 2)
    with client_of(server) as client:
        assert client.get("/readyz").status_code == client.get("/healthz").status_code == 200
        device_of(runtime).breaks_at = "result"
        whole, streamed = (each.ended() for each in asked)
        assert whole is not None
        assert streamed is not None
        assert (whole.status_code, whole.json()["error"]["message"]) == (503, REASON)
        assert streamed.status_code == 200
        assert REASON in streamed.text
        for answer in (client.get("/readyz"), client.get("/healthz"), chat(server).ended()):
            assert answer is not None
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, REASON)
        assert client.head("/healthz").status_code == 503
        assert "kakeya_requests_running 0.0" in client.get("/metrics").text
    assert server.state.admission.running == 0
